"""Logged metrics of every iteration, against a synchronous loop."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from slowfast_lara.config import load_config
from slowfast_lara.data.loader import train_loader
from slowfast_lara.engine.iteration import iteration_at
from slowfast_lara.engine.optimizer import lr_at
from slowfast_lara.engine.train import batch_seed
from slowfast_lara.models import build_model
from slowfast_lara.runs.checkpoint import TrainingPosition
from tests.helpers.commands import run as main
from tests.helpers.runs import json_stats, write_config

NOISY = {"VIT__DROP_PATH": 0.3, "VIT__APPROX_ATTN_TYPE": "lara", "VIT__APPROX_ATTN_DIM": 3}


def synchronous_training(cfg):
    """Yield (loss, top-1 error, learning rate) of every iteration."""
    torch.manual_seed(cfg.RNG_SEED)
    model = build_model(cfg).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, momentum=0.9, nesterov=True, lr=0.1)
    loader = train_loader(cfg, batch_size=cfg.TRAIN.BATCH_SIZE)
    total, steps = len(loader), cfg.SOLVER.ACCUMULATE_STEPS
    for epoch in range(cfg.SOLVER.MAX_EPOCH):
        loader.batch_sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            start = i - i % steps
            lr = lr_at(cfg, epoch + start / total)
            torch.manual_seed(batch_seed(cfg.RNG_SEED, 0, epoch, i))
            logits = model(batch.clips)
            loss = functional.cross_entropy(logits, batch.labels)
            (loss / min(steps, total - start)).backward()
            yield loss.item(), 100 * (logits.argmax(1) != batch.labels).double().mean().item(), lr
            if (i + 1) % steps == 0 or i + 1 == total:
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("steps, saved_every", [(1, 0), (1, 1), (3, 0), (3, 2)])
def test_log_has_the_metrics_of_every_iteration(tmp_path, video_set, steps, saved_every):
    config = write_config(
        tmp_path / "c.yaml",
        video_set,
        tmp_path / "out",
        TRAIN__BATCH_SIZE=2,
        TRAIN__CHECKPOINT_ITERATIONS=saved_every,
        SOLVER__ACCUMULATE_STEPS=steps,
        SOLVER__OPTIMIZING_METHOD="sgd",
        SOLVER__BASE_LR=0.1,
        SOLVER__WEIGHT_DECAY=0.0,
        TEST__ENABLE=False,
        **NOISY,
    )
    assert main(["--cfg", str(config)]) == 0
    logged = [s for s in json_stats(tmp_path / "out") if s.get("_type") == "train_iter"]
    positions = [f"{epoch}/2 {i}/8" for epoch in (1, 2) for i in range(1, 9)]
    assert [f"{s['epoch']} {s['iter']}" for s in logged] == positions
    expected = list(synchronous_training(load_config(config)))
    assert len({loss for loss, _, _ in expected}) == 16
    for stats, (loss, top1_err, lr) in zip(logged, expected):
        assert stats["loss"] == pytest.approx(loss, abs=2e-6)
        assert stats["top1_err"] == pytest.approx(top1_err, abs=1e-6)
        assert float(stats["lr"]) == pytest.approx(lr, rel=1e-5)


@pytest.mark.usefixtures("in_process")
def test_iterations_are_logged_before_their_checkpoint(tmp_path, video_set):
    config = write_config(
        tmp_path / "c.yaml",
        video_set,
        tmp_path / "out",
        TRAIN__CHECKPOINT_ITERATIONS=2,
        SOLVER__MAX_EPOCH=1,
        TEST__ENABLE=False,
    )
    assert main(["--cfg", str(config)]) == 0
    lines = (tmp_path / "out" / "stdout.log").read_text().splitlines()
    events = [
        "saved" if "Saved" in line else "iteration"
        for line in lines
        if "Saved" in line or "train_iter" in line
    ]
    assert events == ["iteration"] * 2 + ["saved"] + ["iteration"] * 2 + ["saved"]


def test_iterations_of_accumulated_groups(tmp_path, video_set):
    cfg = load_config(
        write_config(tmp_path / "c.yaml", video_set, tmp_path, SOLVER__ACCUMULATE_STEPS=3)
    )
    iterations = [iteration_at(cfg, 1, n, 8, 0.5) for n in range(8)]
    assert [i.group_size for i in iterations] == [3, 3, 3, 3, 3, 3, 2, 2]
    assert [i.batch for i in iterations if i.ends_group] == [2, 5, 7]
    assert [i.batch for i in iterations if i.ends_epoch] == [7]
    assert [i.lr for i in iterations] == [
        0.5 * lr_at(cfg, 1 + n / 8) for n in (0, 0, 0, 3, 3, 3, 6, 6)
    ]
    assert iterations[5].position_after == TrainingPosition(1, 6)
    assert iterations[7].position_after == TrainingPosition(2)
    assert str(iterations[5]).startswith("epoch 2, iteration 6 of 8, learning rate ")
