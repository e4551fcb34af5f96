"""`slowfast-lara benchmark gpu`, run on the CPU."""

import json

import pytest
import torch

from slowfast_lara.analysis import gpu_checks, gpu_speed
from slowfast_lara.analysis.gpu_checks import run_checks
from slowfast_lara.analysis.gpu_speed import GpuTable, Timing, costs_on
from tests.helpers.commands import benchmark
from tests.helpers.small_models import only_error

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_machine_without_a_gpu(capsys):
    assert benchmark(["gpu"]) == 2
    assert "no GPU" in only_error(capsys)


def test_table_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_speed, "ATTENTIONS", ("softmax", "lara"))
    monkeypatch.setattr(gpu_checks, "CASES", gpu_checks.CASES[:2])
    table = costs_on(CPU, [32], 1, ["float32"], 1, dim=24, depth=1, num_heads=2)
    assert [(t.crop, t.precision, t.attention) for t in table.timings] == [
        (32, "float32", "exact"),
        (32, "float32", "lara"),
    ]
    assert all(t.forward > 0 and t.model_forward > 0 and t.model_step > 0 for t in table.timings)
    assert [check.agrees for check in table.checks] == [True] * len(table.checks)
    table.write(tmp_path / "gpu")
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["environment"]["torch"] == torch.__version__
    assert content["milliseconds"][0]["attention"] == "exact"
    assert content["fastest"] in table.text()
    lines = (tmp_path / "gpu.csv").read_text().splitlines()
    rows = [line for line in lines if not line.startswith("#")]
    assert rows[0].startswith("crop,precision,attention,forward") and len(rows) == 3


def test_wrong_kernel_is_detected(monkeypatch):
    right = gpu_checks.temporal_attention
    assert all(check.agrees for check in run_checks(CPU, ["float32"], ["torch"]))

    def wrong(q, *rest, **options):
        out = right(q, *rest, **options)
        return out * 1.01 if q.dtype == torch.float32 else out

    monkeypatch.setattr(gpu_checks, "temporal_attention", wrong)
    failed = {check.name for check in run_checks(CPU, ["float32"], ["torch"]) if not check.agrees}
    assert failed == {"temporal", "temporal, projected values"}


def test_failing_kernel_is_reported(monkeypatch):
    right = gpu_checks.temporal_attention

    def failing(q, *rest, **options):
        if q.dtype == torch.float32:
            raise RuntimeError("out of resource: shared memory\nand more")
        return right(q, *rest, **options)

    monkeypatch.setattr(gpu_checks, "temporal_attention", failing)
    found = run_checks(CPU, ["float32"], ["torch"])
    failed = [check for check in found if not check.agrees]
    assert len(failed) == 2
    assert failed[0].text().endswith("failed: RuntimeError: out of resource: shared memory")
    assert "lara-farthest" in {check.name for check in found if check.agrees}
    json.dumps([check._asdict() for check in found], allow_nan=False)


def test_reason_for_missing_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    table = costs_on(CPU, [], 1, [], 1)
    assert "without our kernels: " in table.text()


def test_fastest_attention():
    def timing(crop, precision, name, forward):
        return Timing(crop, precision, name, forward, forward and 2 * forward, None, None)

    rows = [
        timing(224, "bfloat16", "exact", 1.0),
        timing(224, "bfloat16", "lara", 2.0),
        timing(448, "bfloat16", "exact", None),  # out of memory
        timing(448, "bfloat16", "lara", 3.0),
        timing(224, "float32", "exact", 5.0),
        timing(448, "float32", "exact", None),
        timing(448, "float32", "lara", None),
    ]
    line = "224 bfloat16 exact, 448 bfloat16 lara, 224 float32 exact, 448 float32 out of memory"
    table = GpuTable("title", 8, [], rows)
    assert table.fastest() == f"fastest attention, forward and backward: {line}"
    assert ["448", "bfloat16", "exact", "-", "-", "-", "-"] in map(
        str.split, table.text().split("\n")
    )
