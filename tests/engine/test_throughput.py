"""Clips per second, MFU, and the profile of training batches."""

from __future__ import annotations

import json
import os

import pytest
import torch

from benchmarks.profiling import analyse_flops
from slowfast_lara.config import load_config
from slowfast_lara.engine import throughput
from slowfast_lara.engine.throughput import PEAK_TFLOPS, Throughput, peak_flops, training_flops
from slowfast_lara.errors import ConfigError
from slowfast_lara.models import build_model
from tests.helpers.commands import run as main
from tests.helpers.runs import json_stats, load_checkpoint, same_tensors, write_config


@pytest.mark.parametrize(
    "gpu, tflops",
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 0),
        ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla V100-SXM2-32GB", 125),
        ("Some other GPU", 0),
    ],
)
def test_peak_of_a_gpu(gpu, tflops):
    assert peak_flops(gpu) == tflops * 1e12


@pytest.mark.parametrize("name", ["softmax", "lara", "merged"])
def test_flops_of_a_training_step(name):
    """Three forward passes of two FLOPs per multiply-accumulate, without the layer norms."""
    cfg = load_config(f"quick/{name}")
    data, size = cfg.DATA, cfg.DATA.TRAIN_CROP_SIZE
    clip = torch.randn(1, 3, data.NUM_FRAMES, size, size)
    macs = analyse_flops(build_model(cfg).eval(), [clip]).by_operator()
    del macs["layer_norm"]
    state = torch.get_rng_state()
    assert training_flops(cfg) == 6 * sum(macs.values())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["lara", "merged"])
def test_flops_do_not_depend_on_the_kernels(name):
    cfgs = [load_config(f"quick/{name}", ["VIT.KERNELS", it]) for it in ("auto", "triton")]
    first, second = map(training_flops, cfgs)
    assert first == second


def test_mfu_of_a_known_gpu(monkeypatch):
    cfg = load_config("quick/lara", ["NUM_GPUS", 1, "SOLVER.USE_MIXED_PRECISION", True])
    monkeypatch.setattr(throughput, "device_of", lambda cfg: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    for gpu, tflops in (("NVIDIA A100-SXM4-40GB", PEAK_TFLOPS["A100"]), ("unknown", 0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, gpu=gpu: gpu)
        stats = Throughput(cfg, batch_size=8).stats(seconds=0.5)
        assert stats.pop("clips_per_s") == 16
        expected = {"mfu": 100 * 16 * training_flops(cfg) / (tflops * 1e12)} if tflops else {}
        assert stats == pytest.approx(expected)


@pytest.mark.usefixtures("in_process")
def test_log_and_profile(tmp_path, video_set):
    """Batches 2 and 3 are profiled; nothing else changes."""
    results = []
    for name, profile in (("plain", []), ("profiled", [2, 3])):
        output = tmp_path / name
        changes = {"TEST__ENABLE": False, "SOLVER__MAX_EPOCH": 1, "TRAIN__PROFILE": profile}
        config = write_config(tmp_path / f"{name}.yaml", video_set, output, **changes)
        assert main(["--cfg", str(config)]) == 0
        results.append(load_checkpoint(output, "checkpoint_epoch_00001.pyth")["model_state"])
        stats = [s for s in json_stats(output) if s.get("_type") == "train_iter"]
        assert len(stats) == 4
        for line in stats:
            assert line["clips_per_s"] == pytest.approx(4 / line["dt"], rel=0.05)
            assert "mfu" not in line
    assert same_tensors(*results)
    assert not [x for x in os.listdir(tmp_path / "plain") if x.startswith("trace")]
    events = json.loads((tmp_path / "profiled" / "trace_2_3.json").read_text())["traceEvents"]
    steps = [e for e in events if e.get("name", "").startswith("Optimizer.step")]
    assert len(steps) == 2
    assert any("scaled_dot_product" in e.get("name", "") for e in events)


@pytest.mark.parametrize("value", [[1], [0, 2], [3, 2], ["a", "b"], [1.0, 2.0]])
def test_invalid_ranges_of_batches(value):
    with pytest.raises(ConfigError, match=r"TRAIN.PROFILE.*must be \[\] or \[first, last\]"):
        load_config("quick/lara", ["TRAIN.PROFILE", value])
