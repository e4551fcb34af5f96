"""Errors of GPUs and NCCL, in one line; the messages are PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from slowfast_lara.engine.shutdown import friendly_errors
from slowfast_lara.errors import ConnectionLost, RunError

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.06 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB memory in "
    "use. Of the allocated memory 75.93 GiB is allocated by PyTorch, and 1.31 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "{code}: {meaning}\nLast error:\n{last}\n"
)


def reported(error: Exception) -> RunError:
    with pytest.raises(RunError) as raised, friendly_errors():
        raise error
    assert "\n" not in str(raised.value)
    return raised.value


def test_out_of_memory_names_keys_and_amounts():
    message = str(reported(torch.OutOfMemoryError(OUT_OF_MEMORY)))
    for part in (
        *("TRAIN.BATCH_SIZE", "MODEL.ACT_CHECKPOINT", "TEST.BATCH_SIZE"),
        *("Tried to allocate 2.50 GiB; GPU 0", "79.15 GiB", "1.06 GiB is free", "75.93 GiB is"),
    ):
        assert part in message
    assert "expandable_segments" not in message
    assert "CUDA out of memory" in str(reported(torch.OutOfMemoryError("CUDA out of memory.")))


@pytest.mark.parametrize("last", ["socketStartConnect: Connect to 10.0.0.1 failed: timed out", ""])
def test_errors_of_nccl_are_not_lost_peers(last):
    meaning = "System call (e.g. socket, malloc) or external library call failed or device error."
    message = NCCL.format(code="ncclSystemError", meaning=meaning, last=last)
    error = reported(dist.DistBackendError(message))
    assert not isinstance(error, ConnectionLost)
    assert str(error) == f"NCCL failed on this rank: ncclSystemError: {last or meaning}"


def test_a_remote_error_of_nccl_is_a_lost_peer(tmp_path):
    meaning = "A call failed possibly due to a network error or a remote process exiting."
    message = NCCL.format(code="ncclRemoteError", meaning=meaning, last="closed by peer")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        assert isinstance(reported(dist.DistBackendError(message)), ConnectionLost)
    finally:
        dist.destroy_process_group()


def test_an_operator_that_is_not_deterministic():
    message = "upsample_bicubic2d_backward_out_cuda does not have a deterministic implementation, "
    error = str(reported(RuntimeError(message + "but you set ...")))
    assert "DETERMINISTIC" in error and "upsample_bicubic2d_backward_out_cuda" in error


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), friendly_errors():
        raise ZeroDivisionError
