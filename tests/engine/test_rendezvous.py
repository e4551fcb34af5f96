"""All processes of a run run the same thing, or all end and say what differs."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from slowfast_lara.config import load_config
from slowfast_lara.engine import rendezvous as meeting
from slowfast_lara.engine.rendezvous import Meeting, describe, differences, open_store
from slowfast_lara.errors import BAD_INPUT, InputError
from tests.helpers.runs import finish, free_port, start, wait_for, write_config

OURS = {"SOLVER.BASE_LR": "0.1", "RNG_SEED": "0"}
OTHERS = {"SOLVER.BASE_LR": "0.2", "RNG_SEED": "0"}
linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="127.0.0.2 needs no set-up on Linux only"
)


# What is compared.


@pytest.fixture()
def lists(tmp_path):
    folder = tmp_path / "lists"
    folder.mkdir()
    for name in ("train", "val", "test"):
        (folder / f"{name}.csv").write_text("a.mp4 0\n")
    return folder


def described(tmp_path, lists, **changes):
    return describe(load_config(write_config(tmp_path / "c.yaml", lists, "out", **changes)), 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.BASE_LR", 0.5),
        ("SOLVER.MAX_EPOCH", 7),
        ("VIT.APPROX_ATTN_TYPE", "performer"),
        ("VIT.DEPTH", 1),
        ("RNG_SEED", 5),
        ("OUTPUT_DIR", "elsewhere"),
    ],
)
def test_another_key_is_named(tmp_path, lists, key, value):
    ours = described(tmp_path, lists, **{key.replace(".", "__"): value})
    said = differences(ours, described(tmp_path, lists), 3)
    assert said.startswith(f"{key} is {value!r} on process 3 and ")
    assert said.count(" is ") == 1 and said.endswith(" on process 0")


@pytest.mark.parametrize("name", ["train.csv", "val.csv", "test.csv"])
@pytest.mark.parametrize("content", ["a.mp4 1\n", "a.mp4 0\na.mp4 0\n", None])
def test_another_list_is_named(tmp_path, lists, name, content):
    theirs = described(tmp_path, lists)
    if content is None:
        (lists / name).unlink()
    else:
        (lists / name).write_text(content)
    said = differences(described(tmp_path, lists), theirs, 1)
    assert said.startswith(f"{name} is ") and said.count(" is ") == 1


def test_a_list_that_is_no_file_is_not_waited_for(tmp_path, lists):
    (lists / "val.csv").unlink()
    (lists / "val.csv").symlink_to("/dev/null")
    assert described(tmp_path, lists)["val.csv"] == "unreadable (not a regular file)"


def test_other_code_is_named(tmp_path, lists, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(meeting.slowfast_lara, "__file__", str(package / "__init__.py"))
    theirs = described(tmp_path, lists)
    (package / "more.py").write_text("x = 1\n")
    assert differences(described(tmp_path, lists), theirs, 1).startswith("the code is 0.")


def test_what_a_machine_has_for_itself(tmp_path, lists):
    changes = {"SHARD_ID": 1, "DATA_LOADER__NUM_WORKERS": 3, "DATA_LOADER__PIN_MEMORY": False}
    ours = described(tmp_path, lists, NUM_SHARDS=2, **changes)
    assert differences(ours, described(tmp_path, lists, NUM_SHARDS=2), 1) == ""


def test_many_differences_stay_readable():
    said = differences({f"K{i}": "1" for i in range(50)}, {f"K{i}": "2" for i in range(50)}, 1)
    assert said.count(" is ") == 8 and said.endswith("; 42 more differ")


# The meeting, with a thread for each process.


@pytest.fixture()
def store_port(monkeypatch):
    monkeypatch.setattr(meeting, "SETTLE_SECONDS", 1.0)
    port = free_port()
    kept = open_store("127.0.0.1", port, 10, keep=True)
    yield port
    del kept


class Processes:
    """Threads that meet as processes would, each with a connection of its own."""

    def __init__(self, port: int, world_size: int) -> None:
        self._port, self._world_size = port, world_size
        self._pool = ThreadPoolExecutor(8)
        self.meetings: list[Meeting] = []

    def add(self, rank: int, description=OURS, seconds: float = 20) -> Future:
        store = open_store("127.0.0.1", self._port, 10, keep=False)
        one = Meeting(store, rank, self._world_size, lambda: None)
        self.meetings.append(one)
        return self._pool.submit(one.hold, description, seconds)


def reason(future: Future) -> str:
    with pytest.raises(InputError) as raised:
        future.result(timeout=30)
    return str(raised.value)


def test_all_agree(store_port):
    processes = Processes(store_port, 3)
    meets = [processes.add(rank) for rank in (2, 0, 1)]
    identities = {meet.result(timeout=30) for meet in meets}
    assert len(identities) == 1 and len(identities.pop()) == 16


def test_one_differs_and_all_end(store_port):
    processes = Processes(store_port, 4)
    meets = [processes.add(rank, OTHERS if rank == 2 else OURS) for rank in range(4)]
    expected = "SOLVER.BASE_LR is 0.2 on process 2 and 0.1 on process 0"
    assert all(expected in reason(meet) for meet in meets)


def test_all_hear_of_several_that_differ(store_port):
    processes = Processes(store_port, 4)
    meets = [processes.add(rank, OTHERS if rank > 1 else OURS) for rank in range(4)]
    for meet in meets[:2]:
        assert "SOLVER.BASE_LR is 0.2" in (said := reason(meet))
        assert said.endswith("; 1 more processes differ")


@pytest.mark.parametrize("description", [OURS, OTHERS])
def test_who_comes_after_a_difference_is_told_at_once(store_port, description):
    processes = Processes(store_port, 4)
    meets = [processes.add(rank, OTHERS if rank == 2 else OURS) for rank in range(3)]
    expected = "SOLVER.BASE_LR is 0.2 on process {} and 0.1 on process 0"
    assert expected.format(2) in reason(meets[1]) and not meets[0].done()
    last = processes.add(3, description)
    assert expected.format(2 if description == OURS else 3) in reason(last)
    assert expected.format(2) in reason(meets[0])


@pytest.mark.parametrize("said", ["[1]", "{", '{"a": 1}', "[" * 100_000, "1" * 5000])
def test_a_first_process_of_another_program(store_port, said, monkeypatch):
    processes = Processes(store_port, 2)
    monkeypatch.setattr(meeting.json, "dumps", lambda _: said)
    first, other = processes.add(0, seconds=3), processes.add(1)
    with pytest.raises(ValueError) as raised:
        other.result(timeout=30)
    assert len(str(raised.value).splitlines()) == 1 and len(str(raised.value)) < 200
    with pytest.raises(TimeoutError):
        first.result(timeout=30)


def test_a_process_of_another_run_is_sent_away(store_port):
    """It comes before the right one, and the run waits for that."""
    processes = Processes(store_port, 2)
    first = processes.add(0)
    assert "SOLVER.BASE_LR" in reason(processes.add(1, OTHERS))
    assert processes.add(1).result(timeout=30) == first.result(timeout=30)


@pytest.mark.parametrize("description", [OURS, OTHERS])
def test_a_process_that_comes_to_a_full_run_is_sent_away(store_port, description):
    processes = Processes(store_port, 2)
    for meet in [processes.add(0), processes.add(1)]:
        meet.result(timeout=30)
    late = processes.add(1, description)
    wait_for(lambda: processes.meetings[0].answer() or late.done(), seconds=20)
    expected = "has its process 1 already" if description == OURS else "SOLVER.BASE_LR is 0.2"
    assert expected in reason(late)


def test_a_second_attempt_in_the_same_store(store_port):
    """torchrun keeps its store over a restart; whoever comes first waits for the new process 0."""
    identities = []
    for _ in range(3):
        processes = Processes(store_port, 2)
        other = processes.add(1)
        time.sleep(0.3)
        assert not other.done()
        identities.append(processes.add(0).result(timeout=30))
        assert other.result(timeout=30) == identities[-1]
    assert len(set(identities)) == 3


def test_who_does_not_come(store_port):
    processes = Processes(store_port, 3)
    meets = [processes.add(rank, seconds=1) for rank in range(2)]
    with pytest.raises(TimeoutError, match="2 of 3 processes were there"):
        meets[0].result(timeout=30)
    with pytest.raises(TimeoutError):
        meets[1].result(timeout=30)


# Real commands.


def start_node(config, shard, port, *extra, num_shards=2):
    address = f"tcp://localhost:{port}"
    flags = ("--num_shards", num_shards, "--shard_id", shard, "--init_method", address)
    return start("--cfg", config, *flags, *extra)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def assert_refused(nodes, said):
    for node in nodes:
        code, stdout, stderr = finish(node)
        assert code == BAD_INPUT and said in stderr, stdout + stderr
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
def test_nodes_with_another_key(tmp_path, video_set, key, value):
    value = tmp_path / value if key == "OUTPUT_DIR" else value
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out")
    port = free_port()
    nodes = [start_node(config, 0, port), start_node(config, 1, port, key, value)]
    assert_refused(nodes, f"{key} is ")
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.slow
def test_nodes_with_another_list(tmp_path, video_set):
    """In a folder of the same name, as on machines without a common file system."""
    config = write_config(tmp_path / "c.yaml", "lists", tmp_path / "out")
    port = free_port()
    nodes = []
    for shard in range(2):
        folder = tmp_path / f"node{shard}" / "lists"
        folder.mkdir(parents=True)
        for name in ("train.csv", "val.csv", "test.csv"):
            lines = (video_set / name).read_text().splitlines(keepends=True)
            (folder / name).write_text("".join(lines[shard if name == "train.csv" else 0 :]))
        address = f"tcp://localhost:{port}"
        flags = ("--num_shards", 2, "--shard_id", shard, "--init_method", address)
        nodes.append(start("--cfg", config, *flags, folder=folder.parent))
    assert_refused(nodes, "train.csv is 15 lines")


@pytest.mark.slow
def test_two_jobs_on_one_port(tmp_path, video_set):
    """The one that has the port trains as if it were alone; the other is told."""
    port = free_port()
    configs = [
        write_config(
            tmp_path / f"{name}.yaml", video_set, tmp_path / name, TEST__ENABLE=False, RNG_SEED=seed
        )
        for name, seed in (("a", 1), ("b", 2))
    ]
    first = start_node(configs[0], 0, port)
    wait_for(lambda: listens(port) or first.poll() is not None)
    strangers = [start_node(configs[1], 1, port), start_node(configs[1], 0, port)]
    mate = start_node(configs[0], 1, port)
    (code, _, stderr), (taken, _, why) = map(finish, strangers)
    assert code == BAD_INPUT and "RNG_SEED is 2 on process 1 and 1 on process 0" in stderr
    assert taken != 0 and str(port) in why
    for node in (first, mate):
        code, stdout, stderr = finish(node)
        assert code == 0, stdout + stderr
    assert len(os.listdir(tmp_path / "a" / "checkpoints")) == 2
    assert not (tmp_path / "b" / "checkpoints").exists()


DIFFERENT_BY_RANK = """
import os, sys
from slowfast_lara.config import load_config
from slowfast_lara.engine.launch import Place, launch, spawn
from slowfast_lara.engine.run import run

