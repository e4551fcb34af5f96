"""The Slurm scripts, with fake srun and scontrol commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.preloaded import environment
from tests.helpers.runs import ROOT, json_stats, kill_group, wait_for, write_config

SRUN = """#!/bin/bash
# Runs the command once per node, as srun does with one task per node.
echo "$1" >> srun_options
while [[ "$1" == --* ]]; do shift; done
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node "$@" & pids="$pids $!"
done
worst=0
for pid in $pids; do
    wait $pid; code=$?
    [ $code -gt $worst ] && worst=$code
done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi
"""


def start_job(folder: Path, script: str, nodes: int, *arguments: str) -> subprocess.Popen:
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tools / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tools / "python").chmod(0o755)
    if not (folder / "tools").exists():
        (folder / "tools").symlink_to(ROOT / "tools")
    slurm = {
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "any",
        "SLURM_GPUS_ON_NODE": "0",
        "SLURM_CPUS_PER_TASK": "2",
    }
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(ROOT / "tools" / "slurm" / script), *arguments],
        cwd=folder,
        env={**environment(), **slurm, "PATH": path},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def processes_of(config: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_text().split("\0")
            if command[0] == sys.executable and str(config) in command:
                found.append(int(entry.parent.name))
        except OSError:
            pass
    return found


@pytest.mark.slow
@pytest.mark.parametrize("script, nodes", [("one_node.sbatch", 1), ("several_nodes.sbatch", 2)])
def test_warned_job_saves_and_is_requeued(tmp_path, video_set, script, nodes):
    output = tmp_path / "out"
    config = write_config(
        tmp_path / "c.yaml",
        video_set,
        output,
        SOLVER__MAX_EPOCH=100000,
        TRAIN__CHECKPOINT_PERIOD=100000,
        DATA_LOADER__NUM_WORKERS=1,
    )
    job = start_job(tmp_path, script, nodes, "--cfg", str(config))
    try:
        wait_for(lambda: (output / "stdout.log").exists() and len(json_stats(output)) > 3)
        for pid in processes_of(config):  # Slurm signals every process of the step
            os.kill(pid, signal.SIGUSR1)
        assert job.wait(timeout=60) == 75
    finally:
        kill_group(job)
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    assert (tmp_path / "srun_options").read_text() == "--cpus-per-task=2\n"
    saved = sorted(os.listdir(output / "checkpoints"))
    assert len(saved) == 1
    again = start_job(
        tmp_path,
        script,
        nodes,
        "--cfg",
        str(config),
        "SOLVER.MAX_EPOCH",
        str(int(saved[0][17:22]) + 1),
        "TRAIN.ACCEPT_CHANGES",  # for another MAX_EPOCH, so that it ends
        "True",
    )
    try:
        assert again.wait(timeout=120) == 0
    finally:
        kill_group(again)
    assert f"Resuming from {output}/checkpoints/{saved[0]}" in (output / "stdout.log").read_text()
