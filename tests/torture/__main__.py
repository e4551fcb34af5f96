"""Command line of the fault injection: python -m tests.torture."""

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
from tests.torture.faults import FAULTS, available_privileges
from tests.torture.workload import Reference, config_file, read_reference, write_videos

IN_NAMESPACE = "SLOWFAST_LARA_TORTURE_NAMESPACE"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="start no fault after this time")
    parser.add_argument("--faults", type=int, default=10**9, help="start no more faults than this")
    parser.add_argument("--experiment", type=int, help="run only this experiment of the seed")
    parser.add_argument(
        "--only", metavar="KIND", choices=[*FAULTS], help="inject only this kind of fault"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel experiments")
    parser.add_argument("--folder", type=Path, help="working folder (default: a new one)")
    return parser.parse_args(argv)


class Campaign:
    """Runs experiments until the time is over."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = args.folder or Path(tempfile.mkdtemp(prefix="torture-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.privileges = available_privileges()
        self.report = Report()
        self.started, self.count = time.monotonic(), 0
        self.references: dict[str, Reference] = {}
        self.lock = threading.Lock()

    def run(self) -> int:
        missing = {"mounts", "networks"} - self.privileges
        if missing:
            self.log(f"skipping faults that need {', '.join(sorted(missing))}")
        self.videos = write_videos(self.folder / "videos")
        with ThreadPoolExecutor(self.args.jobs) as pool:
            for worker in [pool.submit(self.work) for _ in range(self.args.jobs)]:
                worker.result()
        return self.summarise()

    def work(self) -> None:
        while (number := self.next_number()) is not None:
            plan = draw_plan(self.args.seed, number, self.privileges, self.args.only)
            violations = run_experiment(
                self.args.seed,
                number,
                plan,
                self.folder / f"experiment{number}",
                self.videos,
                self.reference_for(plan),
                self.report,
                disk="mounts" in self.privileges,
                is_over=self.is_over,
                log=self.log,
            )
            if violations:
                self.report.violations[number] = violations
                lines = "\n".join(f"  {problem:.3000}" for problem in violations)
                self.log(f"experiment {number}: VIOLATIONS\n{lines}")
                self.log(f"repeat: {self.command(number)}; kept: {self.folder}/experiment{number}")

    def next_number(self) -> int | None:
        with self.lock:
            only = self.args.experiment
            if self.is_over() or (only is not None and self.count):
                return None
            self.count += 1
            return self.count - 1 if only is None else only

    def is_over(self) -> bool:
        spent = time.monotonic() - self.started
        return spent > 60 * self.args.minutes or self.report.faults() >= self.args.faults

    def reference_for(self, plan: Plan) -> Reference | None:
        """Return the cached reference; None if the batch size varies, which changes the bits."""
        if plan.mode == "mixed":
            return None
        with self.lock:
            if plan.mode not in self.references:
                self.references[plan.mode] = self.run_reference(plan.mode)
            return self.references[plan.mode]

    def run_reference(self, mode: str) -> Reference:
        output, launch = self.folder / f"reference_{mode}", "alone" if mode == "alone" else "spawn"
        changes = {"TRAIN__CHECKPOINT_ITERATIONS": 1, "TRAIN__CHECKPOINT_KEEP": 0}
        config = config_file(self.folder / f"{mode}.yaml", self.videos, output, **changes)
        started = time.monotonic()
        run = processes.start(launch, self.folder, config)
        if run.wait(600) != [0]:
            raise SystemExit(f"the reference run failed: {run.stderr_texts()}")
        self.log(f"reference of {mode!r}: {time.monotonic() - started:.0f} s")
        return read_reference(output)

    def command(self, number: int) -> str:
        only = f" --only {self.args.only!r}" if self.args.only else ""
        return f"python -m tests.torture --seed {self.args.seed} --experiment {number}{only}"

    def log(self, text: str) -> None:
        print(f"[{(time.monotonic() - self.started) / 60:5.1f} min] {text}", flush=True)

    def summarise(self) -> int:
        rows = sorted(self.report.ended.items())
        width = max((len(kind) for kind, _ in rows), default=4)
        print(f"\n{'fault':<{width}}  count  exit codes")
        for kind, counts in rows:
            applied = sum(counts.values()) - counts[NOT_APPLIED]
            ends = ", ".join(f"{end}: {count}" for end, count in counts.most_common())
            print(f"{kind:<{width}}  {applied:5d}  {ends}")
        violated = sorted(self.report.violations)
        count = sum(map(len, self.report.violations.values()))
        print(
            f"\n{self.report.faults()} faults in {self.count} experiments, seed "
            f"{self.args.seed}, {(time.monotonic() - self.started) / 60:.1f} minutes: "
            f"{count} violations in {len(violated)} experiments"
        )
        for number in violated:
            print(f"repeat: {self.command(number)}; kept: {self.folder}/experiment{number}")
        if not violated and not self.args.folder:
            shutil.rmtree(self.folder)
        return 1 if violated else 0


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if IN_NAMESPACE not in os.environ and "mounts" in available_privileges():
        # In a mount namespace, the mounts are private to this process and end with it.
        os.environ[IN_NAMESPACE] = "1"
        command = ["unshare", "--mount", "--propagation", "private", sys.executable]
        os.execvp(command[0], [*command, "-m", "tests.torture", *argv])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_at_once)
    # Children inherit an ignored signal (nohup), but not a handler.
    signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        return Campaign(args).run()
    finally:
        processes.kill_all_started()


def _end_at_once(*_: object) -> None:
    processes.kill_all_started()
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
