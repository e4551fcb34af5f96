"""Training in one process: options and failures."""

from __future__ import annotations

import os

import pytest
import torch

from tests.helpers.commands import run as main
from tests.helpers.runs import copy_lists, json_stats, load_checkpoint, same_tensors, write_config

pytestmark = pytest.mark.usefixtures("in_process")


def train(folder, video_set, name, *, code=0, **changes):
    """Train with changes to the small config; return the output folder."""
    output = folder / name
    config = write_config(
        folder / f"{name}.yaml",
        video_set,
        output,
        **{"TEST__ENABLE": False, "SOLVER__MAX_EPOCH": 1, **changes},
    )
    assert main(["--cfg", str(config)]) == code
    return output


def weights(output, name="checkpoint_epoch_00001.pyth"):
    return load_checkpoint(output, name)["model_state"]


def assert_close(first, second, tolerance=1e-6):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.allclose(first[name], second[name], rtol=0, atol=tolerance), name


SGD = {"SOLVER__OPTIMIZING_METHOD": "sgd", "SOLVER__BASE_LR": 0.1}


def test_accumulated_batches_equal_a_large_one(tmp_path, video_set):
    large = train(tmp_path, video_set, "large", TRAIN__BATCH_SIZE=8, **SGD)
    small = train(
        tmp_path, video_set, "small", TRAIN__BATCH_SIZE=2, SOLVER__ACCUMULATE_STEPS=4, **SGD
    )
    assert_close(weights(large), weights(small))
    assert "Effective batch 8" in (small / "stdout.log").read_text()


def test_reference_batch_scales_the_learning_rate(tmp_path, video_set):
    plain = train(tmp_path, video_set, "plain", **SGD)
    scaled = train(
        tmp_path,
        video_set,
        "scaled",
        **{**SGD, "SOLVER__BASE_LR": 0.8, "SOLVER__REFERENCE_BATCH": 32},
    )
    assert_close(weights(plain), weights(scaled), 1e-6)
    assert "Learning rate 0.1: " in (scaled / "stdout.log").read_text()


@pytest.mark.parametrize("epochs", [0.5, 1])
def test_a_warm_up_as_long_as_the_run_is_reported(tmp_path, video_set, epochs):
    changes = {"SOLVER__LR_POLICY": "cosine", "SOLVER__WARMUP_EPOCHS": epochs}
    output = train(tmp_path, video_set, "run", **{**SGD, **changes, "SOLVER__MAX_EPOCH": 1})
    warning = "The learning rate stays below 0.1: SOLVER.WARMUP_EPOCHS is 1, SOLVER.MAX_EPOCH 1;"
    assert (warning in (output / "stdout.log").read_text()) == (epochs == 1)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_is_near_float32(tmp_path, video_set, precision):
    one_step = {**SGD, "TRAIN__BATCH_SIZE": 16}
    mixed_precision = {"SOLVER__USE_MIXED_PRECISION": True, "SOLVER__PRECISION": precision}
    start = weights(train(tmp_path, video_set, "start", **{**one_step, "SOLVER__BASE_LR": 1e-12}))
    full = weights(train(tmp_path, video_set, "full", **one_step))
    mixed_output = train(tmp_path, video_set, "mixed", **one_step, **mixed_precision)
    mixed = weights(mixed_output)

    def distance(first, second):
        return sum((first[name] - second[name]).square().sum() for name in first).sqrt().item()

    assert 0 < distance(mixed, full) < 0.05 * distance(start, full)
    saved = load_checkpoint(mixed_output, "checkpoint_epoch_00001.pyth")
    assert ("scale" in saved["scaler_state"]) == (precision == "float16")
    # It resumes, with the state of the scaler.
    more = {"SOLVER__MAX_EPOCH": 2, "TRAIN__ACCEPT_CHANGES": True}
    train(tmp_path, video_set, "mixed", **one_step, **mixed_precision, **more)


