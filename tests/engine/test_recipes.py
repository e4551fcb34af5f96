"""A training with mixup, layer-wise learning rates and EMA weights, against a float64 loop.

The reference uses soft labels, plain SGD per parameter name, and a running average.
"""

from __future__ import annotations

import json

import pytest
import torch

import slowfast_lara
from slowfast_lara.config import load_config
from slowfast_lara.data.loader import train_loader
from slowfast_lara.engine.mixup import draw_mix
from slowfast_lara.engine.train import batch_seed
from slowfast_lara.models import build_model
from slowfast_lara.runs import checkpoint
from tests.helpers.commands import run as main
from tests.helpers.launchers import start_torchrun
from tests.helpers.mixup_reference import reference_clips
from tests.helpers.runs import (
    NUM_CLASSES,
    finish,
    json_stats,
    load_checkpoint,
    same_tensors,
    write_config,
)
from tests.helpers.small_models import only_error

pytestmark = pytest.mark.usefixtures("in_process")

LAST = "checkpoint_epoch_00001.pyth"
LR, DECAY, SMOOTHING, WEIGHT_DECAY = 0.05, 0.7, 0.1, 0.01
RECIPE = {
    "TRAIN__BATCH_SIZE": 4,
    "MIXUP__ENABLE": True,
    "MIXUP__PROB": 0.8,
    "SOLVER__MAX_EPOCH": 1,
    "SOLVER__OPTIMIZING_METHOD": "sgd",
    "SOLVER__MOMENTUM": 0.0,
    "SOLVER__NESTEROV": False,
    "SOLVER__BASE_LR": LR,
    "SOLVER__LR_POLICY": "steps_with_relative_lrs",
    "SOLVER__STEPS": [0],
    "SOLVER__LRS": [1],
    "SOLVER__WEIGHT_DECAY": WEIGHT_DECAY,
    "SOLVER__SMOOTHING": SMOOTHING,
    "SOLVER__LAYER_DECAY": DECAY,
    "SOLVER__EMA_DECAY": 0.6,
    "TEST__ENABLE": False,
}
# The number of layers after a parameter, in the model of two blocks.
LAYERS_AFTER = {"blocks.0": 2, "blocks.1": 1, "norm.": 0, "head.": 0}


def train(folder, video_set, **changes):
    config = write_config(folder / "c.yaml", video_set, folder / "out", **{**RECIPE, **changes})
    assert main(["--cfg", str(config)]) == 0
    return folder / "out", config


def loss_of(model, cfg, batch, seed):
    """Return the float64 loss with soft labels."""
    clips = batch.clips[0].double()
    mix = draw_mix(cfg.MIXUP, *clips.shape[-2:], seed)
    clips = torch.from_numpy(reference_clips(clips.numpy(), mix))
    target = torch.full((len(clips), NUM_CLASSES), SMOOTHING / NUM_CLASSES, dtype=torch.float64)
    for i, label in enumerate(batch.labels):
        other = batch.labels[len(clips) - 1 - i]
        target[i, label] += (1 - SMOOTHING) * mix.own
        target[i, other] += (1 - SMOOTHING) * (1 - mix.own)
    return -(target * model([clips]).log_softmax(-1)).sum(1).mean()


def reference(config, ranks, group_size):
    """Return weights and EMA after one epoch; each rank accumulates `group_size` batches."""
    cfg = load_config(config)
    torch.manual_seed(cfg.RNG_SEED)
    model = build_model(cfg).double().train()
    size = cfg.TRAIN.BATCH_SIZE // ranks
    loaders = [train_loader(cfg, batch_size=size, rank=r, world_size=ranks) for r in range(ranks)]
    batches = [list(loader) for loader in loaders]
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    average = {name: p.detach().clone() for name, p in named.items()}
    for step, first in enumerate(range(0, len(batches[0]), group_size)):
        group = range(first, min(first + group_size, len(batches[0])))
        losses = [
            loss_of(model, cfg, batches[r][i], batch_seed(cfg.RNG_SEED, r, 0, i))
            for r in range(ranks)
            for i in group
        ]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(named.values()))
        for (name, p), gradient in zip(named.items(), gradients):
            layers = next((n for part, n in LAYERS_AFTER.items() if name.startswith(part)), 3)
            no_decay = p.ndim <= 1 or name in ("cls_token", "pos_embed", "temp_embed")
            with torch.no_grad():
                gradient = gradient + (0 if no_decay else WEIGHT_DECAY) * p
                p -= LR * DECAY**layers * gradient
            kept = min(0.6, (1 + step) / (10 + step))
            average[name] = kept * average[name] + (1 - kept) * p.detach()
    return {name: p.detach() for name, p in named.items()}, average


