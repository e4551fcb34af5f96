"""Rendezvous: all fingerprints are equal, or all ranks exit and name the difference."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from slowfast_lara.engine import rendezvous
from slowfast_lara.engine.rendezvous import Rendezvous, listen, open_store
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.errors import BAD_INPUT, STOPPED, InputError, Stopped
from tests.helpers.launchers import linux_only, start_node
from tests.helpers.runs import RUN_NET, finish, free_port, start, wait_for, write_config

OURS = {"SOLVER.BASE_LR": "0.1", "RNG_SEED": "0"}
OTHERS = {"SOLVER.BASE_LR": "0.2", "RNG_SEED": "0"}


# The protocol, with a thread for each rank


@pytest.fixture()
def store_port(monkeypatch):
    monkeypatch.setattr(rendezvous, "SETTLE_SECONDS", 1.0)
    port = free_port()
    server = open_store("127.0.0.1", port, 10, serve=True)
    yield port
    del server


class Ranks:
    """Threads that act as ranks, each with its own connection to the store."""

    def __init__(self, port: int, world_size: int) -> None:
        self._port, self._world_size = port, world_size
        self._pool = ThreadPoolExecutor(8)
        self.joined: list[Rendezvous] = []

    def add(
        self, rank: int, fingerprint=OURS, timeout: float = 20, on_poll=lambda: None, **options
    ) -> Future:
        store = open_store("127.0.0.1", self._port, 10, serve=False)
        self.joined.append(Rendezvous(store, rank, self._world_size, on_poll, **options))
        return self._pool.submit(self.joined[-1].join, fingerprint, timeout)


def reason(future: Future) -> str:
    with pytest.raises(InputError) as raised:
        future.result(timeout=30)
    return str(raised.value)


def test_equal_fingerprints_join(store_port):
    ranks = Ranks(store_port, 3)
    futures = [ranks.add(rank) for rank in (2, 0, 1)]
    run_ids = {future.result(timeout=30) for future in futures}
    assert len(run_ids) == 1 and len(run_ids.pop()) == 16


def test_all_ranks_fail_if_one_differs(store_port):
    ranks = Ranks(store_port, 4)
    futures = [ranks.add(rank, OTHERS if rank == 2 else OURS) for rank in range(4)]
    expected = "SOLVER.BASE_LR is 0.2 on rank 2 and 0.1 on rank 0"
    assert all(expected in reason(future) for future in futures)


def test_the_number_of_differing_ranks_is_reported(store_port):
    ranks = Ranks(store_port, 4)
    futures = [ranks.add(rank, OTHERS if rank > 1 else OURS) for rank in range(4)]
    for future in futures[:2]:
        assert "SOLVER.BASE_LR is 0.2" in (problem := reason(future))
        assert problem.endswith("; differences on 1 more rank")


@pytest.mark.parametrize("fingerprint", [OURS, OTHERS])
def test_a_late_rank_fails_at_once_after_a_difference(store_port, fingerprint):
    ranks = Ranks(store_port, 4)
    futures = [ranks.add(rank, OTHERS if rank == 2 else OURS) for rank in range(3)]
    expected = "SOLVER.BASE_LR is 0.2 on rank {} and 0.1 on rank 0"
    assert expected.format(2) in reason(futures[1]) and not futures[0].done()
    last = ranks.add(3, fingerprint)
    assert expected.format(2 if fingerprint == OURS else 3) in reason(last)
    assert expected.format(2) in reason(futures[0])


@pytest.mark.parametrize("published", ["[1]", "{", '{"a": 1}', "[" * 100_000, "1" * 5000])
def test_an_invalid_fingerprint_of_rank_0(store_port, published, monkeypatch):
    ranks = Ranks(store_port, 2)
    monkeypatch.setattr(rendezvous.json, "dumps", lambda _: published)
    first, other = ranks.add(0, timeout=0.5), ranks.add(1)
    with pytest.raises(ValueError) as raised:
        other.result(timeout=30)
    assert len(str(raised.value).splitlines()) == 1 and len(str(raised.value)) < 200
    with pytest.raises(TimeoutError):
        first.result(timeout=30)


def test_a_process_of_another_run_fails_and_the_run_continues(store_port):
    """It arrives before the rank for which the run waits."""
    ranks = Ranks(store_port, 2)
    first = ranks.add(0)
    assert "SOLVER.BASE_LR" in reason(ranks.add(1, OTHERS))
    assert ranks.add(1).result(timeout=30) == first.result(timeout=30)


def test_a_rank_that_a_signal_stops_may_return(store_port):
    ranks, stop = Ranks(store_port, 3), StopRequest()
    first, stopped = ranks.add(0), ranks.add(1, on_poll=stop.check)
    time.sleep(0.5)
    stop.request("SIGINT")
    with pytest.raises(Stopped):
        stopped.result(timeout=30)
    last = ranks.add(2)
    time.sleep(0.5)
    assert not first.done()  # rank 1 does not count
    futures = [first, ranks.add(1), last]
    assert len({future.result(timeout=30) for future in futures}) == 1


def test_in_a_restart_another_run_does_not_shorten_the_wait_for_a_lost_node(store_port):
    ranks = Ranks(store_port, 2)
    first = ranks.add(0, is_restart=True)
    assert "SOLVER.BASE_LR" in reason(ranks.add(1, OTHERS))
    time.sleep(2)  # longer than SETTLE_SECONDS
    assert ranks.add(1).result(timeout=30) == first.result(timeout=30)


@pytest.mark.parametrize("fingerprint", [OURS, OTHERS])
def test_a_process_fails_at_a_complete_run(store_port, fingerprint):
    ranks = Ranks(store_port, 2)
    for future in [ranks.add(0), ranks.add(1)]:
        future.result(timeout=30)
    late = ranks.add(1, fingerprint)
    wait_for(lambda: ranks.joined[0].reply() or late.done(), seconds=20)
    expected = "already joined" if fingerprint == OURS else "SOLVER.BASE_LR is 0.2"
    assert expected in reason(late)


def test_restarts_in_the_same_store(store_port):
    """torchrun keeps its store over a restart; rank 1 waits for the new rank 0."""
    run_ids = []
    for _ in range(3):
        ranks = Ranks(store_port, 2)
        other = ranks.add(1)
        time.sleep(0.3)
        assert not other.done()
        run_ids.append(ranks.add(0).result(timeout=30))
        assert other.result(timeout=30) == run_ids[-1]
    assert len(set(run_ids)) == 3


def test_a_missing_rank_is_a_timeout(store_port):
    ranks = Ranks(store_port, 3)
    futures = [ranks.add(rank, timeout=1) for rank in range(2)]
    with pytest.raises(TimeoutError, match="2 of 3 ranks"):
        futures[0].result(timeout=30)
    with pytest.raises(TimeoutError):
        futures[1].result(timeout=30)


# Commands


# Waits 1 s instead of 10 s for other ranks after a difference.
IMPATIENT = f"""
import runpy
from slowfast_lara.engine import rendezvous
rendezvous.SETTLE_SECONDS = 1
runpy.run_path({RUN_NET!r}, run_name="__main__")
"""


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def assert_refused(nodes, problem):
    for node in nodes:
        code, stdout, stderr = finish(node)
        assert code == BAD_INPUT and problem in stderr, stdout + stderr
        assert stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in stderr
        assert "train_iter" not in stdout


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.BASE_LR", 0.5),
        *(
            pytest.param(key, value, marks=pytest.mark.slow)
            for key, value in [
                ("RNG_SEED", 5),
                ("VIT.APPROX_ATTN_TYPE", "performer"),
                ("VIT.DEPTH", 1),
                ("SOLVER.MAX_EPOCH", 7),
                ("OUTPUT_DIR", "elsewhere"),
            ]
        ),
    ],
)
def test_nodes_with_different_keys(tmp_path, video_set, key, value):
    value = tmp_path / value if key == "OUTPUT_DIR" else value
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out")
    port = free_port()
    options = {"program": ("-c", IMPATIENT)}
    nodes = [start_node(config, 0, port, **options)]
    nodes.append(start_node(config, 1, port, key, value, **options))
    assert_refused(nodes, f"{key} is ")
    assert not (tmp_path / "out" / "checkpoints").exists()


@linux_only
@pytest.mark.parametrize("node, restarts", [(0, 0), (1, 0), (1, 1)])
def test_one_signal_ends_the_wait_for_other_nodes(tmp_path, video_set, node, restarts):
    changes = {"TRAIN__MAX_RESTARTS": restarts}
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **changes)
    waiting = start_node(config, node, free_port())
    wait_for(lambda: _handles_sigterm(waiting.pid))
    time.sleep(2)
    os.kill(waiting.pid, signal.SIGINT)
    code, _, stderr = finish(waiting, 30)
    assert code == STOPPED and "before all ranks joined" in stderr, stderr


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_an_address_that_accepts_connections_and_does_not_answer(tmp_path, video_set, restarts):
    changes = {"TRAIN__MAX_RESTARTS": restarts, "DIST_TIMEOUT": 15}
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **changes)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        code, _, stderr = finish(start_node(config, 1, server.getsockname()[1]), 90)
    assert code == 1 and stderr.count("error: ") == 1, stderr


def _handles_sigterm(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
def test_nodes_with_different_lists(tmp_path, video_set):
    """In folders of the same name, as on nodes without a shared file system."""
    config = write_config(tmp_path / "c.yaml", "lists", tmp_path / "out")
    port = free_port()
    nodes = []
    for shard in range(2):
        folder = tmp_path / f"node{shard}" / "lists"
        folder.mkdir(parents=True)
        for name in ("train.csv", "val.csv", "test.csv"):
            lines = (video_set / name).read_text().splitlines(keepends=True)
            (folder / name).write_text("".join(lines[shard if name == "train.csv" else 0 :]))
        nodes.append(start_node(config, shard, port, folder=folder.parent))
    assert_refused(nodes, "train.csv is 15 lines")


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_two_jobs_on_one_port(tmp_path, video_set, restarts):
    """The job that serves the port trains undisturbed; the other fails."""
    port = free_port()
    changes = {"TEST__ENABLE": False, "TRAIN__MAX_RESTARTS": restarts, "DIST_TIMEOUT": 60}
    configs = [
        write_config(
            tmp_path / f"{name}.yaml", video_set, tmp_path / name, RNG_SEED=seed, **changes
        )
        for name, seed in (("a", 1), ("b", 2))
    ]
    first = start_node(configs[0], 0, port)
    wait_for(lambda: is_listening(port) or first.poll() is not None)
    strangers = [start_node(configs[1], 1, port), start_node(configs[1], 0, port)]
    mate = start_node(configs[0], 1, port)
    (code, _, stderr), (taken, _, why) = map(finish, strangers)
    if restarts and code == 1:  # it came late, and waited like a node that returns
        assert f"rendezvous at localhost:{port} failed" in stderr
    else:
        assert code == BAD_INPUT and "RNG_SEED is 2 on rank 1 and 1 on rank 0" in stderr
    assert taken != 0 and str(port) in why
    for node in (first, mate):
        code, stdout, stderr = finish(node)
        assert code == 0, stdout + stderr
    assert len(os.listdir(tmp_path / "a" / "checkpoints")) == 2
    assert not (tmp_path / "b" / "checkpoints").exists()


DIFFERENT_BY_RANK = """
import os, sys
from slowfast_lara.config import load_config
from slowfast_lara.engine.launch import RankInfo, launch, spawn
from slowfast_lara.engine.run import run

