"""Submit a run to Slurm with submitit (`pip install submitit`):

python tools/slurm/submit.py --nodes 4 --gpus 8 --cfg configs/K400/FILE.yaml KEY VALUE ...

Two minutes before the time limit, and before a preemption, the run saves a checkpoint; submitit
requeues the job, which then resumes. `--cluster local` runs the job on this machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STOPPED = 75  # exit code of run_net.py after a signal
SIGNAL_SECONDS = 120  # from the signal to the time limit
RUN_NET = Path(__file__).resolve().parents[1] / "run_net.py"
# Slurm sends the signal to all processes of a job. The ranks handle USR1; the default, USR2, would
# kill them.
os.environ.setdefault("SUBMITIT_PREEMPT_SIGNAL", "USR1")


def command(
    arguments: list[str], gpus: int, nodes: int, node: int, host: str, port: int
) -> list[str]:
    """Return the command of one node."""
    address = ["--num_shards", nodes, "--shard_id", node, "--init_method", f"tcp://{host}:{port}"]
    own = ["NUM_GPUS", gpus, "TRAIN.MAX_RESTARTS", os.environ.get("MAX_RESTARTS", 3)]
    return [sys.executable, str(RUN_NET), *map(str, address), *arguments, *map(str, own)]


class Training:
    """The job; submitit calls it on each node."""

    def __init__(self, arguments: list[str], gpus: int) -> None:
        self.arguments, self.gpus = arguments, gpus

    def __call__(self) -> None:
        import submitit

        job = submitit.JobEnvironment()
        port = 20000 + int(job.job_id.split("_")[0]) % 20000  # jobs may share a node
        address = (job.num_nodes, job.node, job.hostnames[0], port)
        self.process = subprocess.Popen(command(self.arguments, self.gpus, *address))
        code = self._wait()
        if code == STOPPED:  # wait until submitit requeues the job on the same signal
            time.sleep(SIGNAL_SECONDS)
        if code:
            raise RuntimeError(f"run_net.py ended with exit code {code}")

    def checkpoint(self) -> Any:
        """Save a checkpoint and stop the run on all nodes; submitit calls this before a requeue."""
        import submitit

        self.process.terminate()
        self._wait()
        return submitit.helpers.DelayedSubmission(Training(self.arguments, self.gpus))

    def _wait(self) -> int:
        # Poll, because Popen.wait is not reentrant: the signal handler that calls `checkpoint`
        # interrupts this wait, and waits, too.
        while (code := self.process.poll()) is None:
            time.sleep(0.5)
        return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="per node")
    parser.add_argument("--cpus", type=int, default=64, help="per node")
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--partition")
    parser.add_argument("--cluster", choices=("slurm", "local"), default="slurm")
    logs = "folder for the logs, on a shared file system"
    parser.add_argument("--logs", default="submitit/%j", help=logs)
    args, arguments = parser.parse_known_args()
    try:
        import submitit
    except ImportError:
        parser.error("the package submitit is not installed; pip install submitit")

    executor = submitit.AutoExecutor(args.logs, cluster=args.cluster)
    executor.update_parameters(
        name="slowfast_lara",
        nodes=args.nodes,
        tasks_per_node=1,
        gpus_per_node=args.gpus,
        cpus_per_task=args.cpus,
        timeout_min=round(60 * args.hours),
        slurm_signal_delay_s=SIGNAL_SECONDS,
        **({"slurm_partition": args.partition} if args.partition else {}),
    )
    job = executor.submit(Training(arguments, args.gpus))
    print(f"job {job.job_id}; log: {job.paths.stdout}")
    if args.cluster == "local":
        job.result()


if __name__ == "__main__":
    main()
