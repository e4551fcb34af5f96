"""One experiment: its folder, how runs start in it, and the checks after each."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.runs import copy_set
from tests.torture import checks, processes
from tests.torture.checks import StartPoint
from tests.torture.faults import ANY
from tests.torture.processes import StartedRun, send
from tests.torture.run_folder import PHASES, RunFolder, Trigger
from tests.torture.workload import GLOBAL_BATCH, LAST, Reference, config_file, read_scores

# Generous limits for a loaded machine; processes that hang take longer.
END_SECONDS = 120
TRIGGER_SECONDS = 240
DISK = "64m"
# The launchers of each mode. Two processes compute the same weights with any launcher; in mode
# "mixed" the batch size varies, so that only the number of samples can be checked.
MODES = {
    "alone": ("alone",),
    "two": ("nodes", "torchrun", "spawn"),
    "mixed": ("alone", "nodes", "torchrun"),
}
_RESUMED_TEST = re.compile(r"Resuming a test: (\d+) videos?")


@dataclass(frozen=True)
class StartState:
    """The state of the folder when a run starts, and what the run does."""

    start_point: StartPoint = StartPoint()
    log_start: int = 0
    scored: dict[str, set[int]] = field(default_factory=dict)
    batch: int = GLOBAL_BATCH
    trains: bool = True
    other_test: bool = False
    other_weights: bool = False


class Case:
    """The state of an experiment; failed checks are added to `violations`."""

    def __init__(
        self, mode: str, folder: Path, videos: Path, reference: Reference | None, *, disk: bool
    ) -> None:
        self.mode, self.folder, self.reference = mode, folder, reference
        folder.mkdir(parents=True)
        self.data = folder / "data"
        self.data.mkdir()
        self.videos = copy_set(self.data, videos)
        self.disk: Path | None = folder / "disk" if disk else None
        if self.disk:
            self.disk.mkdir()
            _call("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.disk))
        self.out = RunFolder((self.disk or folder) / "out")
        self.violations: list[str] = []
        # Unreadable checkpoints with their inodes: a run may replace them.
        self.damaged: dict[str, int] = {}
        self.broken_tests: set[str] = set()
        self.best_may_differ = False
        self.other_scores = False  # whether a test with other settings was started
        # Text that the error of the next run must contain.
        self.expected_text = ""
        self.undo: list[Callable[[], Any]] = []
        self.runs = 0
        self.start_state = StartState()  # of the current run

    def newest(self) -> str | None:
        """Return the readable checkpoint with the most progress."""
        for name in reversed(self.out.positions()):
            path = self.out.checkpoints / name
            if self.damaged.get(name) != os.lstat(path).st_ino:
                return name
        return None

    def finished(self) -> bool:
        return self.newest() == LAST

    def start(
        self, launch: str = "alone", changes: dict[str, Any] | None = None, **options: Any
    ) -> StartedRun:
        """Start a run with `changes` to the config and `options` of `processes.start`."""
        changes = dict(changes or {})
        self.runs += 1
        batch = changes.pop("global batch", GLOBAL_BATCH)
        per_node = batch // 2 if launch == "nodes" else batch
        data = changes.pop("data", self.data)
        config = options.pop("config", None) or config_file(
            self.folder / f"run{self.runs:02d}.yaml",
            data,
            self.out.path,
            **{"TRAIN__BATCH_SIZE": per_node, **changes},
        )
        self.start_state = StartState(
            checks.read_start_point(self.out, self.newest()),
            self.out.log_size(),
            self.out.scored(),
            batch,
            changes.get("TRAIN__ENABLE", True),
            any(key.startswith("TEST__") for key in changes),
            # With another batch size, a repeated epoch ends with other weights.
            self.mode == "mixed" and self.out.has_scores_of_other_weights(LAST),
        )
        run = processes.start(launch, self.folder, config, **options)
        run.restarts = "TRAIN__MAX_RESTARTS" in changes
        return run

    def reach(self, run: StartedRun, trigger: Trigger) -> bool:
        """Wait for a trigger; return whether the run is still alive."""
        return self.out.wait_for(run, trigger, self.start_state.log_start, TRIGGER_SECONDS)

    def finish(self, run: StartedRun, allowed: set[int], *, seconds: float = END_SECONDS) -> str:
        """Wait for a run to end and check it; return its exit codes as text."""
        codes = run.wait(seconds)
        if None in codes:
            self._record([f"kernel stacks of hanging processes: {_stacks(run)}"])
            send(run.all_pids(), signal.SIGABRT)  # prints Python's stacks to the files of stderr
            time.sleep(2)
        else:
            self._record(checks.check_no_process_left(run))
        self._record(checks.check_codes(run, codes, allowed))
        run.kill_all()
        self._record(checks.check_stderr(run, codes))
        if codes == [1] and self.expected_text not in (text := run.stderr_texts()[0]):
            self._record([f"{self.expected_text!r} is not in {text!r:.2000}"])
        self.expected_text = ""
        self._record(checks.check_files(self.out, codes))
        # torchrun has its own exit codes.
        saved = any("; saved " in text for text in run.stderr_texts())
        self._check_training(stopped=saved or set(codes) <= {0, 75})
        self._check_test(codes)
        return "/".join(sorted({checks.name_of(code) for code in codes}))

    def refused(
        self, expected_text: str, changes: dict[str, Any] | None = None, **options: Any
    ) -> str:
        """Start a run that must fail with code 2, one line, and an unchanged folder."""
        before = self.out.snapshot()
        run = self.start("alone", changes, **options)
        ended = self.finish(run, {2})
        if expected_text not in run.stderr_texts()[0]:
            self._record([f"{expected_text!r} is not in {run.stderr_texts()[0]!r:.2000}"])
        after = self.out.snapshot()
        if after != before:
            changed = [name for name in before | after if before.get(name) != after.get(name)]
            self._record([f"a refused run changed {changed}"])
        return ended

    def check_not_executed(self, canary: Path) -> None:
        """Record a violation if the canary of hostile code exists."""
        if canary.exists():
            self._record([f"hostile code was executed: {canary}"])

    def restore(self) -> None:
        """Undo the changes of a fault to files."""
        while self.undo:
            self.undo.pop()()

    def close(self, *, keep: bool) -> None:
        self.restore()
        if keep and self.disk:  # the mount ends with this process
            shutil.copytree(self.disk, self.folder / "kept", ignore=_not_regular)
        if self.disk:
            _call("umount", "-l", str(self.disk))
        if not keep:
            shutil.rmtree(self.folder)

    def check_end(self) -> None:
        """Check the results of the last, undisturbed run."""
        if not self.finished():
            self._record([f"the last checkpoint is {self.newest()}"])
            return
        scores = self.reference.scores if self.reference else self._score_last_checkpoint()
        self._record(checks.check_results(self.out, scores, set()))
        if self.reference and not self.best_may_differ:
            best = checks.read_checkpoint(self.out.checkpoints / "best.pyth")
            if checks.content_digest(best) != self.reference.best:
                self._record(["best.pyth is not that of the reference"])

    def _score_last_checkpoint(self) -> Any:
        """Test the last checkpoint in another folder; return the scores."""
        other = RunFolder(self.folder / "tested")
        last = str(self.out.checkpoints / LAST)
        changes = {"TRAIN__ENABLE": False, "TEST__CHECKPOINT_FILE_PATH": last}
        config = config_file(self.folder / "tested.yaml", self.data, other.path, **changes)
        run = processes.start("alone", self.folder, config)
        codes = run.wait(END_SECONDS)
        run.kill_all()
        self._record(checks.check_codes(run, codes, {0}))
        return read_scores(other.path) if codes == [0] else None

    def _check_training(self, *, stopped: bool) -> None:
        newest, out, state = self.newest(), self.out, self.start_state
        if state.trains and "PyTorch threads" in out.log(state.log_start):
            resumed_from = out.resumed_from(state.log_start)
            if resumed_from != state.start_point.name:
                problem = f"resumed from {resumed_from} instead of {state.start_point.name}"
                self._record([problem])
        progress = (newest, state.start_point, state.log_start, state.batch)
        self._record(checks.check_progress(out, *progress, stopped))
        self._record(checks.check_checkpoint(out, newest, self.reference))
        self._record(checks.check_steps(out, state.start_point, newest, state.batch))

    def _check_test(self, codes: list[int | None]) -> None:
        state = self.start_state
        log = self.out.log_before_restart(state.log_start)
        resumed = _RESUMED_TEST.search(log)
        counts = {len(videos) for videos in state.scored.values() if videos}
        if resumed and int(resumed[1]) not in counts:
            self._record([f"a test resumes with {resumed[1]} videos; {counts} were scored"])
        same = state.start_point.name == LAST and not state.other_test
        other_scores = self.other_scores or state.other_weights
        if '"test_iter"' in log and counts and same and not other_scores and not resumed:
            self._record([f"a test did not resume, although {counts} videos were scored"])
        if set(codes) == {0} and not state.other_test:
            scores = self.reference.scores if self.reference else None
            self._record(checks.check_results(self.out, scores, self.broken_tests))

    def _record(self, found: Any) -> None:
        for problem in found:
            self.violations.append(f"run {self.runs}: {problem}")


def draw_start(
    case: Case, rng: random.Random, launches: tuple[str, ...] = ANY
) -> tuple[str, dict[str, Any]]:
    """Draw a launcher of `launches`, and values of keys that change no result."""
    launch = rng.choice([launch for launch in MODES[case.mode] if launch in launches])
    changes: dict[str, Any] = {
        "DATA_LOADER__NUM_WORKERS": rng.choice([0, 1, 2, 2, 3]),
        "LOG_PERIOD": rng.choice([1, 1, 1, 2]),
        "DATA_LOADER__PIN_MEMORY": rng.random() < 0.5,
        "TRAIN__CHECKPOINT_KEEP": rng.choice([2, 4, 8]),
        "DIST_TIMEOUT": rng.choice([600, 1800]),
    }
    if case.mode == "mixed":
        changes["global batch"] = rng.choice([1, 2, 3, 4] if launch == "alone" else [2, 4])
    return launch, changes


def draw_trigger(rng: random.Random, launch: str) -> Trigger:
    """Draw a trigger; with several processes not at the start, where a loss takes minutes."""
    early = 2 if launch == "alone" else 0
    phase = rng.choices(PHASES, [early, 10, 3, 1, 5])[0]
    if phase == "start":
        return Trigger(phase, 0, rng.uniform(0, 6))
    most = {"train": 14, "writing": 1, "val": 1, "test": 12}[phase]
    return Trigger(phase, rng.randint(1, most), rng.choice([0, rng.uniform(0, 0.3)]))


def _stacks(run: StartedRun) -> list[str]:
    """Return the kernel function in which each process waits."""
    found = []
    for pid in run.all_pids():
        try:
            state = Path(f"/proc/{pid}/wchan").read_text()
        except OSError:
            continue
        found.append(f"{pid} in {state}")
    return found


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _not_regular(folder: str, names: list[str]) -> set[str]:
    paths = [Path(folder, name) for name in names]
    return {path.name for path in paths if not (path.is_file() or path.is_dir())}