def assert_equals(output, expected):
    saved = load_checkpoint(output, LAST)
    for state, values in zip((saved["model_state"], saved["ema_state"]), expected):
        for name, value in values.items():
            torch.testing.assert_close(state[name].double(), value, atol=2e-6, rtol=0)
    assert not same_tensors(saved["model_state"], saved["ema_state"])
    assert saved["ema_state"].keys() == saved["model_state"].keys()


@pytest.mark.parametrize("accumulated", [1, 3])
def test_one_process_equals_the_float64_loop(tmp_path, video_set, accumulated):
    """An epoch has four batches: the last group may be smaller than three."""
    output, config = train(tmp_path, video_set, SOLVER__ACCUMULATE_STEPS=accumulated)
    assert_equals(output, reference(config, 1, accumulated))
    assert f"embeddings is multiplied by {DECAY**3:g}" in (output / "stdout.log").read_text()


@pytest.mark.slow
def test_two_processes_equal_the_float64_loop(tmp_path, video_set):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **RECIPE)
    code, stdout, stderr = finish(start_torchrun(config, 2))
    assert code == 0, stdout + stderr
    assert_equals(tmp_path / "out", reference(config, 2, 1))


def test_mixup_needs_two_clips_per_batch(tmp_path, video_set, capsys):
    config = write_config(
        tmp_path / "c.yaml", video_set, tmp_path / "out", **{**RECIPE, "TRAIN__BATCH_SIZE": 1}
    )
    assert main(["--cfg", str(config)]) == 2
    assert "MIXUP.ENABLE" in only_error(capsys)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, video_set):
    """Train and test a run whose EMA weights are far from its weights."""
    folder = tmp_path_factory.mktemp("averaged")
    changes = {"SOLVER__EMA_DECAY": 0.9, "TRAIN__CHECKPOINT_BEST": True, "TEST__ENABLE": True}
    return train(folder, video_set, SOLVER__BASE_LR=0.5, **changes)


def results_of(output):
    return json.loads((output / "test_results.json").read_text())


def scores_of(state, config, videos):
    """Score videos with a bare model."""
    model = build_model(load_config(config)).eval()
    model.load_state_dict(state)
    cfg = load_config(config)
    with torch.no_grad():
        return [model([slowfast_lara.load_views(v, cfg)]).double().mean(0) for v in videos]


def test_test_and_load_use_the_ema_weights(averaged, tmp_path, caplog):
    output, config = averaged
    tested, saved = results_of(output), load_checkpoint(output, LAST)
    assert tested["weights"] == "moving average"
    path = str(output / "checkpoints" / LAST)
    assert f"EMA weights of {path}" in (output / "stdout.log").read_text()
    videos = [video["path"] for video in tested["videos"]]
    by_average = scores_of(saved["ema_state"], config, videos)
    by_weights = scores_of(saved["model_state"], config, videos)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(by_average, by_weights))
    for video, expected in zip(tested["videos"], by_average):
        assert video["top5_scores"] == pytest.approx(sorted(expected.tolist())[::-1], abs=1e-6)
    caplog.set_level("INFO")
    for given, overrides, expected in (
        (path, [], by_average),
        (path, ["TEST.USE_EMA", False], by_weights),
        (output, [], by_average),
    ):
        model = slowfast_lara.load(given, overrides=overrides)
        assert model.averaged == (not overrides) == model.with_attention("softmax").averaged
        for video, scores in zip(videos, expected):
            assert model(video).scores == pytest.approx(scores.numpy(), abs=1e-6)
    assert "not EMA" in caplog.text
    changes = {
        "TRAIN__ENABLE": False,
        "TEST__ENABLE": True,
        "TEST__USE_EMA": False,
        "TEST__CHECKPOINT_FILE_PATH": path,
    }
    output, _ = train(tmp_path, load_config(config).DATA.PATH_TO_DATA_DIR, **changes)
    raw = results_of(output)
    assert raw["weights"] == "as trained"
    for video, expected in zip(raw["videos"], by_weights):
        assert video["top5_scores"] == pytest.approx(sorted(expected.tolist())[::-1], abs=1e-6)