def test_clipping_bounds_the_step(tmp_path, video_set):
    output = train(
        tmp_path,
        video_set,
        "clipped",
        TRAIN__BATCH_SIZE=8,
        SOLVER__CLIP_GRAD=1e-3,
        SOLVER__MOMENTUM=0.0,
        SOLVER__NESTEROV=False,
        SOLVER__WEIGHT_DECAY=0.0,
        TRAIN__CHECKPOINT_ITERATIONS=1,
        **SGD,
    )
    first = weights(output, "checkpoint_epoch_00000_sample_000000008.pyth")
    last = weights(output)
    lr = json_stats(output)[1]["lr"]
    step = sum((last[name] - first[name]).double().square().sum() for name in first) ** 0.5
    assert step.item() == pytest.approx(lr * 1e-3, rel=1e-3)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, video_set, capsys, steps):
    good = train(tmp_path, video_set, "run", **SGD)
    before = (good / "checkpoints" / "checkpoint_epoch_00001.pyth").read_bytes()
    capsys.readouterr()
    changes = {"SOLVER__BASE_LR": 1e30, "SOLVER__ACCUMULATE_STEPS": steps}
    more = {**SGD, "SOLVER__MAX_EPOCH": 3, "TRAIN__ACCEPT_CHANGES": True, **changes}
    train(tmp_path, video_set, "run", code=1, **more)
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    for part in ("the loss is not finite", "epoch 2", "iteration", "learning rate", "train"):
        assert part in message
    assert message.count(".mp4") == 4
    assert os.listdir(good / "checkpoints") == ["checkpoint_epoch_00001.pyth"]
    assert (good / "checkpoints" / "checkpoint_epoch_00001.pyth").read_bytes() == before
    assert message.split(": ", 1)[1].strip() in (good / "stdout.log").read_text()


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path, video_set, capsys, monkeypatch):
    """Before the step; otherwise the checkpoint of the epoch would contain NaN."""
    from slowfast_lara.models import VisionTransformer

    plain = VisionTransformer.forward

    def forward(self, clips):
        logits = plain(self, clips)
        # The value is that of the logits, the gradient is NaN.
        return torch.where(
            torch.ones_like(logits) > 0, logits, (logits - logits.detach() - 1).sqrt()
        )

    monkeypatch.setattr(VisionTransformer, "forward", forward)
    output = train(tmp_path, video_set, "run", code=1, TRAIN__BATCH_SIZE=16)
    assert "the gradient is not finite" in capsys.readouterr().err
    assert not (output / "checkpoints").exists()


def test_best_checkpoint_is_kept(tmp_path, video_set):
    output = train(
        tmp_path,
        video_set,
        "best",
        SOLVER__MAX_EPOCH=5,
        TRAIN__EVAL_PERIOD=1,
        TRAIN__CHECKPOINT_BEST=True,
        TRAIN__CHECKPOINT_KEEP=2,
        SOLVER__BASE_LR=0.01,
    )
    errors = [s["top1_err"] for s in json_stats(output) if s.get("_type") == "val_epoch"]
    assert len(errors) == 5
    best = load_checkpoint(output, "best.pyth")
    assert best["epoch"] == errors.index(min(errors))
    assert best["val"]["top1_err"] == pytest.approx(min(errors), abs=1e-6)
    assert sorted(os.listdir(output / "checkpoints")) == [
        "best.pyth",
        "checkpoint_epoch_00004.pyth",
        "checkpoint_epoch_00005.pyth",
    ]


def test_validation_by_period_and_at_the_end(tmp_path, video_set):
    output = train(
        tmp_path,
        video_set,
        "val",
        SOLVER__MAX_EPOCH=5,
        TRAIN__EVAL_PERIOD=2,
        TRAIN__CHECKPOINT_PERIOD=4,
    )
    stats = [s for s in json_stats(output) if s.get("_type") == "val_epoch"]
    assert [s["epoch"] for s in stats] == ["2/5", "4/5", "5/5"]
    assert all(s["num_videos"] == 5 for s in stats)
    assert sorted(os.listdir(output / "checkpoints")) == [
        "checkpoint_epoch_00004.pyth",
        "checkpoint_epoch_00005.pyth",
    ]


def test_resuming_from_a_file_and_starting_from_its_weights(tmp_path, video_set):
    first = train(tmp_path, video_set, "first", SOLVER__MAX_EPOCH=2)
    path = str(first / "checkpoints" / "checkpoint_epoch_00001.pyth")
    resumed = train(
        tmp_path, video_set, "resumed", SOLVER__MAX_EPOCH=2, TRAIN__CHECKPOINT_FILE_PATH=path
    )
    last = "checkpoint_epoch_00002.pyth"
    assert same_tensors(weights(resumed, last), weights(first, last))
    assert os.listdir(resumed / "checkpoints") == [last]
    reset = train(
        tmp_path,
        video_set,
        "reset",
        SOLVER__MAX_EPOCH=1,
        SOLVER__BASE_LR=1e-12,
        TRAIN__CHECKPOINT_FILE_PATH=path,
        TRAIN__CHECKPOINT_EPOCH_RESET=True,
    )
    assert_close(weights(reset), weights(first), 1e-9)
    assert load_checkpoint(reset, "checkpoint_epoch_00001.pyth")["epoch"] == 0


