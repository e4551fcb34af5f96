"""SOLVER.PRECISION auto, and the report of a collapsed loss scale."""

from __future__ import annotations

import pytest
import torch

from slowfast_lara.config import load_config
from slowfast_lara.engine.fingerprint import differences, run_fingerprint
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.numerics import autocast_dtype
from tests.helpers.commands import run as main
from tests.helpers.runs import load_checkpoint, same_tensors, write_config

pytestmark = pytest.mark.usefixtures("in_process")
MIXED = {"SOLVER__USE_MIXED_PRECISION": True}
FLOAT16 = {**MIXED, "SOLVER__PRECISION": "float16"}
LAST = "checkpoint_epoch_00001.pyth"


def train(folder, video_set, name, code=0, **changes):
    output = folder / name
    changes = {"TEST__ENABLE": False, "SOLVER__MAX_EPOCH": 1, **changes}
    config = write_config(folder / f"{name}.yaml", video_set, output, **changes)
    assert main(["--cfg", str(config)]) == code
    return output


@pytest.mark.parametrize(
    "device, has_bf16, expected",
    [
        ("cuda", True, torch.bfloat16),
        ("cuda", False, torch.float16),
        ("mps", False, torch.float16),
        ("cpu", True, None),
    ],
)
def test_precision_of_the_device(monkeypatch, device, has_bf16, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    mixed = ["SOLVER.USE_MIXED_PRECISION", True]
    assert autocast_dtype(load_config("quick/lara", mixed), torch.device(device)) == expected
    assert autocast_dtype(load_config("quick/lara"), torch.device(device)) is None
    for name in ("float16", "bfloat16"):
        cfg = load_config("quick/lara", [*mixed, "SOLVER.PRECISION", name])
        assert autocast_dtype(cfg, torch.device(device)) == getattr(torch, name)


def test_a_cpu_trains_in_float32(tmp_path, video_set):
    plain = load_checkpoint(train(tmp_path, video_set, "plain"), LAST)
    output = train(tmp_path, video_set, "mixed", **MIXED)
    mixed = load_checkpoint(output, LAST)
    assert same_tensors(mixed["model_state"], plain["model_state"])
    assert "Precision: float32" in (output / "stdout.log").read_text()
    # The checkpoint records the precision, and a run in another one is refused.
    assert "USE_MIXED_PRECISION: false" in mixed["cfg"] and mixed["scaler_state"] == {}
    train(tmp_path, video_set, "mixed", code=0, **MIXED)
    train(tmp_path, video_set, "mixed", code=2, **FLOAT16)


def test_precision_without_autocast_may_change(tmp_path, video_set):
    """The default was float16 in earlier versions."""
    output = train(tmp_path, video_set, "old", SOLVER__PRECISION="float16")
    assert "PRECISION: float16" in load_checkpoint(output, LAST)["cfg"]
    train(tmp_path, video_set, "old")


def test_ranks_with_different_gpus_do_not_train_together(tmp_path, video_set, monkeypatch):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", NUM_GPUS=1, **MIXED)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = []
    for has_bf16 in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_bf16, **_: has)
        found.append(run_fingerprint(load_config(config), 2))
    assert differences(*found, 1) == (
        "the autocast dtype is torch.bfloat16 on rank 1 and torch.float16 on rank 0"
    )


@pytest.mark.parametrize("first_bad", [0, 20])
def test_a_collapsed_loss_scale_ends_the_run(tmp_path, video_set, capsys, monkeypatch, first_bad):
    """Every step overflows from `first_bad` on; 17 steps bring the scale of 65536 below 1."""
    plain, calls = VisionTransformer.forward, 0

    def forward(self, clips):
        nonlocal calls
        calls += self.training
        logits = plain(self, clips)
        return logits + 1e30 * (logits - logits.detach()) if calls > first_bad else logits

    monkeypatch.setattr(VisionTransformer, "forward", forward)
    changes = {**FLOAT16, "TRAIN__BATCH_SIZE": 2, "SOLVER__MAX_EPOCH": 10}
    output = train(tmp_path, video_set, "run", code=1, **changes)
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1 and "the loss scale fell to 7.62939e-06" in message
    assert "SOLVER.PRECISION bfloat16" in message
    log = (output / "stdout.log").read_text()
    assert log.count("Low loss scale 0.5") == log.count("Low loss scale") == 1
    # 33 halvings and, because an iteration is checked during the next one, one more forward pass.
    # With first_bad = 20, an earlier step has halved the scale, too: see the next test.
    assert calls == first_bad + 34 - (first_bad > 0)


def test_overflow_of_single_steps_is_allowed(tmp_path, video_set, monkeypatch):
    plain, calls = VisionTransformer.forward, 0

    def forward(self, clips):
        nonlocal calls
        calls += self.training
        logits = plain(self, clips)
        return logits + 1e30 * (logits - logits.detach()) if calls in (2, 5) else logits

    monkeypatch.setattr(VisionTransformer, "forward", forward)
    output = train(tmp_path, video_set, "run", **FLOAT16, TRAIN__BATCH_SIZE=2)
    assert "loss scale" not in (output / "stdout.log").read_text()
    # One more step overflows: its activations have gradients above 1, and 65536 is not a float16.
    assert load_checkpoint(output, LAST)["scaler_state"]["scale"] == 65536 / 8
