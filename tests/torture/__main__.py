"""python -m tests.torture: see the package."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.torture import processes
from tests.torture.experiment import NOT_APPLIED, Plan, Report, draw_plan, run_experiment
from tests.torture.faults import FAULTS, what_this_machine_allows
from tests.torture.setting import Reference, config_file, read_reference, write_videos

IN_NAMESPACE = "SLOWFAST_LARA_TORTURE_NAMESPACE"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="begin no fault after these")
    parser.add_argument("--faults", type=int, default=10**9, help="begin none after so many")
    parser.add_argument("--experiment", type=int, help="only this one of the seed's experiments")
    parser.add_argument("--only", metavar="KIND", choices=[*FAULTS], help="only this kind of fault")
    parser.add_argument("--jobs", type=int, default=1, help="experiments at a time")
    parser.add_argument("--folder", type=Path, help="where to work (default: a new one)")
    return parser.parse_args(argv)


class Attack:
    """Experiments one after the other until the time is over."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = args.folder or Path(tempfile.mkdtemp(prefix="torture-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.allowed = what_this_machine_allows()
        self.report = Report()
        self.begun, self.numbers = time.monotonic(), 0
        self.references: dict[str, Reference] = {}
        self.lock = threading.Lock()

    def run(self) -> int:
        missing = {"mounts", "networks"} - self.allowed
        if missing:
            self.tell(f"not on this machine: faults that need {', '.join(sorted(missing))}")
        self.videos = write_videos(self.folder / "videos")
        with ThreadPoolExecutor(self.args.jobs) as pool:
            for worker in [pool.submit(self.work) for _ in range(self.args.jobs)]:
                worker.result()
        return self.summarise()

    def work(self) -> None:
        while (number := self.next_number()) is not None:
            plan = draw_plan(self.args.seed, number, self.allowed, self.args.only)
            violations = run_experiment(
                self.args.seed,
                number,
                plan,
                self.folder / f"experiment{number}",
                self.videos,
                self.reference_for(plan),
                self.report,
                disk="mounts" in self.allowed,
                over=self.over,
                tell=self.tell,
            )
            if violations:
                self.report.violations[number] = violations
                told = "\n".join(f"  {problem:.3000}" for problem in violations)
                self.tell(f"experiment {number}: VIOLATIONS\n{told}")
                self.tell(f"again: {self.command(number)}; kept: {self.folder}/experiment{number}")

    def next_number(self) -> int | None:
        with self.lock:
            only = self.args.experiment
            if self.over() or (only is not None and self.numbers):
                return None
            self.numbers += 1
            return self.numbers - 1 if only is None else only

    def over(self) -> bool:
        spent = time.monotonic() - self.begun
        return spent > 60 * self.args.minutes or self.report.faults() >= self.args.faults

    def reference_for(self, plan: Plan) -> Reference | None:
        """Made when it is first needed; none where batches change, which gives other bits."""
        if plan.way == "mixed":
            return None
        with self.lock:
            if plan.way not in self.references:
                self.references[plan.way] = self.undisturbed(plan.way)
            return self.references[plan.way]

    def undisturbed(self, way: str) -> Reference:
        output, launch = self.folder / f"reference_{way}", "alone" if way == "alone" else "spawn"
        changes = {"TRAIN__CHECKPOINT_ITERATIONS": 1, "TRAIN__CHECKPOINT_KEEP": 0}
        config = config_file(self.folder / f"{way}.yaml", self.videos, output, **changes)
        started = time.monotonic()
        run = processes.start(launch, self.folder, config)
        if run.wait(600) != [0]:
            raise SystemExit(f"the reference has failed: {run.said()}")
        self.tell(f"reference of {way!r}: {time.monotonic() - started:.0f} s")
        return read_reference(output)

    def command(self, number: int) -> str:
        only = f" --only {self.args.only!r}" if self.args.only else ""
        return f"python -m tests.torture --seed {self.args.seed} --experiment {number}{only}"

    def tell(self, text: str) -> None:
        print(f"[{(time.monotonic() - self.begun) / 60:5.1f} min] {text}", flush=True)

    def summarise(self) -> int:
        rows = sorted(self.report.ended.items())
        width = max((len(kind) for kind, _ in rows), default=4)
        print(f"\n{'fault':<{width}}  count  how the run ended")
        for kind, counts in rows:
            applied = sum(counts.values()) - counts[NOT_APPLIED]
            told = ", ".join(f"{how}: {count}" for how, count in counts.most_common())
            print(f"{kind:<{width}}  {applied:5d}  {told}")
        broken = sorted(self.report.violations)
        count = sum(map(len, self.report.violations.values()))
        print(
            f"\n{self.report.faults()} faults in {self.numbers} experiments, seed "
            f"{self.args.seed}, {(time.monotonic() - self.begun) / 60:.1f} minutes: "
            f"{count} violations in {len(broken)} experiments"
        )
        for number in broken:
            print(f"again: {self.command(number)}; kept: {self.folder}/experiment{number}")
        if not broken and not self.args.folder:
            shutil.rmtree(self.folder)
        return 1 if broken else 0


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if IN_NAMESPACE not in os.environ and "mounts" in what_this_machine_allows():
        # What is mounted is then seen by nobody else, and goes away with this process.
        os.environ[IN_NAMESPACE] = "1"
        command = ["unshare", "--mount", "--propagation", "private", sys.executable]
        os.execvp(command[0], [*command, "-m", "tests.torture", *argv])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_at_once)
    # What is started under `nohup` would ignore it too; a handler is not handed on.
    signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        return Attack(args).run()
    finally:
        processes.kill_what_is_ours()


def _end_at_once(*_: object) -> None:
    processes.kill_what_is_ours()
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