def test_validation_logs_both_and_the_best_is_chosen_by_the_ema_weights(averaged):
    output, _ = averaged
    (stats,) = [line for line in json_stats(output) if line.get("_type") == "val_epoch"]
    assert {"top1_err", "top5_err", "raw_top1_err", "raw_top5_err"} <= stats.keys()
    best = checkpoint.load(str(output / "checkpoints" / "best.pyth"))
    assert best["val"]["top1_err"] == pytest.approx(stats["top1_err"])
    assert "ema_state" in best


def test_fine_tuning_starts_from_the_ema_weights(averaged, tmp_path, video_set):
    output, _ = averaged
    changes = {
        "TRAIN__CHECKPOINT_FILE_PATH": str(output / "checkpoints" / LAST),
        "TRAIN__CHECKPOINT_EPOCH_RESET": True,
        "SOLVER__BASE_LR": 1e-12,
    }
    further, _ = train(tmp_path, video_set, **changes)
    assert "EMA weights" in (further / "stdout.log").read_text()
    ends, start = load_checkpoint(further, LAST), load_checkpoint(output, LAST)["ema_state"]
    for name, value in start.items():
        for state in ("model_state", "ema_state"):
            torch.testing.assert_close(ends[state][name], value, atol=1e-6, rtol=0)


def test_ema_and_layer_decay_can_be_turned_on_and_off_when_resuming(averaged, tmp_path, video_set):
    plain = {"SOLVER__EMA_DECAY": 0.0, "SOLVER__LAYER_DECAY": 1.0}
    output, _ = train(tmp_path, video_set, **plain)
    before = load_checkpoint(output, LAST)
    assert "ema_state" not in before and len(before["optimizer_state"]["param_groups"]) == 2
    more = {"TRAIN__ACCEPT_CHANGES": True, "SOLVER__MAX_EPOCH": 2}
    train(tmp_path, video_set, **more)
    after = load_checkpoint(output, "checkpoint_epoch_00002.pyth")
    assert after["ema_steps"] == 4 and len(after["optimizer_state"]["param_groups"]) == 8
    log = (output / "stdout.log").read_text()
    assert any("Resetting" in line and "LAYER_DECAY" in line for line in log.splitlines())
    train(tmp_path, video_set, **{**more, **plain, "SOLVER__MAX_EPOCH": 3})
    assert "ema_state" not in load_checkpoint(output, "checkpoint_epoch_00003.pyth")


@pytest.mark.parametrize(
    "damage", [{"ema_state": 3}, {"ema_state": {"head.bias": 1}}, {"ema_steps": -1}]
)
def test_damaged_ema_weights_are_an_error(averaged, tmp_path, damage):
    content = load_checkpoint(averaged[0], LAST)
    path = tmp_path / "damaged.pyth"
    torch.save({**content, **damage}, path)
    with pytest.raises(slowfast_lara.errors.WeightsError, match="damaged.pyth"):
        checkpoint.load(str(path))
    if "ema_state" in damage:
        with pytest.raises(slowfast_lara.errors.WeightsError, match="damaged.pyth"):
            slowfast_lara.load(path)