if __name__ == "__main__":
    node = int(os.environ.get("RANK", sys.argv[2]))
    cfg = load_config(sys.argv[1], ("RNG_SEED", 10 + node, "NUM_SHARDS", 2))
    if "RANK" in os.environ:
        sys.exit(launch(run, cfg))
    first = RankInfo(2 * node, 4, 0, "localhost", int(sys.argv[3]))
    sys.exit(spawn(run, cfg, first, 2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_different_seeds_with_other_launchers(tmp_path, video_set, launcher):
    script = tmp_path / "script.py"
    script.write_text(DIFFERENT_BY_RANK)
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out")
    port = free_port()
    if launcher == "spawn":
        nodes = [start(config, node, port, program=(str(script),)) for node in (0, 1)]
        assert_refused(nodes, "RNG_SEED is 11 on rank ")
        return
    program = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
    code, _, stderr = finish(start(config, 0, program=(*program, str(script))))
    assert code != 0 and "RNG_SEED is 11 on rank 1 and 10 on rank 0" in stderr


IDLE_UNDER_TORCHRUN = """
import os, pathlib, sys, time
from slowfast_lara.config import load_config
from slowfast_lara.engine.launch import launch

folder = pathlib.Path(sys.argv[2])

def run(cfg, stop):
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"running_{os.getpid()}").write_text(attempt)
    while not (folder / "stop").exists():
        time.sleep(0.1)

sys.exit(launch(run, load_config(sys.argv[1])))
"""


@pytest.mark.slow
def test_nodes_with_different_restart_counts_join(tmp_path):
    """torchrun counts a restart on the failed node only."""
    script = tmp_path / "idle.py"
    script.write_text(IDLE_UNDER_TORCHRUN)
    config = write_config(tmp_path / "c.yaml", tmp_path, tmp_path / "out")
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1")
    flags += ("--rdzv-backend", "c10d", "--rdzv-id", "x")
    flags += ("--rdzv-endpoint", f"localhost:{free_port()}")
    program = ("-m", "torch.distributed.run", *flags, str(script))
    agents = [start(config, tmp_path, program=program) for _ in range(2)]
    wait_for(lambda: len(list(tmp_path.glob("running_*"))) == 2, seconds=120)
    os.kill(int(next(tmp_path.glob("running_*")).name.split("_")[1]), signal.SIGKILL)
    wait_for(lambda: len(list(tmp_path.glob("running_*"))) == 4, seconds=120)
    (tmp_path / "stop").touch()
    assert [finish(agent)[0] for agent in agents] == [0, 0]
    attempts = [path.read_text() for path in tmp_path.glob("running_*")]
    assert sorted(attempts) == ["0", "0", "0", "1"]


@linux_only
def test_a_run_on_localhost_listens_on_loopback_only(tmp_path, video_set):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out")
    port = free_port()
    node = start_node(config, 0, port)
    wait_for(lambda: is_listening(port) or node.poll() is not None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


# The store


@linux_only
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_store_listens_on_loopback_only(host):
    port = free_port()
    server = open_store(host, port, 10, serve=True)
    client = open_store(host, port, 10, serve=False)
    client.set("key", "value")
    assert server.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


@linux_only
def test_the_host_name_is_reachable_from_other_nodes(monkeypatch):
    """Debian's /etc/hosts maps it to a loopback address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: found)
    with listen("node1", 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


@linux_only
def test_a_host_with_several_addresses_is_reachable_by_all(monkeypatch):
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in (own, "192.0.2.77")]
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: found)
    with listen("node1", 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def test_a_translated_address_listens_on_all_interfaces():
    with listen("192.0.2.77", 0) as server:  # from the block for documentation
        assert server.getsockname()[0] in ("::", "0.0.0.0")
