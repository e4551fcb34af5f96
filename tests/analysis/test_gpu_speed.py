"""`slowfast-lara benchmark gpu`, run on the CPU."""

import csv
import getpass
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

import slowfast_lara
from slowfast_lara.analysis import gpu_jobs
from slowfast_lara.analysis.gpu_jobs import PATHS, Case, Settings, check_kernels
from slowfast_lara.analysis.gpu_speed import Plan, ResultFile, Row, _table, anonymous, verdict
from slowfast_lara.analysis.measure import WARM_UP, call_times
from slowfast_lara.analysis.worker import JobFailed, Worker
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.attention.kernels import self_check
from slowfast_lara.errors import InputError
from slowfast_lara.models.attention_config import display_name
from tests.helpers.commands import benchmark
from tests.helpers.preloaded import environment
from tests.helpers.small_models import only_error

CPU = ["gpu", "--device", "cpu", "--crops", "32", "--frames", "2", "--clips", "1", "--layers", "1"]
CPU += ["--seconds", "0.01", "--precisions", "float32", "--paths", "torch"]


def flags(out, *more):
    return [*CPU, "--attentions", "exact", "lara", "--out", str(out), *more]


def rows_of(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_machine_without_a_gpu(tmp_path, capsys):
    assert benchmark(["gpu", "--out", str(tmp_path / "x")]) == 2
    assert "no GPU" in only_error(capsys)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_file_table_and_verdict(tmp_path, capsys):
    assert benchmark(flags(tmp_path / "sub" / "gpu")) == 0
    out, err = capsys.readouterr()
    rows = rows_of(tmp_path / "sub" / "gpu.csv")
    timed = [(row["part"], row["attention"]) for row in rows]
    models = [(part, name) for part in ("step", "inference") for name in ("exact", "lara")]
    assert timed == [("attention", "exact"), ("attention", "lara"), ("temporal", ""), *models]
    for row in rows:
        assert float(row["ms"]) > 0 and float(row["host_ms"]) > 0 and not row["problem"]
        assert (row["crop"], row["frames"], row["path"]) == ("32", "2", "torch")
    assert "[7/7, " in err
    assert len([line for line in err.splitlines() if " ms, host " in line]) == len(rows)
    *_, kernels, fastest, step, send = out.splitlines()
    assert kernels.startswith("kernels: ") and "32x2 " in fastest and "clips/s" in step
    assert "sub/gpu.csv" in send and "GPU benchmark" in send
    # Nothing in the file identifies the user or the machine.
    text = (tmp_path / "sub" / "gpu.csv").read_text()
    assert torch.__version__ in text and f"slowfast_lara {slowfast_lara.__version__}" in text
    for secret in (socket.gethostname(), str(tmp_path), os.path.expanduser("~")):
        assert secret not in text


def row(name, ms=1.5, **more):
    return Row("attention", 32, 2, "float32", name, "torch", ms, 0.5, **more)


def write_rows(path, rows, *, clips=1, torch_version="2.13"):
    machine = {"gpu": "A100", "torch": torch_version}
    with ResultFile(str(path), machine, Settings("cpu", clips, 1, 0.5)) as file:
        file.add(rows)
    return file.rows


ROWS = [row("exact", mib=7.25), row("lara", None, problem='x, "y"'), row("ra", error=0.5)]


def test_rows_are_read_back(tmp_path):
    path = tmp_path / "sub" / "gpu.csv"
    write_rows(path, ROWS)
    before = path.read_text()
    assert write_rows(path, [row("tome")]) == [*ROWS, row("tome")]
    assert path.read_text().startswith(before)


@pytest.mark.parametrize("cut", range(1, 60))
def test_torn_line_is_dropped(tmp_path, cut):
    """A process that is killed while it writes leaves the start of a line."""
    path = tmp_path / "gpu.csv"
    write_rows(path, ROWS)
    path.write_bytes(path.read_bytes()[:-cut])
    kept = write_rows(path, [])
    assert kept == ROWS[: len(kept)] and path.read_text().endswith("\n")
    assert write_rows(path, ROWS[len(kept) :]) == ROWS


@pytest.mark.parametrize("length", [0, 5, 40, 80, 120, 150, 200])
def test_torn_head_is_written_again(tmp_path, length):
    path = tmp_path / "gpu.csv"
    write_rows(path, [])
    whole = path.read_text()
    path.write_text(whole[:length])
    write_rows(path, [])
    assert path.read_text() == whole


def test_file_of_another_machine_or_setting_is_refused(tmp_path):
    path = tmp_path / "gpu.csv"
    write_rows(path, ROWS)
    before = path.read_bytes()
    with pytest.raises(InputError, match="'settings: device cpu'|'clips 1', but this is 'clips 2'"):
        write_rows(path, [], clips=2)
    with pytest.raises(InputError, match="with 'torch 2.13', but this is 'torch 2.14'"):
        write_rows(path, [], torch_version="2.14")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line", ["attention,32,2,float32,exact,torch,fast,,,,", "attention,a", '"', "", "# note"]
)
def test_invalid_row_is_refused(tmp_path, line):
    path = tmp_path / "gpu.csv"
    write_rows(path, ROWS)
    with open(path, "a") as file:
        file.write(f"{line}\n")
    before = path.read_bytes()
    with pytest.raises(InputError, match="gpu.csv: row 4 is invalid"):
        write_rows(path, [])
    assert path.read_bytes() == before


