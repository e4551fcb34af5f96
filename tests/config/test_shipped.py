"""Shipped configs: names, list, and standalone copies."""

from __future__ import annotations

import pytest

from slowfast_lara.config import load_config
from slowfast_lara.config.shipped import description, find_config, shipped_folder, shipped_names
from slowfast_lara.errors import ConfigError
from tests.helpers.commands import configs as main
from tests.helpers.small_models import only_error


def test_names_match_the_files():
    files = {path.relative_to(shipped_folder()) for path in shipped_folder().rglob("*.yaml")}
    names = shipped_names()
    assert {"quick/lara", "K400/lara_224_16x4", "SSV2/motionformer_336_16x4"} <= set(names)
    bases = {path for path in files if path.stem in ("base", "paper", "best")}
    assert len(names) == len(files - bases)


def test_a_name_and_its_path_are_the_same_config():
    by_path = load_config(shipped_folder() / "quick" / "lara.yaml")
    assert load_config("quick/lara") == load_config("quick/lara.yaml") == by_path
    assert load_config("study/base")  # base configs have names too


def test_a_path_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "quick"
    (folder / "lara").mkdir(parents=True)  # a run's folder with the same name
    assert find_config("quick/lara").startswith(str(shipped_folder()))
    (folder / "lara.yaml").touch()
    assert find_config("quick/lara.yaml") == "quick/lara.yaml"
    (folder / "ra").touch()
    assert find_config("quick/ra") == "quick/ra"


@pytest.mark.parametrize(
    "given, hint",
    [
        ("quick/larra", "quick/lara"),
        ("K400/lara", "K400/lara_224_16x4"),
        ("lara", "quick/lara"),
        ("zzz", "see `slowfast-lara configs`"),
        ("../configs/quick/lara", "quick/lara"),
    ],
)
def test_unknown_name_suggests_similar_ones(tmp_path, monkeypatch, given, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no config file {given}") as caught:
        find_config(given)
    assert hint in str(caught.value)


def test_file_next_to_shipped_configs_needs_its_suffix(tmp_path):
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigError, match="no config file"):
        find_config(tmp_path / "mine")


@pytest.mark.parametrize("name", shipped_names())
def test_description_matches_the_config(name):
    cfg, line = load_config(name), description(name)
    attention = {"none": "Exact", "softmax": "Exact", "nystrom": "Nyströmformer"}
    kind = cfg.VIT.APPROX_ATTN_TYPE
    words = [attention.get(kind, kind).lower(), f"{cfg.DATA.TRAIN_CROP_SIZE} pixels"]
    spread = "dinov2" in name  # over the whole video
    apart = "spread" if spread else f"{cfg.DATA.SAMPLING_RATE} apart"
    words.append(f"{cfg.DATA.NUM_FRAMES} frames, {apart}")
    words += [] if name.startswith("quick/") else [f"{cfg.VIT.ATTN_LAYER} attention"]
    words += ["(biased)"] if cfg.VIT.RA.BIASED else []
    assert all(word in line.lower() for word in words), line
    assert line.endswith(".") and len(line) < 100


def test_list_has_one_line_per_config(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped_names()
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("name", shipped_names())
def test_written_config_needs_no_base(name, tmp_path, capsys):
    assert main([name, "--out", str(tmp_path / "mine.yaml")]) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'mine.yaml'}\n"
    assert "_BASE_" not in (tmp_path / "mine.yaml").read_text()
    assert load_config(tmp_path / "mine.yaml") == load_config(name)


def test_without_out_it_is_printed(tmp_path, capsys):
    assert main(["quick/ra"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "mine.yaml") == load_config("quick/ra")


def test_existing_file_is_overwritten_only_with_force(tmp_path, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text("NUM_GPUS: 7\n")
    assert main(["quick/lara", "--out", str(mine)]) == 2
    error = only_error(capsys)
    assert "mine.yaml" in error and "--force" in error
    assert mine.read_text() == "NUM_GPUS: 7\n"
    assert main(["quick/lara", "--out", str(mine), "--force"]) == 0
    assert load_config(mine) == load_config("quick/lara")


def test_unknown_name_writes_nothing(tmp_path, capsys):
    assert main(["quick/larra", "--out", str(tmp_path / "mine.yaml")]) == 2
    assert "did you mean quick/lara" in only_error(capsys)
    assert list(tmp_path.iterdir()) == []
