"""Training and testing in a git checkout of PySlowFast; checkout/ holds a stand-in for it."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fvcore.common.config import CfgNode

import slowfast_lara
from slowfast_lara.config import load_config
from slowfast_lara.engine.optimizer import build_optimizer
from slowfast_lara.inference.scoring import score_views
from slowfast_lara.models import build_model
from tests.helpers.checkouts import (
    CHECKOUT,
    CLASSES,
    CROP,
    FRAMES,
    MIXUP,
    MODEL,
    PAGE,
    VIDEOS,
    VIEWS,
    checkout_run,
)
from tests.helpers.commands import run as main
from tests.helpers.runs import write_config


def commands_of_the_page() -> list[str]:
    """The commands of docs/pyslowfast.md that prepare a checkout."""
    blocks = PAGE.read_text().split("```sh\n")[1:]
    (lines,) = [block.split("```")[0] for block in blocks if "sed -i" in block]
    return lines.splitlines()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A copy of the stand-in in which the commands of the page have been run."""
    copy = tmp_path_factory.mktemp("prepared") / "slowfast"
    shutil.copytree(CHECKOUT, copy)
    subprocess.run(["sh", "-ec", "\n".join(commands_of_the_page())], cwd=copy, check=True)
    return copy


@dataclass
class Trained:
    """A run in the checkout, and the result of the same steps without it."""

    folder: Path
    losses: list[float]
    logits: np.ndarray
    state: dict[str, torch.Tensor]

    @property
    def checkpoint(self) -> str:
        return str(self.folder / "checkpoints" / "checkpoint_epoch_00001.pyth")