def test_other_files_are_not_touched(tmp_path):
    path = tmp_path / "gpu.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="measured with 'a,b'"):
        write_rows(path, [])
    assert path.read_text() == "a,b\n1,2\n"
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_rows(path, [])


def test_unknown_attention_and_bad_numbers(tmp_path, capsys):
    assert benchmark([*CPU, "--attentions", "no", "--out", str(tmp_path / "x")]) == 2
    assert "unknown attention 'no'" in only_error(capsys)
    for bad in (["--seconds", "nan"], ["--minutes", "0"], ["--crops", "100"]):
        with pytest.raises(SystemExit) as ended:
            benchmark([*CPU, *bad])
        assert ended.value.code == 2 and only_error(capsys)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_out_of_memory_is_recorded_and_the_rest_is_measured(tmp_path, capsys):
    """2**46 clips do not fit into any memory; the temporal stage and the models neither."""
    huge = ["--clips", str(2**46), "--attentions", "exact"]
    assert benchmark([*CPU, *huge, "--out", str(tmp_path / "gpu")]) == 0
    rows = rows_of(tmp_path / "gpu.csv")
    assert [row["part"] for row in rows] == ["attention", "temporal", "step", "inference"]
    assert all(row["problem"] and not row["ms"] for row in rows)
    out = capsys.readouterr().out
    assert out.count("not measured") == 2


