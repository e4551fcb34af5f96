"""One experiment: its folder, how a run is started in it, and what is looked at when it ends."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.test_ending import own_copy
from tests.torture import checks, processes
from tests.torture.checks import Since
from tests.torture.faults import ANY
from tests.torture.folder import PHASES, Moment, RunFolder
from tests.torture.processes import Started
from tests.torture.setting import GLOBAL_BATCH, LAST, Reference, config_file, read_scores

# Generous, for a machine that has much else to do; what hangs, hangs for longer.
END_SECONDS = 120
MOMENT_SECONDS = 240
DISK = "64m"
# The launchers that a kind of experiment changes between. Two processes give the same bits
# however they are started; with one or two in turn, only the samples can be counted.
WAYS = {
    "alone": ("alone",),
    "two": ("nodes", "torchrun", "spawn"),
    "mixed": ("alone", "nodes", "torchrun"),
}
_GOING_ON = re.compile(r"Going on with a test: (\d+) videos")


@dataclass(frozen=True)
class Beginning:
    """What the folder was like when a run was started, and what it was started for."""

    since: Since = Since()
    log_start: int = 0
    scored: dict[str, set[int]] = field(default_factory=dict)
    batch: int = GLOBAL_BATCH
    trains: bool = True
    other_test: bool = False


class Case:
    """The state of an experiment. What does not hold is added to `violations`."""

    def __init__(
        self, way: str, folder: Path, videos: Path, reference: Reference | None, *, disk: bool
    ) -> None:
        self.way, self.folder, self.reference = way, folder, reference
        folder.mkdir(parents=True)
        self.data = folder / "data"
        self.data.mkdir()
        self.videos = own_copy(self.data, videos)
        self.disk: Path | None = folder / "disk" if disk else None
        if self.disk:
            self.disk.mkdir()
            _call("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.disk))
        self.out = RunFolder((self.disk or folder) / "out")
        self.violations: list[str] = []
        # Checkpoints that cannot be read, by their inode: a run may write them anew.
        self.damaged: dict[str, int] = {}
        self.broken_tests: set[str] = set()
        self.best_may_differ = False
        self.other_scores = False  # whether a test of other settings has been begun
        # Of what an error has to speak, if the next run ends with one.
        self.mention = ""
        self.undo: list[Callable[[], Any]] = []
        self.runs = 0
        self.beginning = Beginning()  # of the run that is going on

    # Starting

    def newest(self) -> str | None:
        """The furthest checkpoint that is whole."""
        for name in reversed(self.out.places()):
            path = self.out.checkpoints / name
            if self.damaged.get(name) != os.lstat(path).st_ino:
                return name
        return None

    def finished(self) -> bool:
        return self.newest() == LAST

    def start(
        self, launch: str = "alone", changes: dict[str, Any] | None = None, **options: Any
    ) -> Started:
        """Start a run; `changes` are of its config, `options` as of `processes.start`."""
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
        self.beginning = Beginning(
            checks.read_since(self.out, self.newest()),
            self.out.log_size(),
            self.out.scored(),
            batch,
            changes.get("TRAIN__ENABLE", True),
            any(key.startswith("TEST__") for key in changes),
        )
        return processes.start(launch, self.folder, config, **options)

    def reach(self, run: Started, moment: Moment) -> bool:
        """Wait for a moment of a run; whether the run is still there."""
        return self.out.wait_for(run, moment, self.beginning.log_start, MOMENT_SECONDS)

    # Ending

    def finish(self, run: Started, allowed: set[int], *, seconds: float = END_SECONDS) -> str:
        """Wait for the end of a run and look at what it leaves; how it ended, in short."""
        codes = run.wait(seconds)
        if None in codes:
            self._violated([f"stack of what hangs: {_stacks(run)}"])
        else:
            self._violated(checks.check_nobody_left(run))
        self._violated(checks.check_codes(run, codes, allowed))
        run.kill_all()
        self._violated(checks.check_words(run, codes))
        if codes == [1] and self.mention not in (said := run.said()[0]):
            self._violated([f"{self.mention!r} is not in {said!r:.2000}"])
        self.mention = ""
        self._violated(checks.check_files(self.out, codes))
        # torchrun ends with a code of its own.
        saved = any("; saved " in said for said in run.said())
        self._look_at_training(stopped=saved or set(codes) <= {0, 75})
        self._look_at_test(codes)
        return "/".join(sorted({checks.name_of(code) for code in codes}))

    def refused(self, mention: str, changes: dict[str, Any] | None = None, **options: Any) -> str:
        """A run that must be refused: code 2, one line, a folder that is as it was."""
        before = self.out.snapshot()
        run = self.start("alone", changes, **options)
        ended = self.finish(run, {2})
        if mention not in run.said()[0]:
            self._violated([f"{mention!r} is not in {run.said()[0]!r:.2000}"])
        after = self.out.snapshot()
        if after != before:
            changed = [name for name in before | after if before.get(name) != after.get(name)]
            self._violated([f"a run that was refused has changed {changed}"])
        return ended

    def never(self, canary: Path) -> None:
        """A violation if a file is there that only hostile code can have made."""
        if canary.exists():
            self._violated([f"hostile code was run: {canary}"])

    def restore(self) -> None:
        """Undo what a fault has done to files."""
        while self.undo:
            self.undo.pop()()

    def close(self, *, keep: bool) -> None:
        self.restore()
        if keep and self.disk:  # it goes away with this process
            shutil.copytree(self.disk, self.folder / "kept", ignore=_no_plain_file)
        if self.disk:
            _call("umount", "-l", str(self.disk))
        if not keep:
            shutil.rmtree(self.folder)

    # What must hold

    def look_at_end(self) -> None:
        """After the last run, which nobody has disturbed."""
        if not self.finished():
            self._violated([f"the last checkpoint is {self.newest()}"])
            return
        scores = self.reference.scores if self.reference else self._scores_anew()
        self._violated(checks.check_results(self.out, scores, set()))
        if self.reference and not self.best_may_differ:
            best = checks.read_checkpoint(self.out.checkpoints / "best.pyth")
            if checks.content_sum(best) != self.reference.best:
                self._violated(["best.pyth is not that of the reference"])

    def _scores_anew(self) -> Any:
        """The scores of the last checkpoint, from a test in a folder of its own."""
        other = RunFolder(self.folder / "tested")
        last = str(self.out.checkpoints / LAST)
        changes = {"TRAIN__ENABLE": False, "TEST__CHECKPOINT_FILE_PATH": last}
        config = config_file(self.folder / "tested.yaml", self.data, other.path, **changes)
        run = processes.start("alone", self.folder, config)
        codes = run.wait(END_SECONDS)
        run.kill_all()
        self._violated(checks.check_codes(run, codes, {0}))
        return read_scores(other.path) if codes == [0] else None

    def _look_at_training(self, *, stopped: bool) -> None:
        newest, out, begun = self.newest(), self.out, self.beginning
        if begun.trains and "Threads of PyTorch" in out.log(begun.log_start):  # the start is logged
            told = out.continued_from(begun.log_start)
            if told != begun.since.name:
                self._violated([f"it went on from {told}, not from {begun.since.name}"])
        progress = (newest, begun.since, begun.log_start, begun.batch)
        self._violated(checks.check_progress(out, *progress, stopped))
        self._violated(checks.check_checkpoint(out, newest, self.reference))
        self._violated(checks.check_steps(out, begun.since, newest, begun.batch))

    def _look_at_test(self, codes: list[int | None]) -> None:
        begun = self.beginning
        log = self.out.log(begun.log_start)
        told = _GOING_ON.search(log)
        counts = {len(videos) for videos in begun.scored.values() if videos}
        if told and int(told[1]) not in counts:
            self._violated([f"a test goes on from {told[1]} videos; {counts} were scored"])
        same = begun.since.name == LAST and not begun.other_test
        if '"test_iter"' in log and counts and same and not self.other_scores and not told:
            self._violated([f"a test began anew, though {counts} videos were scored"])
        if set(codes) == {0} and not begun.other_test:
            scores = self.reference.scores if self.reference else None
            self._violated(checks.check_results(self.out, scores, self.broken_tests))

    def _violated(self, found: Any) -> None:
        for problem in found:
            self.violations.append(f"run {self.runs}: {problem}")


def draw_start(
    case: Case, rng: random.Random, launches: tuple[str, ...] = ANY
) -> tuple[str, dict[str, Any]]:
    """A launcher, one of `launches`, and keys that change no number."""
    launch = rng.choice([launch for launch in WAYS[case.way] if launch in launches])
    changes: dict[str, Any] = {
        "DATA_LOADER__NUM_WORKERS": rng.choice([0, 1, 2, 2, 3]),
        "LOG_PERIOD": rng.choice([1, 1, 1, 2]),
        "DATA_LOADER__PIN_MEMORY": rng.random() < 0.5,
        "TRAIN__CHECKPOINT_KEEP": rng.choice([2, 4, 8]),
        "DIST_TIMEOUT": rng.choice([600, 1800]),
    }
    if case.way == "mixed":
        changes["global batch"] = rng.choice([1, 2, 3, 4] if launch == "alone" else [2, 4])
    return launch, changes


def draw_moment(rng: random.Random, launch: str) -> Moment:
    """Processes that wait for one that never came do so for minutes: not at their start."""
    early = 2 if launch == "alone" else 0
    phase = rng.choices(PHASES, [early, 10, 3, 1, 5])[0]
    if phase == "start":
        return Moment(phase, 0, rng.uniform(0, 6))
    most = {"train": 14, "writing": 1, "val": 1, "test": 12}[phase]
    return Moment(phase, rng.randint(1, most), rng.choice([0, rng.uniform(0, 0.3)]))


def _stacks(run: Started) -> list[str]:
    """Where the processes are in the kernel."""
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


def _no_plain_file(folder: str, names: list[str]) -> set[str]:
    paths = [Path(folder, name) for name in names]
    return {path.name for path in paths if not (path.is_file() or path.is_dir())}
