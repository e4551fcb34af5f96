"""`python -m studies pretrained`: errors of the attentions in a pretrained image model."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from studies.__main__ import main
from tests.helpers.videos import write_video

transformers = pytest.importorskip("transformers")  # of the extra hf


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A DINOv2 of two layers with random weights, and 36 patches of a crop of 84 pixels."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    network = transformers.Dinov2Model(
        transformers.Dinov2Config(**sizes, image_size=84, patch_size=14)
    )
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    with torch.no_grad():
        for name, weight in network.named_parameters():
            # Attention weights that are not uniform, and outputs that change the features.
            if "attention" in name:
                weight.mul_(15)
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def video(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("videos") / "clip.mp4"
    write_video(path, 24, size=(96, 96))
    return path


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def test_errors_in_layers_and_of_final_features(model, video, tmp_path, capsys):
    out = tmp_path / "tiny"
    names = ["merged", "lara-recommended", "performer"]
    flags = ["--crop", "84", "--frames", "2", "--numbers", "4", "35", "36"]
    arguments = [str(model), str(video), *flags, "--out", str(out), "--attentions", *names]
    assert main(["pretrained", *arguments]) == 0
    text = capsys.readouterr().out
    assert "1 clip of 2 frames" in text and "APPROX_ATTN_TYPE" in text
    layers = rows(Path(f"{out}_layers.csv"))
    assert [row["landmarks"] for row in layers] == ["", "4", "35", "4", "35", "4", "35"]
    assert layers[0]["attention"] == "exact" and float(layers[0]["error"]) == 0
    errors = {
        (row["attention"].split()[0], row["landmarks"]): float(row["error 0"]) for row in layers
    }
    assert 0 < errors["merged", "35"] < errors["merged", "4"] < errors["performer", "4"]
    swapped = {(r["attention"], r["landmarks"]): r for r in rows(Path(f"{out}_swapped.csv"))}
    assert len(swapped) == 6
    for (_, number), row in swapped.items():
        assert float(row["CLS, worst frame"]) <= float(row["CLS"]) <= 1
        assert number != "36"
    nearly_exact, coarse = swapped["merged", "35"], swapped["merged", "4"]
    assert float(nearly_exact["patches"]) > float(coarse["patches"])
    assert float(nearly_exact["patches"]) > 0.99
    for ending in ("_layers.png", "_swapped.png", "_swapped.md"):
        assert Path(f"{out}{ending}").stat().st_size > 0


@pytest.mark.parametrize(
    "flags, mention",
    [(["--crop", "85"], "--crop"), (["--crop", "84", "--attentions", "no"], "unknown attention")],
)
def test_wrong_flags(model, video, flags, mention, tmp_path, capsys):
    code = main(["pretrained", str(model), str(video), *flags, "--out", str(tmp_path / "x")])
    assert code == 2 and mention in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_folder_without_a_model(video, tmp_path, capsys):
    assert main(["pretrained", str(tmp_path), str(video)]) == 2
    assert "config.json" in capsys.readouterr().err