if __name__ == "__main__":
    node = int(os.environ.get("RANK", sys.argv[2]))
    cfg = load_config(sys.argv[1], ("RNG_SEED", 10 + node, "NUM_SHARDS", 2))
    if "RANK" in os.environ:
        sys.exit(launch(run, cfg))
    address = "tcp://localhost:" + sys.argv[3]
    sys.exit(spawn(run, cfg, Place(2 * node, 4, 0, address), 2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_other_launchers(tmp_path, video_set, launcher):
    script = tmp_path / "script.py"
    script.write_text(DIFFERENT_BY_RANK)
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out")
    port = free_port()
    if launcher == "spawn":
        nodes = [start(config, node, port, program=(str(script),)) for node in (0, 1)]
        assert_refused(nodes, "RNG_SEED is 11 on process ")
        return
    program = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
    code, _, stderr = finish(start(config, 0, program=(*program, str(script))))
    assert code != 0 and "RNG_SEED is 11 on process 1 and 10 on process 0" in stderr


IDLE_UNDER_TORCHRUN = """
import os, pathlib, sys, time
from slowfast_lara.config import load_config
from slowfast_lara.engine.launch import launch

folder = pathlib.Path(sys.argv[2])

def run(cfg, stop):
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"running_{os.getpid()}").write_text(attempt)
    while not (folder / "enough").exists():
        time.sleep(0.1)

sys.exit(launch(run, load_config(sys.argv[1])))
"""


@pytest.mark.slow
def test_nodes_that_count_their_restarts_apart_meet_again(tmp_path):
    """torchrun counts a restart on the node that has failed, not on the others."""
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
    (tmp_path / "enough").touch()
    assert [finish(agent)[0] for agent in agents] == [0, 0]
    attempts = [path.read_text() for path in tmp_path.glob("running_*")]
    assert sorted(attempts) == ["0", "0", "0", "1"]


@linux_only
def test_a_run_on_localhost_listens_on_loopback_alone(tmp_path, video_set):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out")
    port = free_port()
    node = start_node(config, 0, port)
    wait_for(lambda: listens(port) or node.poll() is not None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
