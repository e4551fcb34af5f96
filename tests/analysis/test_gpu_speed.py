"""`slowfast-lara benchmark gpu`, run on the CPU."""

import json
import math

import pytest
import torch

from slowfast_lara.analysis import gpu_speed
from slowfast_lara.analysis.gpu_speed import GpuTable, Timing, costs_on
from slowfast_lara.attention.kernels import self_check
from tests.helpers.commands import benchmark
from tests.helpers.small_models import only_error

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_machine_without_a_gpu(capsys):
    assert benchmark(["gpu"]) == 2
    assert "no GPU" in only_error(capsys)


def test_each_row_is_printed_as_soon_as_it_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(gpu_speed, "ATTENTIONS", ("softmax", "lara", "nystrom"))
    shown = []

    def times(jobs, repeats):
        shown.append(capsys.readouterr().err)
        return {name: 0.001 * number for number, name in enumerate(jobs, start=1)}

    monkeypatch.setattr(gpu_speed, "best_times", times)
    costs_on(CPU, [32], 1, ["float32"], 1, dim=24, depth=1, num_heads=2)
    shown.append(capsys.readouterr().err)
    for number, name in enumerate(("exact", "lara", "nystrom"), start=1):
        line = f"{number}/3: 32 float32 {name}: forward 1.00 ms, backward 1.00 ms"
        assert line in shown[3 * number]  # three calls for each row


def test_table_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_speed, "ATTENTIONS", ("softmax", "lara"))
    table = costs_on(CPU, [32], 1, ["float32"], 1, dim=24, depth=1, num_heads=2)
    assert [(t.crop, t.precision, t.attention) for t in table.timings] == [
        (32, "float32", "exact"),
        (32, "float32", "lara"),
    ]
    assert all(t.forward > 0 and t.model_forward > 0 and t.model_step > 0 for t in table.timings)
    table.write(tmp_path / "gpu")
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["environment"]["torch"] == torch.__version__
    assert content["milliseconds"][0]["attention"] == "exact"
    assert content["fastest"] in table.text()
    lines = (tmp_path / "gpu.csv").read_text().splitlines()
    rows = [line for line in lines if not line.startswith("#")]
    assert rows[0].startswith("crop,precision,attention,forward") and len(rows) == 3


def checks_with(monkeypatch, **kernels):
    """Results of the checks on the CPU with these kernels, and with PyTorch's otherwise."""
    small_cases = self_check.small_cases

    def cases(d, C):
        return [
            case._replace(kernel=kernels.get(case.name, case.reference))
            for case in small_cases(d, C)
        ]

    monkeypatch.setattr(gpu_speed, "obstacle", lambda _: "")
    monkeypatch.setattr(self_check, "small_cases", cases)
    return costs_on(CPU, [], 1, ["float32", "float16"], 1)


def test_every_operator_is_compared_with_float64(monkeypatch):
    table = checks_with(monkeypatch)
    assert list(table.checks) == ["float32", "float16"]
    operators = {"landmarks", "proposals", "key_stats", "combine", "temporal"}
    for checks in table.checks.values():
        assert {check.operator.split()[0] for check in checks} == operators
        assert not any(check.problem for check in checks)
    float32, float16 = (max(c.error for c in checks) for checks in table.checks.values())
    assert 0 < float32 < 1e-4 < float16
    assert f"in float32, compared with float64: {float32:.1e}" in table.text()


def test_wrong_and_failing_kernels_are_reported(tmp_path, monkeypatch):
    def wrong(w, k, v=None):
        return torch.cat((w, w[..., :1]), -1).unsqueeze(2).expand(-1, -1, 3, -1, -1) + 0 * k.sum()

    def failing(*_):
        raise RuntimeError("out of resource: shared memory\nand more")

    def not_finite(q, *_):
        return torch.full_like(q, math.nan).unsqueeze(3).expand(-1, -1, -1, 3, -1)

    changed = {"key_stats (tied)": wrong, "temporal": failing, "combine": not_finite}
    table = checks_with(monkeypatch, **changed)
    problems = {c.operator: c.problem for c in table.checks["float32"] if c.problem}
    assert problems.keys() == changed.keys()
    assert problems["temporal"] == "RuntimeError: out of resource: shared memory"
    assert "relative error of the" in problems["key_stats (tied)"]
    assert f"temporal in float16: {problems['temporal']}" in table.text()
    table.write(tmp_path / "gpu")
    checks = json.loads((tmp_path / "gpu.json").read_text(), parse_constant=pytest.fail)["checks"]
    assert {c["operator"] for c in checks["float32"] if c["error"] is None} >= {"temporal"}


def test_reason_for_missing_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    table = costs_on(CPU, [], 1, ["float32"], 1)
    assert "Triton kernels are not used: " in table.text() and table.checks == {}


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
    table = GpuTable("title", 8, {}, rows)
    assert table.fastest() == f"fastest attention, forward and backward: {line}"
    assert ["448", "bfloat16", "exact", "-", "-", "-", "-"] in map(
        str.split, table.text().split("\n")
    )
