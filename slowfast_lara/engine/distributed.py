"""Collectives between the ranks of a run, on CPU tensors over gloo.

If the run has a single process, collectives return the local value.
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


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(values: Sequence[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    if world_size() > 1:
        dist.all_reduce(total)
    return total.tolist()


def all_gather(item: T) -> list[T]:
    """Return the items of all ranks, in order of rank, on every rank."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def broadcast_from_rank0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result, or raise its ValueError, on every rank.

    Rank 0 reads checkpoints for all ranks, so nodes need no shared file system and cannot
    resume from different files. Tensors are broadcast one by one, because pickling a whole
    checkpoint would need memory for three copies of it in each process.
    """
    if world_size() == 1:
        return make()
    result_and_error: list[Any] = [None, None]
    if rank() == 0:
        try:
            result_and_error[0] = make()
        except ValueError as error:  # bad input: raised on all ranks below
            result_and_error[1] = error
    buffer = io.BytesIO()
    pickler = _TensorPickler(buffer)
    pickler.dump(result_and_error)
    message = [buffer.getvalue()]
    dist.broadcast_object_list(message)
    tensors = pickler.tensors
    if rank() != 0:
        unpickler = _TensorUnpickler(io.BytesIO(message[0]))
        result_and_error, tensors = unpickler.load(), unpickler.tensors
    for tensor in tensors:
        if tensor.numel():  # sent as bytes: gloo does not support every dtype
            dist.broadcast(tensor.contiguous().flatten().view(torch.uint8), src=0)
    if result_and_error[1] is not None:
        raise result_and_error[1]
    return result_and_error[0]


class _TensorPickler(pickle.Pickler):
    """Pickles dense CPU tensors as (dtype, shape) and collects the tensors in `tensors`."""

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


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles (dtype, shape) as uninitialised tensors and collects the tensors in `tensors`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, pid: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
        self.tensors.append(torch.empty(pid[1], dtype=pid[0]))
        return self.tensors[-1]


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Return the model without its DDP wrapper, for checkpoints and for evaluation.

    In evaluation, ranks have unequal numbers of videos: a collective in DDP's forward pass, such as
    the synchronisation of buffers, would hang.
    """
    return getattr(model, "module", model)


def train_batch_per_rank(cfg: CfgNode) -> int:
    """Return the training batch size per rank; TRAIN.BATCH_SIZE is the batch size per node."""
    ranks = world_size() // cfg.NUM_SHARDS
    if cfg.TRAIN.BATCH_SIZE % ranks:
        raise ConfigError(
            f"TRAIN.BATCH_SIZE is {cfg.TRAIN.BATCH_SIZE}; must be a multiple of {ranks}, "
            "the number of processes per node"
        )
    return cfg.TRAIN.BATCH_SIZE // ranks
