"""The choice between PyTorch and Triton by measurement; Triton's interpreter stands for the GPU.

The interpreter runs in the subprocess that measures, not in the process of the tests.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch

from slowfast_lara.attention import ESTIMATORS, build_estimator, has_kernels
from slowfast_lara.attention.kernels import choice, launch, measure, verdicts
from slowfast_lara.attention.kernels.verdicts import Call, Verdict

CPU = torch.device("cpu")
WITH_KERNELS = [name for name in ESTIMATORS if has_kernels(name)]


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setattr(choice, "DECISIONS", {})


def calls_of(name: str, batch: int = 2, frames: int = 2) -> list[Call]:
    """The calls of an estimator and of the temporal stage, as a model on the meta device has."""
    estimator = build_estimator(name, head_dim=8, num_heads=2, num_landmarks=3).to("meta")
    qkv = torch.empty(3, batch, 5 * frames, 2, 8, dtype=torch.float16, device="meta").transpose(
        2, 3
    )
    with choice.recorded_calls() as calls:
        estimator(*qkv, num_frames=frames)
    return calls


def temporal_call(batch: int = 2) -> Call:
    shapes = ((batch, 6, 2, 8), (batch, 3, 6, 16), (32, 16), (32,))
    tensors = [torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes]
    return Call("temporal", {"project_values": False}, tensors)


def key_of(call: Call) -> dict:
    return {**verdicts._environment(CPU), "call": call.description()}


def keep(call: Call, verdict: Verdict) -> None:
    verdicts._write(key_of(call), verdict)


@pytest.fixture
def no_subprocess(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)


@pytest.mark.slow
def test_every_operator_is_compared_and_timed(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    calls = [call for name in WITH_KERNELS for call in calls_of(name)] + [temporal_call()]
    assert [call.operator for call in calls] == [*WITH_KERNELS, "temporal"]
    with torch.inference_mode():
        choice.decide(calls, CPU)
    table = caplog.messages[-1].splitlines()
    assert "milliseconds of a forward and a backward pass" in table[0]
    for call, line in zip(calls, table[2:]):
        name, batch, dtype, used, torch_ms, triton_ms, *_ = line.split()
        assert (name, batch, dtype) == (call.operator, "2", "float16")
        assert used == "PyTorch"  # the interpreter is slow
        assert 0 < float(torch_ms) < float(triton_ms)
        verdict = verdicts._read(key_of(call))
        assert verdict.problem == "" and 0 < verdict.error < 1e-2
    assert list(choice.DECISIONS.values()) == [False] * len(calls)
    monkeypatch.setattr(subprocess, "Popen", None)
    choice.decide(calls, CPU)  # from the cache
    assert caplog.messages[-1].splitlines() == table


FAULTS = {
    "crash": "os.kill(os.getpid(), signal.SIGSEGV)",
    "exit": "os._exit(3)",
    "exception": "raise RuntimeError('out of resource: shared memory')",
    "timeout": "time.sleep(600)",
}
REASONS = {
    "crash": "the measurement ended with code -11",
    "exit": "the measurement ended with code 3",
    "exception": "RuntimeError: out of resource: shared memory",
    "timeout": "the measurement took more than",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_subprocess_selects_pytorch(fault, monkeypatch, tmp_path, caplog):
    """The fault strikes when the kernels of the temporal stage are imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys, time\n"
        "class Fault:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.endswith('.triton_temporal'):\n"
        f"            {FAULTS[fault]}\n"
        "sys.meta_path.insert(0, Fault())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if fault == "timeout":
        monkeypatch.setattr(verdicts, "TIMEOUT", 20)
    caplog.set_level(logging.INFO)
    (other,) = calls_of("performer")
    calls = [temporal_call(), other] if fault != "timeout" else [temporal_call()]
    choice.decide(calls, CPU)
    table = caplog.messages[-1].splitlines()
    assert "PyTorch" in table[2] and REASONS[fault] in table[2]
    assert verdicts._read(key_of(calls[0])) is None  # a fault may be transient
    if fault != "timeout":
        assert verdicts._read(key_of(other)).triton_ms > 0  # measured by a second subprocess
    assert not any(choice.DECISIONS.values())


def test_the_faster_one_is_used_if_it_is_right(no_subprocess):
    for verdict, triton in (
        (Verdict(2.0, 1.0, 1e-3), True),
        (Verdict(1.0, 2.0, 1e-3), False),
        (Verdict(None, 2.0, 1e-3), True),  # PyTorch runs out of memory
        (Verdict(1.0, None, 1e-3), False),
        (Verdict(None, None, 0.3, "relative error of the output is 3e-1"), False),
    ):
        assert verdict.triton is triton
        call = temporal_call()
        keep(call, verdict)
        choice.decide([call, call], CPU)
        assert choice.DECISIONS == {(CPU, *call.key()): triton}


def test_the_batch_of_training_decides(no_subprocess):
    """The test has another batch; the calls of training come first."""
    training, test = temporal_call(4), temporal_call(8)
    keep(training, Verdict(2.0, 1.0, 1e-3))
    keep(test, Verdict(1.0, 2.0, 1e-3))
    choice.decide([training, test], CPU)
    assert choice.DECISIONS == {(CPU, *training.key()): True}


