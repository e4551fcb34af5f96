"""broadcast_from_rank0: content, errors and memory."""

from __future__ import annotations

import collections
import datetime
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slowfast_lara.engine.distributed import broadcast_from_rank0, rank
from slowfast_lara.errors import CheckpointError
from tests.helpers.runs import ROOT, finish, start

LARGE = 200 * 2**20


def content() -> dict:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 5, generator=generator)
    state = collections.OrderedDict(weight=x, turned=x.T, part=x[1:, ::2], wide=x[:1].expand(3, 5))
    state["half"], state["brain"] = x.half(), x.bfloat16()
    return {
        "epoch": 3,
        "model_state": state,
        "optimizer_state": {"state": {0: {"step": torch.tensor(4.0)}}, "groups": [(1, x > 0)]},
        "empty": torch.zeros(0, 3),
        "counts": torch.arange(9),
        "complex": torch.complex(x, x),
        "sparse": x.relu().to_sparse(),
        "nothing": None,
    }


def check_content(folder: str) -> None:
    received, own = broadcast_from_rank0(lambda: (folder, content())), content()
    assert received[0] == folder
    sparse = received[1].pop("sparse").to_dense()
    assert torch.equal(sparse, own.pop("sparse").to_dense())
    assert received[1].pop("nothing") is own.pop("nothing") is None
    torch.testing.assert_close(received[1], own, rtol=0, atol=0)
    assert type(received[1]["model_state"]) is collections.OrderedDict


def check_errors(folder: str) -> None:
    def make() -> None:
        raise CheckpointError(f"{folder} is bad")

    with pytest.raises(CheckpointError, match="is bad"):
        broadcast_from_rank0(make)


def check_that_only_rank_0_calls(folder: str) -> None:
    assert broadcast_from_rank0(lambda: rank()) == 0


def check_memory(folder: str) -> None:
    """Limit the memory so that a second copy of the tensor does not fit."""
    dist.barrier()
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + LARGE + LARGE * 3 // 4
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    received = broadcast_from_rank0(lambda: {"x": torch.full((LARGE,), 3, dtype=torch.uint8)})["x"]
    assert received.shape == (LARGE,) and bool((received[:: 2**20] == 3).all())


def run_checks(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    for check in (check_content, check_errors, check_that_only_rank_0_calls, check_memory):
        check(folder)
        dist.barrier()
    # Python aborts if it exits while a thread of the process group is inside PyTorch.
    dist.destroy_process_group()


def test_two_processes(tmp_path: Path):
    script = "from tests.engine.test_broadcast import run_checks; run_checks({}, {!r})"
    programs = [("-c", script.format(i, str(tmp_path))) for i in range(2)]
    processes = [start(program=program, folder=ROOT) for program in programs]
    for process in processes:
        code, _, stderr = finish(process)
        assert code == 0, stderr