@pytest.mark.slow
def test_time_limit(tmp_path, capsys):
    assert benchmark([*flags(tmp_path / "gpu"), "--minutes", "1e-9"]) == 0
    out = capsys.readouterr().out
    assert "7 measurements are left: repeat the command" in out
    assert rows_of(tmp_path / "gpu.csv") == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_process_resumes_and_leaves_no_worker(tmp_path, number):
    command = [sys.executable, "-m", "slowfast_lara.cli", "benchmark", *flags("gpu")]
    # Long measurements, so that the signal arrives during one.
    command[command.index("0.01")] = "1"
    options = {"cwd": tmp_path, "env": environment(), "text": True, "start_new_session": True}
    # A shell starts background jobs, perhaps these tests, with SIGINT ignored.
    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    for line in process.stderr:
        if line.startswith("[2/7"):
            break
    # Ctrl-C in a terminal reaches the worker too.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    assert "Traceback" not in err
    assert_ends(process.pid)
    before = (tmp_path / "gpu.csv").read_text()
    assert len(rows_of(tmp_path / "gpu.csv")) in (2, 3)
    done = subprocess.run(command, capture_output=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gpu.csv").read_text().startswith(before)
    assert len(rows_of(tmp_path / "gpu.csv")) == 7


def group_exists(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_worker_survives_crashes_hangs_and_exceptions():
    with Worker() as worker:
        assert worker.call(len, "abc", limit=60) == 3
        with pytest.raises(JobFailed, match="ValueError: invalid literal"):
            worker.call(int, "x", limit=60)
        with pytest.raises(JobFailed, match="exit code 3"):
            worker.call(os._exit, 3, limit=60)
        with pytest.raises(JobFailed, match="killed by signal 9"):
            worker.call(signal.raise_signal, signal.SIGKILL, limit=60)
        with pytest.raises(JobFailed, match="no result after 0.5 s"):
            worker.call(time.sleep, 60, limit=0.5)
        assert worker.call(len, "ab", limit=60) == 2
        # Ctrl-C is for the parent.
        assert worker.call(signal.raise_signal, signal.SIGINT, limit=60) is None


def test_hanging_worker_ends_with_its_parent():
    program = "import time; from slowfast_lara.analysis.worker import Worker; print(flush=True)"
    program += "; Worker().call(time.sleep, 600, limit=600)"
    options = {"env": environment(), "start_new_session": True, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", program], **options)
    process.stdout.readline()
    time.sleep(2)  # the worker starts
    process.kill()
    process.wait()
    process.stdout.close()
    assert_ends(process.pid)


def assert_ends(group):
    """Wait until no process of the group is left."""
    deadline = time.monotonic() + 30
    while group_exists(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    if group_exists(group):
        os.killpg(group, signal.SIGKILL)
        pytest.fail("a process is left")


def test_call_times_are_per_call():
    calls = []

    def job():
        calls.append(time.perf_counter())
        time.sleep(0.001)

    times = call_times(job, torch.device("cpu"), seconds=1, batches=2)
    assert 0.001 <= times.device < 0.1 and 0.001 <= times.host < 0.1  # a batch takes 0.5 s
    assert len(calls) > WARM_UP + 1 + 2 * 2


def test_plan_covers_the_registry_and_puts_compilation_last():
    cases = Plan([224, 336], [8, 16], ["bfloat16", "float32"]).cases()
    assert len(set(cases)) == len(cases)
    names = {case.attention for case in cases if case.part == "attention"}
    assert names == {*map(display_name, ESTIMATORS), "lara-recommended"}
    points = {(case.crop, case.frames, case.precision) for case in cases}
    expected = {(224, 8, "bfloat16"), (336, 8, "bfloat16"), (224, 16, "bfloat16")}
    assert points == expected | {(224, 8, "float32")}
    compiled = [PATHS[case.path][1] for case in cases]
    assert compiled == sorted(compiled) and any(compiled)
    for part in ("step", "inference", "temporal"):
        assert {"torch", "triton", "compile"} <= {c.path for c in cases if c.part == part}
    assert ("attention", "nystrom", "triton") not in {(c.part, c.attention, c.path) for c in cases}
    assert ("attention", "merged", "triton") in {(c.part, c.attention, c.path) for c in cases}


@pytest.mark.slow
@pytest.mark.parametrize("attention", [*map(display_name, ESTIMATORS), "lara-recommended"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_attention_has_jobs(attention, precision):
    settings = Settings("cpu", 1, 1, 0.001)
    for part in ("attention", "temporal", "step", "inference"):
        cost = gpu_jobs.measure(Case(part, 32, 2, precision, attention, "torch"), settings)
        assert cost.ms > 0 and cost.mib is None


@pytest.mark.slow
def test_checks_of_the_kernels_in_the_interpreter(tmp_path):
    """The checks are recorded before the timings, here of none."""
    command = [sys.executable, "-m", "slowfast_lara.cli", "benchmark", *CPU, "triton"]
    command += ["--minutes", "1e-9", "--out", "gpu"]
    options = {"cwd": tmp_path, "env": {**environment(), "TRITON_INTERPRET": "1"}, "text": True}
    for attempt in range(2):
        done = subprocess.run(command, capture_output=True, **options)
        assert done.returncode == 0, done.stderr
        assert ("comparing" in done.stderr) == (attempt == 0)
        checks = rows_of(tmp_path / "gpu.csv")
        assert {row["part"] for row in checks} == {"check"} and len(checks) > 5
        assert checks[-1]["attention"] == "all operators"
        assert all(float(row["error"]) < 1e-3 and not row["problem"] for row in checks)
        assert "kernels: agree with float64" in done.stdout


@pytest.mark.slow
def test_jobs_with_the_kernels_in_the_interpreter():
    program = """
from slowfast_lara.analysis.gpu_jobs import _JOBS, Case, Settings
from slowfast_lara.attention.kernels import launch
for part in ("attention", "temporal", "inference"):
    _JOBS[part](Case(part, 32, 2, "float32", "lara", "triton"), Settings("cpu", 1, 1, 0.1))()
print("done", launch.interpreted())
"""
    env = {**environment(), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout == "done True\n", done.stderr


@pytest.mark.slow
def test_compiled_path(tmp_path):
    command = [*CPU[:-1], "compile", "--attentions", "exact", "--out", str(tmp_path / "gpu")]
    assert benchmark(command) == 0
    rows = rows_of(tmp_path / "gpu.csv")
    assert {row["path"] for row in rows} == {"compile"} and len(rows) == 4
    assert all(row["ms"] for row in rows), rows


def test_problems_are_anonymous():
    user, host = getpass.getuser(), socket.gethostname()
    text = f"OSError: '/home/{user}/.triton/x y' of {user}@{host}: ratio 1/2, C:\\Users\\me\\a.txt"
    shown = anonymous(text)
    assert user not in shown and host not in shown and "home" not in shown and "me\\a" not in shown
    assert "ratio 1/2" in shown and shown.startswith("OSError: 'PATH")


def test_every_operator_is_compared_with_float64(monkeypatch):
    kernels = with_torch_kernels(monkeypatch)
    for precision in ("float32", "float16"):
        checks = check_kernels("cpu", precision)
        half_only = {"merged"} if precision == "float16" else set()
        names = {check.operator.split()[0] for check in checks}
        assert names == {"landmarks", "proposals", "key_stats", "combine", "temporal"} | half_only
        assert not any(check.problem for check in checks)
        largest = max(check.error for check in checks)
        assert 0 < largest < 1e-4 if precision == "float32" else largest > 1e-4
    kernels["temporal"] = lambda q, *_: q * 2
    assert [c.operator for c in check_kernels("cpu", "float32") if c.problem] == ["temporal"]


def with_torch_kernels(monkeypatch):
    """Replace the kernels of the checks by PyTorch's, or by those in the returned dictionary."""
    small_cases, merged_case = self_check.small_cases, self_check.merged_case
    kernels = {}

    def with_kernel(case):
        return case._replace(kernel=kernels.get(case.name, case.reference))

    monkeypatch.setattr(
        self_check, "small_cases", lambda *sizes: list(map(with_kernel, small_cases(*sizes)))
    )
    monkeypatch.setattr(self_check, "merged_case", lambda *sizes: with_kernel(merged_case(*sizes)))
    return kernels


def timing(part, crop, name, path, ms, host=0.1, **more):
    return Row(part, crop, 8, "bfloat16", name, path, ms, host, **more)


def test_verdict_and_columns():
    rows = [
        Row("check", 0, 0, "bfloat16", "combine", "triton", error=2e-3),
        Row("check", 0, 0, "bfloat16", "all operators", "triton", error=2e-3),
        timing("attention", 224, "exact", "torch", 1.0),
        timing("attention", 224, "lara", "torch", 5.0),
        timing("attention", 224, "lara", "triton", 2.0),
        timing("attention", 448, "exact", "torch", 8.0),
        timing("attention", 448, "exact", "compile", None, None, problem="out of memory"),
        timing("attention", 448, "lara", "triton", 2.0),
        timing("step", 224, "exact", "torch", 100.0, 95.0, mib=7.0),
    ]
    plan = Plan([224, 448], [8], ["bfloat16", "float32"])
    assert verdict(rows, plan, 8, "") == [
        "kernels: agree with float64, largest relative error 2.0e-03",
        "fastest attention in bfloat16: 224x8 exact (torch); "
        "448x8 lara (triton) in 0.25 of the time of exact",
        "fastest training step in bfloat16: 224x8 exact (torch) 80.0 clips/s, limited by Python",
    ]
    failed = Row("check", 0, 0, "float32", "all operators", "triton", problem="1 of 3 failed")
    assert verdict([*rows, failed], plan, 8, "")[0] == "kernels: float32: 1 of 3 failed"
    assert verdict([], plan, 8, "no Triton")[0] == "kernels: no Triton"
    head, *cells = _table(rows)
    assert head[4:8] == ["torch", "triton", "compile", "triton+compile"]
    assert cells[1][:6] == ["attention", "224x8", "bfloat16", "lara", "5.000", "2.000"]
    assert cells[2][-1] == "compile: out of memory"
