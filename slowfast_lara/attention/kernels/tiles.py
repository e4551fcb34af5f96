"""Tile sizes, fixed for each kernel: nothing is tried at run time.

They were chosen so that the compiled kernel spills no register and fits into the shared memory
of all GPUs that are accepted; `slowfast-lara benchmark kernels` makes the table for sm_80, sm_90
and sm_100, and says so if one no longer does. They are the same for all, because the smallest
decides. (In float32, with heads of 128 and 256 samples, some spill, and one is too large for GPUs
of 8.6, 8.9 and 12.0, which self_check.py finds out.)
"""

from __future__ import annotations

# Frames of which one program of the mixing step's backward pass collects the gradients
# (triton_mix_backward.py): the scores are made once for each group of them.
FRAME_GROUP = 4

# Samples (BLOCK_C) and queries or keys (BLOCK_N) of a tile, warps, and stages of the pipeline:
# for heads of up to 64 numbers, and of up to 128.
_OWN_SAMPLES = {
    "seen_forward": ((64, 64, 8, 2), (64, 64, 8, 2)),
    "column_sums": ((64, 64, 4, 2), (64, 64, 4, 2)),
    "seen_backward_keys": ((64, 32, 4, 2), (32, 32, 4, 1)),
    "seen_backward_same": ((64, 32, 4, 1), (32, 32, 4, 1)),
    "column_gradient": ((32, 64, 8, 1), (32, 64, 8, 1)),
    "seen_backward_samples": ((64, 32, 4, 2), (64, 32, 8, 1)),
    "mix_backward_samples": ((32, 64, 8, 1), (16, 64, 8, 1)),
    "mix_backward_means": ((32, 64, 8, 1), (16, 32, 8, 1)),
}
# Those that float32 needs smaller still.
_OWN_SAMPLES_IN_FLOAT32 = {
    "seen_backward_keys": ((16, 16, 4, 1), (16, 16, 8, 1)),
    "seen_backward_same": ((16, 16, 4, 1), (16, 16, 8, 1)),
    "seen_backward_samples": ((32, 16, 4, 1), (16, 16, 8, 1)),
}
# Kernels whose programs hold all samples: queries of a tile, by whether both the head and the
# number of samples are small (64, 128), or not.
_ALL_SAMPLES = {"mix_forward": (64, 32), "mix_backward_queries": (32, 16)}
# Columns of a head in a tile of the temporal stage, of which any number is gone through.
_TEMPORAL = {"temporal_scores": 16, "temporal_pool": 64, "temporal_spread": 16}
_TEMPORAL |= {"temporal_weight": 64}


def tile(kernel: str, *, element_size: int, d: int = 0, C: int = 0) -> dict[str, int]:
    """The tile of a kernel, and how many warps and stages it is compiled for."""
    wide = element_size > 2  # float32 takes twice the room
    if kernel in _ALL_SAMPLES:
        small = d <= 64 and C <= 128 and not wide
        block_n = _ALL_SAMPLES[kernel][0 if small else 1]
        # How many numbers of a head are multiplied at a time: fewer take fewer registers.
        if kernel == "mix_forward":
            step, warps = 32 if small or wide else 64, 4 if wide and d <= 64 else 8
        else:
            step, warps = 16 if d <= 64 or wide else 64, 8
        block_n = 16 if wide else block_n
        return {"BLOCK_N": block_n, "STEP": step, **_program(warps, 2 if small else 1)}
    if kernel in _OWN_SAMPLES:
        if wide and kernel in _OWN_SAMPLES_IN_FLOAT32:
            chosen = _OWN_SAMPLES_IN_FLOAT32[kernel][0 if d <= 64 else 1]
        else:
            chosen = _OWN_SAMPLES[kernel][0 if d <= 64 and not wide else 1]
        block_c, block_n, warps, stages = chosen
        block_n = 16 if wide else block_n
        return {"BLOCK_C": block_c, "BLOCK_N": block_n, **_program(warps, stages)}
    if kernel in ("segment_sums", "farthest_of_segment", "spread_over_segments"):
        return {"BLOCK_N": 16, **_program(2, 1)}
    if kernel in ("proposals_forward", "proposals_backward"):
        return {"BLOCK_C": 16, **_program(8, 1)}
    if kernel == "temporal_sum":
        return {"BLOCK_N": 16, "BLOCK_X": 128, **_program(4, 2)}
    columns = 16 if wide else _TEMPORAL[kernel]
    block = {"BLOCK_H": 16, "BLOCK_E": columns, "BLOCK_N": 16, "BLOCK_X": 16, "BLOCK_F": 16}
    return {**block, **_program(4 if wide and kernel == "temporal_weight" else 8, 1)}


def _program(warps: int, stages: int) -> dict[str, int]:
    return {"num_warps": warps, "num_stages": stages}


def temporal_weight_parts(tokens: int) -> int:
    """Into how many parts the tokens are cut for the weights' gradients: enough programs."""
    return max(1, min(16, tokens // 256))