def make_clips(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", VIDEOS * VIEWS)):
        clips = rng.standard_normal((count, 3, FRAMES, CROP, CROP)).astype(np.float32)
        np.savez(folder / f"{part}.npz", clips=clips, labels=np.arange(count) % CLASSES)


def our_config(attention: str) -> CfgNode:
    """The config of the stand-in's model for this package; other keys keep their defaults."""
    opts = ["VIT.APPROX_ATTN_TYPE", attention]
    for node, keys in MODEL.items():
        if node in ("DATA", "MODEL", "VIT"):
            own = [(key, value) for key, value in keys.items() if key != "DECODING_BACKEND"]
            opts += [word for key, value in own for word in (f"{node}.{key}", value)]
    opts += ["DATA.TRAIN_JITTER_SCALES", [CROP, CROP], "RNG_SEED", 5, "NUM_GPUS", 0]
    return load_config("quick/softmax", opts)


def our_steps(folder: Path, attention: str, mixup: bool, mixed: bool) -> Trained:
    """Two training steps of the model in plain PyTorch, without the stand-in and the plugin."""
    np.random.seed(5)
    torch.manual_seed(5)
    model = build_model(our_config(attention)).train()
    spared = [p for name, p in model.named_parameters() if name in model.no_weight_decay()]
    others = [p for p in model.parameters() if not any(p is one for one in spared)]
    groups = [
        {"params": [p for p in others if p.requires_grad], "weight_decay": 0.05},
        {"params": [p for p in spared if p.requires_grad], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    torch.manual_seed(5)
    arrays, losses, logits = np.load(folder / "train.npz"), [], []
    for start in (0, 4):
        clips = torch.from_numpy(arrays["clips"][start : start + 4])
        target = torch.from_numpy(arrays["labels"][start : start + 4])
        if mixup:
            share = float(np.random.beta(0.8, 0.8))
            soft = torch.eye(CLASSES)[target] * 0.9 + 0.1 / CLASSES
            clips = clips * share + clips.flip(0) * (1 - share)
            target = soft * share + soft.flip(0) * (1 - share)
        with torch.autocast("cpu", enabled=mixed):
            out = model([clips])
        loss = torch.nn.functional.cross_entropy(out.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        logits.append(out.detach().float().numpy())
    return Trained(folder, losses, np.stack(logits), model.state_dict())


# Attention, mixup, mixed precision (with each job in its own process).
RUNS = [
    pytest.param(("none", False, False), id="exact"),
    pytest.param(("lara", True, False), id="lara-mixup"),
    pytest.param(("lara", False, True), id="lara-mixed-spawned", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=RUNS)
def trained(request, prepared, tmp_path_factory) -> Trained:
    attention, mixup, mixed = request.param
    folder = tmp_path_factory.mktemp("checkout")
    make_clips(folder)
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    paths = ["DATA.PATH_TO_DATA_DIR", str(folder), "OUTPUT_DIR", str(folder)]
    done = checkout_run(
        "tools/run_net.py",
        *("--cfg", str(folder / "model.yaml")),
        *(["--spawn"] if mixed else []),
        *("--opts", "VIT.APPROX_ATTN_TYPE", attention, "TRAIN.MIXED_PRECISION", str(mixed)),
        *(MIXUP if mixup else []),
        *paths,
        cwd=prepared,
    )
    assert done.returncode == 0, done.stderr
    assert mixed or "FlopCountAnalysis" in done.stdout
    return our_steps(folder, attention, mixup, mixed)


def test_two_training_steps_equal_ours(trained):
    theirs = np.load(trained.folder / "training.npz")
    assert len(theirs["losses"]) == 2 and np.isfinite(theirs["losses"]).all()
    np.testing.assert_allclose(theirs["losses"], trained.losses, rtol=0, atol=1e-6)
    np.testing.assert_allclose(theirs["logits"], trained.logits, rtol=0, atol=1e-6)
    # They are logits: softmax scores would sum to 1.
    assert not np.allclose(theirs["logits"].sum(-1), 1)


def test_checkpoint_has_our_names_and_weights(trained):
    saved = torch.load(trained.checkpoint, weights_only=True)
    assert saved["model_state"].keys() == trained.state.keys()
    initial = initial_weights(trained)
    assert not torch.equal(saved["model_state"]["head.weight"], initial["head.weight"])
    for name, weight in trained.state.items():
        torch.testing.assert_close(saved["model_state"][name], weight, rtol=0, atol=1e-6)


def initial_weights(trained: Trained) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return build_model(slowfast_lara.load(trained.checkpoint).cfg).state_dict()


def test_multi_view_test_gives_our_scores(trained):
    model = slowfast_lara.load(trained.checkpoint)
    clips = torch.from_numpy(np.load(trained.folder / "test.npz")["clips"])
    sums = np.load(trained.folder / "scores.npy")
    assert sums.shape == (VIDEOS, CLASSES)
    for ours, theirs in zip(clips.split(VIEWS), sums):
        expected = score_views(model.network, ours, model.cfg).numpy()
        np.testing.assert_allclose(theirs / VIEWS, expected, rtol=0, atol=1e-6)


def test_its_checkpoint_can_be_tested_and_fine_tuned_but_not_resumed(
    trained, video_set, tmp_path, capfd, in_process
):
    cfg = slowfast_lara.load(trained.checkpoint).cfg
    assert cfg.TEST.NUM_SPATIAL_CROPS == 3 and cfg.VIT.DROP_PATH == 0.2 and cfg.RNG_SEED == 5
    vit = {**MODEL["VIT"], "APPROX_ATTN_TYPE": cfg.VIT.APPROX_ATTN_TYPE}
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", VIT=vit)

    def run(*opts: Any) -> int:
        return main(["--cfg", str(config), *map(str, opts)])

    given = ["TRAIN.CHECKPOINT_FILE_PATH", trained.checkpoint, "SOLVER.MAX_EPOCH", 1]
    assert run("TRAIN.ENABLE", False, "TEST.CHECKPOINT_FILE_PATH", trained.checkpoint) == 0
    assert json.loads((tmp_path / "out" / "test_results.json").read_text())["num_videos"] == 7
    capfd.readouterr()
    assert run("TEST.ENABLE", False, "OUTPUT_DIR", tmp_path / "resumed", *given) == 2
    assert "git checkout of PySlowFast" in capfd.readouterr().err
    reset = ["TRAIN.CHECKPOINT_EPOCH_RESET", True]
    assert run("TEST.ENABLE", False, "OUTPUT_DIR", tmp_path / "fine_tuned", *given, *reset) == 0


def run_steps(folder: Path, checkout: Path, *opts: str) -> subprocess.CompletedProcess:
    """A training in a checkout."""
    make_clips(folder)
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    paths = ["DATA.PATH_TO_DATA_DIR", str(folder), "OUTPUT_DIR", str(folder)]
    words = ["tools/run_net.py", "--cfg", str(folder / "model.yaml"), "--opts", *paths, *opts]
    return checkout_run(*words, "LOG_MODEL_INFO", "False", cwd=checkout)


@pytest.mark.slow
def test_each_command_of_the_page_is_needed(tmp_path):
    *commands, path = commands_of_the_page()
    assert len(commands) == 3 and path.startswith("export PYTHONPATH")
    reasons = ["No module named 'vision'"] * 2 + ["Non-existent config key"]
    for number, reason in enumerate(reasons):
        copy = tmp_path / str(number)
        shutil.copytree(CHECKOUT, copy)
        some = [command for i, command in enumerate(commands) if i != number]
        subprocess.run(["sh", "-ec", "\n".join(some)], cwd=copy, check=True)
        if number == 2:  # the place of the import that earlier versions had
            custom = copy / "slowfast" / "models" / "custom_video_model_builder.py"
            custom.write_text("import slowfast_lara.plugin\n")
        done = run_steps(copy, copy)
        assert done.returncode != 0 and reason in done.stderr


@pytest.mark.slow
def test_default_decoding_backend_does_not_work(prepared, tmp_path):
    done = run_steps(tmp_path, prepared, "DATA.DECODING_BACKEND", "torchvision")
    assert done.returncode != 0 and "torchvision" in done.stderr


@pytest.mark.slow
def test_our_checkpoint_in_the_checkout(prepared, tmp_path):
    cfg = our_config("none")
    torch.manual_seed(7)
    model = build_model(cfg)
    ours = {
        "epoch": 0,
        "model_state": model.state_dict(),
        "optimizer_state": build_optimizer(model, cfg).state_dict(),
        "cfg": cfg.dump(),
    }
    path = str(tmp_path / "ours.pyth")
    torch.save(ours, path)
    start = ["TRAIN.CHECKPOINT_FILE_PATH", path, "SOLVER.ZERO_WD_1D_PARAM", "True"]
    start += ["SOLVER.BASE_LR", "0.0", "TEST.CHECKPOINT_FILE_PATH", path]
    done = run_steps(tmp_path, prepared, *start)
    assert done.returncode != 0 and "KeyError: 'layer_decay'" in done.stderr
    done = run_steps(tmp_path, prepared, *start, "TRAIN.CHECKPOINT_EPOCH_RESET", "True")
    assert done.returncode == 0 and "not loaded: []" in done.stdout, done.stderr
    trained = torch.load(tmp_path / "checkpoints" / "checkpoint_epoch_00001.pyth")["model_state"]
    assert all(torch.equal(trained[name], x) for name, x in ours["model_state"].items())


def test_our_commands_refuse_a_checkout_on_the_path():
    done = checkout_run("-m", "slowfast_lara.cli", "run", "--cfg", "quick/lara")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: found a git checkout of PySlowFast")
    assert done.stderr.count("\n") == 1
