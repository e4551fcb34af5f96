"""`benchmark gpu`, on the CPU: all of it but the device."""

import json
import sys

import pytest
import torch

from slowfast_lara.analysis import gpu_checks, gpu_speed
from slowfast_lara.analysis.gpu_checks import checks
from slowfast_lara.analysis.gpu_speed import GpuTable, Sizes, Times, costs_on
from tests.helpers.commands import benchmark as main
from tests.helpers.small_models import only_error

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_in_one_line(capsys):
    assert main(["gpu"]) == 2
    assert only_error(capsys).startswith("error: PyTorch finds no GPU on this machine; `slowfast-l")


def test_all_of_it_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_speed, "ATTENTIONS", ("softmax", "lara"))
    monkeypatch.setattr(gpu_checks, "CASES", gpu_checks.CASES[:2])
    table = costs_on(CPU, [32], 1, ["float32"], 1, dim=24, depth=1, num_heads=2)
    assert [(t.crop, t.precision, t.attention) for t in table.times] == [
        (32, "float32", "exact"),
        (32, "float32", "lara"),
    ]
    assert all(t.forward > 0 and t.model_forward > 0 and t.model_step > 0 for t in table.times)
    assert [check.agrees for check in table.checks] == [True] * len(table.checks)
    table.write(tmp_path / "gpu")
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["environment"]["torch"] == torch.__version__
    assert content["milliseconds"][0]["attention"] == "exact"
    assert content["fastest"] in table.text()
    assert (tmp_path / "gpu.csv").read_text().splitlines()[1].startswith("crop,precision,attention")


def test_a_wrong_kernel_is_seen(monkeypatch):
    right = gpu_checks.temporal_attention
    assert all(check.agrees for check in checks(CPU, ["float32"], ["torch"]))

    def wrong(q, *rest, **options):
        out = right(q, *rest, **options)
        return out * 1.01 if q.dtype == torch.float32 else out

    monkeypatch.setattr(gpu_checks, "temporal_attention", wrong)
    failed = {check.name for check in checks(CPU, ["float32"], ["torch"]) if not check.agrees}
    assert failed == {"temporal", "temporal, projected values"}


def test_a_kernel_that_fails_is_a_row(monkeypatch):
    right = gpu_checks.temporal_attention

    def failing(q, *rest, **options):
        if q.dtype == torch.float32:
            raise RuntimeError("out of resource: shared memory\nand more")
        return right(q, *rest, **options)

    monkeypatch.setattr(gpu_checks, "temporal_attention", failing)
    found = checks(CPU, ["float32"], ["torch"])
    failed = [check for check in found if not check.agrees]
    said = "temporal in float32 by torch: fails: RuntimeError: out of resource: shared memory"
    assert failed[0].text() == said and len(failed) == 2
    assert "lara-farthest" in {check.name for check in found if check.agrees}
    json.dumps([check._asdict() for check in found], allow_nan=False)


@pytest.mark.parametrize(
    "gpu, known",
    [
        ("NVIDIA L40S", False),
        ("NVIDIA L4", True),
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA H100 80GB HBM3", True),
    ],
)
def test_estimates_are_of_the_gpu_that_is_named(gpu, known, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
    given = ("softmax", Sizes(32, 8, 1, 4), torch.device("cuda", 0), torch.bfloat16)
    assert (gpu_speed._estimates(*given, fused=True) != (None, None)) is known


def test_why_there_are_no_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    table = costs_on(CPU, [], 1, [], 1)
    assert "without our kernels: they run on NVIDIA GPUs" in table.text()


def test_the_kernels_without_triton(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["kernels"]) == 2
    assert "the package triton, which compiles the kernels, is not" in only_error(capsys)


def test_the_fastest_in_one_line():
    def times(crop, precision, name, forward):
        unknown = [None] * 4
        return Times(crop, precision, name, forward, forward and 2 * forward, *unknown)

    rows = [
        times(224, "bfloat16", "exact", 1.0),
        times(224, "bfloat16", "lara", 2.0),
        times(448, "bfloat16", "exact", None),  # out of memory
        times(448, "bfloat16", "lara", 3.0),
        times(224, "float32", "exact", 5.0),
        times(448, "float32", "exact", None),
        times(448, "float32", "lara", None),
    ]
    line = "bfloat16: 224 exact, 448 lara; float32: 224 exact, 448 none: no memory"
    assert GpuTable(8, [], rows).fastest() == f"fastest attention, forward and backward: {line}"
    assert "\n 448   bfloat16  exact            -" in GpuTable(8, [], rows).text()
