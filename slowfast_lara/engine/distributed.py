"""What the processes of a run tell each other: all over CPU tensors, so over gloo.

One process works without a process group; every function here then does the
obvious thing.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from slowfast_lara.errors import ConfigError

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_processes(values: Sequence[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    if world_size() > 1:
        dist.all_reduce(total)
    return total.tolist()


def gather(item: T) -> list[T]:
    """The items of all processes, by rank, on every process."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def gather_on_first(item: T) -> list[T] | None:
    """The items of all processes, by rank, on process 0; None on the others."""
    if world_size() == 1:
        return [item]
    items: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(item, items)
    return items


def broadcast_from_rank0(make: Callable[[], T]) -> T:
    """What `make` returns or raises on process 0, on every process.

    Process 0 reads checkpoints for all: nodes need share no file system, and
    cannot resume from different files. Tensors are sent one by one: pickled with the
    rest, a checkpoint would be in the memory of each process three times.
    """
    if world_size() == 1:
        return make()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = make()
        except ValueError as error:  # bad input; anything else ends the run by itself
            outcome[1] = error
    text = io.BytesIO()
    packer = _Packer(text)
    packer.dump(outcome)
    message = [text.getvalue()]
    dist.broadcast_object_list(message)
    tensors = packer.tensors
    if rank() != 0:
        unpacker = _Unpacker(io.BytesIO(message[0]))
        outcome, tensors = unpacker.load(), unpacker.tensors
    for tensor in tensors:
        if tensor.numel():  # as bytes: gloo does not know every type
            dist.broadcast(tensor.contiguous().flatten().view(torch.uint8), src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


class _Packer(pickle.Pickler):
    """Leaves plain tensors aside, in `tensors`, and writes down only what they are like."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
        if type(value) is not Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return None
        if value.is_quantized or value.is_nested:
            return None
        self.tensors.append(value.detach())
        return value.dtype, tuple(value.shape)


class _Unpacker(pickle.Unpickler):
    """Reads what `_Packer` wrote, with empty tensors in place of its own, in their order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, pid: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
        self.tensors.append(torch.empty(pid[1], dtype=pid[0]))
        return self.tensors[-1]


def without_ddp(model: nn.Module) -> nn.Module:
    """The model itself: to save it, and to evaluate it, because DDP's forward has
    collectives and processes have unequal shares of an evaluation."""
    return getattr(model, "module", model)


def per_process(cfg: CfgNode, key: str) -> int:
    """The share of a process in TRAIN.BATCH_SIZE and the like, which are per node."""
    node, name = key.split(".")
    total, processes = cfg[node][name], world_size() // cfg.NUM_SHARDS
    if total % processes:
        raise ConfigError(
            f"{key} is {total}; a multiple of the {processes} processes of a node is expected"
        )
    return total // processes