def test_both_kinds_of_kernels_get_the_same_learned_weights():
    (call,) = calls_of("lara")
    call.options["learned"] = True
    operator = measure.Operator(call.description(), CPU)
    outputs = []
    for _ in range(2):
        function = operator.function("torch")
        torch.manual_seed(1)
        outputs.append(function(*(x.float() for x in operator.inputs)))
    assert torch.equal(*outputs)


def test_a_batch_that_does_not_fit_into_memory_is_compared_in_part(monkeypatch):
    """PyTorch in float32 needs more memory than the kernels, which may be the better choice."""
    compared = []

    def compare(self, batch):
        compared.append(batch)
        if batch > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch / 100, ""

    monkeypatch.setattr(measure.Operator, "compare", compare)
    monkeypatch.setattr(measure, "_milliseconds", lambda *_: [None, 1.0])
    verdict = measure.measure(temporal_call(8).description(), CPU)
    assert verdict == Verdict(None, 1.0, 0.02) and verdict.triton
    assert compared == [1, 8, 4, 2]


@pytest.mark.parametrize("has_log", [True, False])
def test_the_start_of_a_measurement_is_shown(has_log, monkeypatch, capsys, caplog):
    """A model in a notebook has no log, and its first call would be silent for minutes."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(verdicts, "_measure_in_subprocess", lambda calls, _: ([Verdict()], ""))
    if not has_log:
        monkeypatch.setattr(logging.root, "handlers", [])
    assert verdicts.measure([{}], CPU) == [Verdict()]
    shown = caplog.text if has_log else capsys.readouterr().err
    assert "measuring kernels (operators: 1) on cpu: this may take minutes" in shown
    assert not caplog.records or caplog.records[0].levelname == "INFO"


def test_an_interrupted_measurement_does_not_delay_the_exit():
    timer = verdicts._kill_later(SimpleNamespace(kill=None))
    assert timer.daemon  # Python waits for all other threads
    timer.cancel()


def test_a_verdict_is_for_one_call_and_one_state_of_the_code(no_subprocess, monkeypatch):
    call = temporal_call()
    keep(call, Verdict(2.0, 1.0, 0.0))
    assert verdicts._read(key_of(call)) == Verdict(2.0, 1.0, 0.0)
    half = [x.bfloat16() for x in call.tensors]
    for other in (
        temporal_call(3),
        call._replace(options={"project_values": True}),
        call._replace(tensors=half),
        call._replace(tensors=[*call.tensors[:3], None]),
    ):
        assert verdicts._read(key_of(other)) is None
    for name, value in (
        ("_code_hash", "0"),
        ("_gpu_name", "another"),
        ("matmul_precision", "tf32"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(verdicts, name, lambda *_, value=value: value)
            assert verdicts._read(key_of(call)) is None, name


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\0" * 100,
        "[" * 100_000,
        "null",
        "{}",
        '{"key": KEY, "verdict": {}, "more": [',
        '{"key": {}, "verdict": {"torch_ms": 2.0, "triton_ms": 1.0}}',
        '{"key": KEY, "verdict": {"torch_ms": "2", "triton_ms": 1.0}}',
        '{"key": KEY, "verdict": {"torch_ms": 2.0, "unknown": 1.0}}',
        '{"key": KEY, "verdict": [2.0, 1.0]}',
        '{"key": KEY, "verdict": {"torch_ms": 2.0, "triton_ms": 1.0, "problem": 3}}',
    ],
)
def test_an_invalid_file_is_measured_again(content, monkeypatch):
    call = temporal_call()
    keep(call, Verdict(2.0, 1.0, 0.0))
    (path,) = verdicts.cache_folder().iterdir()
    path.write_text(content.replace("KEY", json.dumps(key_of(call))))
    measured = Verdict(1.0, 3.0, 0.0)
    monkeypatch.setattr(verdicts, "measure", lambda calls, device: [measured] * len(calls))
    assert verdicts.of_calls([call], CPU) == [measured]
    assert verdicts._read(key_of(call)) == measured
    assert list(verdicts.cache_folder().iterdir()) == [path]  # no temporary file is left


def test_an_unwritable_cache_is_reported(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(verdicts, "measure", lambda calls, device: [Verdict(2.0, 1.0, 0.0)])
    assert verdicts.of_calls([temporal_call()], CPU) == [Verdict(2.0, 1.0, 0.0)]
    assert "Cannot save the choice of kernels" in caplog.text


def test_triton_caches_kernels_on_the_local_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    launch.use_local_triton_cache()
    folder = os.environ["TRITON_CACHE_DIR"]
    assert os.path.dirname(folder) == str(tmp_path) and os.stat(folder).st_mode & 0o777 == 0o700
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(os, "getuid", lambda: -1)  # the folder belongs to another user
    launch.use_local_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] not in (folder, str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "own")
    launch.use_local_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "own"
