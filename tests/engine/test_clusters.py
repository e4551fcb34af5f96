"""The files for Kubernetes and submitit, checked without a cluster."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slowfast_lara.cli import build_parser
from slowfast_lara.config import load_config
from tests.helpers.runs import ROOT

SUBMIT = ROOT / "tools" / "slurm" / "submit.py"


def parsed(words: list[str]):
    """Return the flags and the config of a run_net.py command, which must be valid."""
    run_net, *arguments = words
    assert (ROOT / run_net).samefile(ROOT / "tools" / "run_net.py")
    args = build_parser().subcommands["run"].parse_arguments(arguments)
    return args, load_config(str(ROOT / args.cfg), args.opts)


# Kubernetes


@pytest.fixture(scope="module")
def replicas():
    job = yaml.safe_load((ROOT / "tools" / "kubernetes" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"] == "slowfast-lara"
    assert set(job["spec"]) == {"runPolicy", "pytorchReplicaSpecs"}
    return job["spec"]["pytorchReplicaSpecs"]


def test_the_job_has_the_fields_that_the_operator_requires(replicas):
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        assert set(replica) == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch" and container["image"]
        assert [port["name"] for port in container["ports"]] == ["pytorchjob-port"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert mounts["shm"] == "/dev/shm"


@pytest.mark.parametrize("rank", [0, 3])
def test_the_command_of_a_pod(replicas, tmp_path, rank):
    """Run by bash with the variables of the operator; `python` prints its arguments."""
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    count = sum(replica["replicas"] for replica in replicas.values())
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*container["command"], *container["args"]],
        env={**os.environ, "PATH": path, "RANK": str(rank), "WORLD_SIZE": str(count)},
        capture_output=True,
        text=True,
        check=True,
    )
    args, cfg = parsed(done.stdout.splitlines())
    assert (args.num_shards, args.shard_id) == (count, rank)
    port = container["ports"][0]["containerPort"]
    assert args.init_method == f"tcp://slowfast-lara-master-0:{port}"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == cfg.NUM_GPUS
    assert cfg.TRAIN.MAX_RESTARTS > 0
    mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    assert all(
        any(Path(folder).is_relative_to(mount) for mount in mounts)
        for folder in (cfg.OUTPUT_DIR, cfg.DATA.PATH_TO_DATA_DIR)
    )


# submitit


def test_the_command_of_submitit():
    command = runpy.run_path(str(SUBMIT))["command"]
    arguments = ["--cfg", "configs/quick/lara.yaml", "SOLVER.MAX_EPOCH", "7"]
    python, *words = command(arguments, 2, 4, 3, "node0", 20001)
    args, cfg = parsed(words)
    assert python == sys.executable and args.init_method == "tcp://node0:20001"
    assert (args.num_shards, args.shard_id) == (4, 3)
    assert (cfg.NUM_GPUS, cfg.TRAIN.MAX_RESTARTS, cfg.SOLVER.MAX_EPOCH) == (2, 3, 7)


def test_submit_lists_its_flags():
    command = [sys.executable, str(SUBMIT), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(flag in done.stdout for flag in ("--nodes", "--gpus", "--hours", "--cluster"))


def test_submit_without_submitit(tmp_path):
    (tmp_path / "submitit.py").write_text("raise ImportError('hidden')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(SUBMIT), "--cfg", "quick/lara"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith("submitit is not installed; pip install submitit\n")


@pytest.mark.slow
def test_a_local_job_of_submitit(tmp_path, video_set):
    """One process on this machine, as submitit would run it on a node."""
    pytest.importorskip("submitit")
    from tests.helpers.preloaded import environment
    from tests.helpers.runs import write_config

    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out")
    flags = ["--cluster", "local", "--gpus", "0", "--cfg", str(config)]
    command = [sys.executable, str(SUBMIT), *flags]
    subprocess.run(command, cwd=tmp_path, env=environment(), check=True, timeout=300)
    assert (tmp_path / "out" / "test_results.json").exists()
