"""Estimates of training speed and memory: hand-computed values, and counts in a real model."""

import csv
import math

import pytest
import torch

from benchmarks import scale
from benchmarks.__main__ import main
from benchmarks.kernel_traffic import temporal_forward
from benchmarks.roofline import LAUNCH
from benchmarks.scale import CLUSTERS, MODELS, Model, Setting, estimate, reduce_seconds
from slowfast_lara.models import VisionTransformer
from tests.helpers.small_models import only_error

VIT_B = Setting("ViT-B", 224, 16, "softmax")
OPTIONS = {"most_clips": 8, "efficiency": 0.5, "decode_ms": 10.0}


def test_parameters_of_vit_b():
    D, F = 768, 8
    attention = 3 * D * D + 3 * D + 2 * (D * D + D) + 2 * D * D + 2 * D
    block = attention + 8 * D * D + 5 * D + 4 * D
    embedding = 2 * 3 * 16 * 16 * D + D + D + 197 * D + F * D
    head = 2 * D + D * D + D + 400 * D + 400
    assert scale.trained_parameters(VIT_B) == 12 * block + embedding + head


def test_flops_of_a_block():
    D, F, N, clips = 768, 8, 1568, 2
    linear = 2 * D * D * ((N + 1) * (3 + 1 + 8) + N)  # qkv, proj, MLP; proj_q without CLS
    exact = 4 * N * N * D + 4 * (N + 1) * D  # patches; CLS
    temporal = sum(k.flops for k in temporal_forward(clips, N, F, 12, 64, 2, False))
    forward = scale.block_counts(VIT_B, clips).forward
    assert sum(kernel.flops for kernel in forward) == clips * (linear + exact) + temporal


def test_saved_bytes_of_a_block(monkeypatch):
    """The count on the meta device against a block with real tensors and PyTorch's autocast."""
    monkeypatch.setitem(MODELS, "small", Model(128, 2, 3))
    setting = Setting("small", 112, 8, "softmax")
    model = VisionTransformer(
        num_classes=400, dim=128, num_heads=2, depth=1, num_frames=4, kernels="torch"
    )

    def saved(clips):
        x = torch.randn(clips, 1 + setting.tokens, 128, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            return scale.saved_bytes(lambda: model.blocks[0](x, 4))[0]

    measured = saved(2) - saved(1)
    assert scale.saved_per_clip(setting) == pytest.approx(measured, rel=0.02)


def test_memory(monkeypatch):
    monkeypatch.setattr(scale, "saved_per_clip", lambda _: 1000)
    monkeypatch.setattr(scale, "trained_parameters", lambda _: 100)
    working, inputs = 4 * 8 * 1568 * 768, 4 * 12 * 1568 * 768
    assert scale.memory(VIT_B, 3, False) == 1800 + 3 * (12_000 + working)
    assert scale.memory(VIT_B, 3, True) == 1800 + 3 * (inputs + 1000 + working)
    fits = 1800 + 8 * (12_000 + working)
    assert scale.largest_batch(VIT_B, fits, 32) == (8, False)
    assert scale.largest_batch(VIT_B, fits, 4) == (4, False)
    monkeypatch.setattr(scale, "saved_per_clip", lambda _: 10 * inputs)
    assert scale.largest_batch(VIT_B, 1800 + 12 * inputs + working, 32) == (1, True)
    assert scale.largest_batch(VIT_B, 10_000, 32) == (0, False)


def test_all_reduce():
    a100 = CLUSTERS["A100"]
    assert reduce_seconds(10**6, 1, a100) == 0
    within = 2 * 7 / 8 * 4e6 / 300e9
    assert reduce_seconds(10**6, 8, a100) == pytest.approx(within)
    assert reduce_seconds(10**6, 64, a100) == pytest.approx(within + 2 * 7 / 8 * 5e5 / 25e9)


def test_estimate_of_a_step():
    one = estimate(VIT_B, "A100", 1, **OPTIONS)
    a100, block = CLUSTERS["A100"].gpu, scale.block_counts(VIT_B, 8)
    seconds = sum(
        max(k.bytes / a100.bandwidth, k.flops / (a100.half if k.half else a100.single))
        + k.launches * LAUNCH
        for k in [*block.forward, *block.backward]
    )
    update = 28 * scale.trained_parameters(VIT_B) / a100.bandwidth
    assert one.clips == 8 and not one.checkpointing and one.reduce == 0
    embedding = one.step * 0.5 - 12 * seconds - update
    assert 0 < embedding < 0.05 * one.step  # the rest is the patch embedding
    assert one.clips_per_second == pytest.approx(8 / one.step)
    assert one.workers == math.ceil(8 / one.step * 0.01)
    many = estimate(VIT_B, "A100", 64, **OPTIONS)
    assert many.workers == math.ceil(8 * many.clips_per_second / 64 * 0.01)
    assert many.step >= one.step and many.reduce > 0
    fast = estimate(VIT_B, "A100", 1, **{**OPTIONS, "efficiency": 1.0})
    assert fast.step == pytest.approx(one.step / 2)


def test_slow_network_limits_the_step(monkeypatch):
    one = estimate(VIT_B, "H100", 1, **OPTIONS)
    monkeypatch.setitem(CLUSTERS, "H100", CLUSTERS["H100"]._replace(network=1e6))
    many = estimate(VIT_B, "H100", 16, **OPTIONS)
    assert many.reduce < many.step < many.reduce + one.step


def test_clip_that_does_not_fit(monkeypatch):
    monkeypatch.setitem(CLUSTERS, "A100", CLUSTERS["A100"]._replace(memory=8e9))
    none = estimate(Setting("ViT-L", 448, 64, "softmax"), "A100", 1, **OPTIONS)
    assert none.clips == 0 and none.clips_per_second == 0 and none.memory > 8e9


def test_command(tmp_path, capsys):
    flags = ["scale", "--device", "H100", "--crops", "224", "--frames", "16"]
    assert main([*flags, "--gpus", "1", "64", "--out", str(tmp_path / "scale")]) == 0
    out = capsys.readouterr().out
    assert "an estimate: counted, not measured" in out
    lines = (tmp_path / "scale.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert len(rows) == 2 * 3 * 2
    assert {row["attention"] for row in rows} == {"exact", "lara", "merged"}
    assert all(float(row["clips_per_second"]) > 0 for row in rows)
    text = (tmp_path / "scale.md").read_text()
    assert text.count("\n| ViT-B |") == 1 and "an estimate" in text


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--device", "L4"], "'L4'; must be one of A100, H100"),
        (["--gpus", "12"], "--gpus has 12; above 8, must be a multiple of 8"),
        (["--frames", "7"], "--frames has 7; must be even"),
        (["--crops", "896"], "--crops 896 with --frames 64: a clip of 2**31 elements or more"),
        (["--efficiency", "2"], "--efficiency is 2; must be at most 1"),
    ],
)
def test_bad_flags(capsys, flags, message):
    assert main(["scale", *flags]) == 2
    assert message in only_error(capsys)
