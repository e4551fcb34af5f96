"""Model cards: plain text from foreign checkpoints, ordinals, no times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from slowfast_lara.config import load_config
from slowfast_lara.inference.export import export
from slowfast_lara.inference.load import load
from slowfast_lara.runs import checkpoint
from tests.helpers.small_models import ModelFiles, small_config, write_model

HOSTILE = "x`|\n\n# Owned\r| a | b |<img src=x>[click](https://example.com)\u202e"


def card_of(files: ModelFiles, out: Path, form: str = "safetensors") -> str:
    export(load(files.checkpoint), out, form)
    return (out / "README.md").read_bytes().decode()


def with_config(files: ModelFiles, name: str = "model.pyth", **content: object) -> ModelFiles:
    """Store the config in the checkpoint, as a training does."""
    path = Path(files.checkpoint).with_name(name)
    saved = torch.load(files.checkpoint, weights_only=True)
    checkpoint.save(str(path), {**saved, "cfg": load_config(files.cfg).dump(), **content})
    return ModelFiles(files.cfg, str(path))


def test_text_of_a_foreign_checkpoint_is_no_markup(tmp_path):
    plain = small_config()
    plain["DATA"]["PATH_TO_DATA_DIR"] = "lists"
    expected = card_of(with_config(write_model(tmp_path / "a", plain)), tmp_path / "plain")
    hostile = small_config()
    hostile["DATA"]["PATH_TO_DATA_DIR"] = HOSTILE.replace("/", "")
    files = write_model(tmp_path / "b", hostile)
    names = [HOSTILE + str(number) for number in range(6)]
    content = {"train_list": HOSTILE, "class_names": names}
    card = card_of(with_config(files, "`|<b>\n#x.pyth", **content), tmp_path / "hostile")
    assert [line.count("|") for line in card.splitlines()] == [
        line.count("|") for line in expected.splitlines()
    ]
    outside_code = re.sub("`[^`\n]+`", "", card)
    assert "Owned" in card and not re.search("Owned|<|https|x.pyth|\u202e", outside_code)


@pytest.mark.parametrize(
    "rate, text",
    [(1, "all frames"), (2, "every 2nd"), (3, "every 3rd"), (4, "every 4th"), (12, "every 12th"),
     (21, "every 21st")],
)  # fmt: skip
def test_sampling_rate_is_an_ordinal(tmp_path, rate, text):
    config = small_config()
    config["DATA"]["SAMPLING_RATE"] = rate
    files = with_config(write_model(tmp_path / "m", config))
    assert text in card_of(files, tmp_path / "out")


def test_card_of_a_program_has_no_times(tmp_path):
    """Times depend on the load of the machine during the export."""
    files = with_config(write_model(tmp_path / "m", small_config()))
    card = card_of(files, tmp_path / "out", "torch")
    assert "differ" in card and not re.search(r"\d ms", card)
