"""`python -m studies pretrained`: errors of the attentions in a pretrained model."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch

import slowfast_lara
from slowfast_lara.inference.layers import middle_view
from studies.__main__ import main
from tests.helpers.small_models import small_config, write_model
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


def write_run(folder: Path) -> str:
    """A run with a model of random weights; returns its checkpoint."""
    model = write_model(folder / "checkpoints", small_config())
    shutil.copy(model.cfg, folder / "config.yaml")
    return model.checkpoint


def test_video_model(video, tmp_path, capsys):
    """A trained model of this package: cosines are those of the models that `load` returns."""
    path = write_run(tmp_path / "run")
    out = str(tmp_path / "video")
    flags = ["--numbers", "2", "15", "--attentions", "merged", "performer", "--out", out]
    assert main(["pretrained", path, str(video), *flags]) == 0
    assert "1 clip of 4 frames" in capsys.readouterr().out
    swapped = {(r["attention"], r["landmarks"]): r for r in rows(Path(f"{out}_swapped.csv"))}
    assert len(swapped) == 4
    models = [
        slowfast_lara.load(path, attention="exact"),
        slowfast_lara.load(path, attention="merged", num_landmarks=2),
    ]
    view = middle_view(str(video), models[0].cfg)[None]
    features = [model.network.forward_features([view])[0] for model in models]
    expected = torch.cosine_similarity(*features, dim=0).item()
    assert expected < 0.999
    assert float(swapped["merged", "2"]["CLS"]) == pytest.approx(expected, abs=2e-6)
    assert float(swapped["merged", "15"]["patches"]) > float(swapped["merged", "2"]["patches"])
    layers = {(r["attention"], r["landmarks"]): r for r in rows(Path(f"{out}_layers.csv"))}
    for key, row in swapped.items():  # the same estimator over the same tokens
        share = float(layers[key]["of exact, %"])
        assert float(row["MACs, % of exact"]) == pytest.approx(share, abs=0.6)


def test_sizes_of_a_video_model_are_fixed(video, tmp_path, capsys):
    path = write_run(tmp_path / "run")
    assert main(["pretrained", path, str(video), "--crop", "64"]) == 2
    assert "--crop" in capsys.readouterr().err


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
    assert "checkpoint" in capsys.readouterr().err