def test_without_auto_resume_existing_checkpoints_are_an_error(tmp_path, video_set, capsys):
    output = train(tmp_path, video_set, "run", TRAIN__AUTO_RESUME=False)
    before = weights(output)
    train(tmp_path, video_set, "run", code=2, TRAIN__AUTO_RESUME=False, RNG_SEED=5)
    assert "TRAIN.AUTO_RESUME" in capsys.readouterr().err
    assert same_tensors(weights(output), before)


def test_checkpoint_has_pyslowfasts_keys(tmp_path, video_set):
    saved = load_checkpoint(train(tmp_path, video_set, "keys"), "checkpoint_epoch_00001.pyth")
    assert {"epoch", "model_state", "optimizer_state", "scaler_state", "cfg"} <= saved.keys()
    assert saved["epoch"] == 0 and "MAX_EPOCH: 1" in saved["cfg"]
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in saved["model_state"])


def test_tensorboard(tmp_path, video_set):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = train(tmp_path, video_set, "board", TENSORBOARD__ENABLE=True)
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    losses = [event.value for event in events.Scalars("train_iter/loss")]
    logged = [s["loss"] for s in json_stats(output) if s.get("_type") == "train_iter"]
    assert losses == pytest.approx(logged, abs=1e-5)
    assert len(events.Scalars("val/top1_err")) == 1


def test_too_many_bad_videos_end_the_run(tmp_path, video_set, capsys):
    lists = copy_lists(tmp_path / "lists", video_set)
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    with open(lists / "train.csv", "a") as file:
        file.write(f"{tmp_path / 'broken.mp4'} 0\n" * 3)
    train(tmp_path, lists, "bad", code=1, DATA__MAX_BAD_SHARE=0.0, SOLVER__MAX_EPOCH=5)
    assert "broken.mp4" in capsys.readouterr().err
    output = train(tmp_path, lists, "allowed", SOLVER__MAX_EPOCH=5)
    assert "broken.mp4" in (output / "stdout.log").read_text()


@pytest.mark.parametrize(
    "changes", [{"MODEL__ACT_CHECKPOINT": True}, {"CUDNN_BENCHMARK": True, "ALLOW_TF32": True}]
)
def test_keys_that_change_no_result(tmp_path, video_set, changes):
    noise = {"VIT__DROP_PATH": 0.3, "VIT__DROP": 0.1}
    plain = train(tmp_path, video_set, "plain", **noise)
    changed = train(tmp_path, video_set, "changed", **noise, **changes)
    assert_close(weights(plain), weights(changed))


def test_starting_from_a_run_with_other_classes(tmp_path, video_set):
    """Everything but the classifier is loaded, as for SSv2 from Kinetics."""
    first = train(tmp_path, video_set, "first")
    path = str(first / "checkpoints" / "checkpoint_epoch_00001.pyth")
    tuned = train(
        tmp_path,
        video_set,
        "tuned",
        MODEL__NUM_CLASSES=5,
        SOLVER__BASE_LR=1e-12,
        TRAIN__CHECKPOINT_FILE_PATH=path,
        TRAIN__CHECKPOINT_EPOCH_RESET=True,
    )
    old, new = weights(first), weights(tuned)
    assert new["head.weight"].shape[0] == 5
    for name in old.keys() - {"head.weight", "head.bias"}:
        assert torch.allclose(new[name], old[name], rtol=0, atol=1e-9), name
    assert "head.weight" in (tuned / "stdout.log").read_text()


@pytest.mark.parametrize("inflate, shares", [("centre", (0.0, 1.0)), ("average", (0.5, 0.5))])
def test_starting_from_an_image_model(tmp_path, video_set, inflate, shares):
    """VIT.PRETRAINED_WEIGHTS with a 2-D patch embedding, as in timm."""
    state = weights(train(tmp_path, video_set, "first"))
    image = {
        name: value
        for name, value in state.items()
        if "proj_q" not in name
        and "proj_kv" not in name
        and name != "temp_embed"
        and not name.startswith(("patch_embed_3d", "pre_logits", "head"))
    }
    torch.save(image, tmp_path / "vit.pth")
    tuned = train(
        tmp_path,
        video_set,
        "tuned",
        SOLVER__BASE_LR=1e-12,
        VIT__IM_PRETRAINED=True,
        VIT__PRETRAINED_WEIGHTS=str(tmp_path / "vit.pth"),
        VIT__INFLATE=inflate,
    )
    new = weights(tuned)
    inflated, flat = new["patch_embed_3d.proj.weight"], image["patch_embed.proj.weight"]
    for frame, share in enumerate(shares):
        assert torch.allclose(inflated[:, :, frame], share * flat, rtol=0, atol=1e-8)
    name = "blocks.1.attn.qkv.weight"
    assert torch.allclose(new[name], image[name], rtol=0, atol=1e-9)
