"""Tile sizes of the kernels, without autotuning.

Each tile is the largest with which the compiled kernel spills no registers and fits into the shared
memory of every supported GPU. `python -m benchmarks kernels` compiles the kernels of the shipped
configs in bfloat16 for sm_80 to sm_120 and reports violations.

In float32, more kernels spill registers. With a head size of 128 and 256 samples, combine_forward
(without TF32 also combine_backward_queries) exceeds the shared memory of GPUs with compute
capability 8.6, 8.9 or 12.0, and does not launch there. `auto` is not affected: it always selects
PyTorch in float32.
"""

from __future__ import annotations


def block_size(n: int) -> int:
    """Smallest power of two >= n and >= 16, the smallest dimension that tl.dot supports."""
    return max(16, 1 << (n - 1).bit_length())


# Number of frames whose gradients one program of combine_backward_means accumulates. The program
# computes the scores only once for these frames.
FRAME_GROUP = 4

# Number of parts of a sum over the queries. One program computes each part, so that enough programs
# run to occupy the GPU.
QUERY_PARTS = 16

# Number of programs for one on each multiprocessor: an A100 has 108, an H100 132, a B200 148.
MIN_PROGRAMS = 148

# Tiles (BLOCK_C samples, BLOCK_N queries or keys, warps, pipeline stages) of kernels whose programs
# own a block of samples or loop over blocks of samples: first for d <= 64, then for d <= 128.
# Kernels not in _SAMPLE_BLOCKS_FLOAT32 use the second tile in float32, with BLOCK_N = 16.
_SAMPLE_BLOCKS = {
    "key_stats_forward": ((64, 64, 8, 2), (64, 64, 8, 2)),
    "query_normaliser": ((64, 64, 4, 2), (64, 64, 4, 2)),
    "key_stats_backward_keys": ((64, 32, 4, 2), (32, 32, 4, 1)),
    "key_stats_backward_tied": ((64, 32, 4, 1), (32, 32, 4, 1)),
    "query_normaliser_backward": ((32, 64, 8, 1), (32, 64, 8, 1)),
    "key_stats_backward_samples": ((64, 32, 4, 2), (64, 32, 8, 1)),
    "combine_backward_samples": ((32, 64, 8, 1), (16, 64, 8, 1)),
    "combine_backward_means": ((32, 64, 8, 1), (16, 32, 8, 1)),
}
_SAMPLE_BLOCKS_FLOAT32 = {
    "key_stats_backward_keys": ((16, 16, 4, 1), (16, 16, 8, 1)),
    "key_stats_backward_tied": ((16, 16, 4, 1), (16, 16, 8, 1)),
    "key_stats_backward_samples": ((32, 16, 4, 1), (16, 16, 8, 1)),
}
# BLOCK_N of kernels whose programs hold all samples, in half precision: first for d <= 64 and
# C <= 128, then for larger sizes.
_ALL_SAMPLES = {"combine_forward": (64, 32), "combine_backward_queries": (32, 16)}
# BLOCK_E (columns of a head in one tile) of the temporal stage's kernels, in half precision.
_TEMPORAL = {
    "temporal_scores": 16,
    "temporal_pool": 64,
    "temporal_backward_tokens": 16,
    "temporal_backward_weight": 64,
}

# Tiles (BLOCK_N keys or queries, warps) of the kernels of `merged`: first for d <= 64, then for
# d <= 128.
_GROUPS = {
    "query_moments": ((64, 4), (64, 4)),
    "choose_groups": ((32, 8), (32, 8)),
    "group_means_backward": ((32, 8), (32, 8)),
    "attend_forward": ((64, 8), (64, 8)),
    "attend_backward_groups": ((32, 8), (32, 8)),
    "attend_backward_queries": ((32, 8), (16, 8)),
}


def tile(kernel: str, *, element_size: int, d: int = 0, C: int = 0) -> dict[str, int]:
    """Block sizes of a kernel, with its numbers of warps and pipeline stages."""
    wide = element_size > 2  # float32 takes twice the space of half precision
    if kernel in _ALL_SAMPLES:
        small = d <= 64 and C <= 128 and not wide
        block_n = 16 if wide else _ALL_SAMPLES[kernel][0 if small else 1]
        # STEP is the number of head components in a matmul; a smaller STEP needs fewer registers.
        if kernel == "combine_forward":
            step, warps = 32 if small or wide else 64, 4 if wide and d <= 64 else 8
        else:
            step, warps = 16 if d <= 64 or wide else 64, 8
        block = {"BLOCK_C": block_size(C), "BLOCK_N": block_n, "STEP": step}
        return {**block, **_options(warps, 2 if small else 1)}
    if kernel in _SAMPLE_BLOCKS:
        if wide and kernel in _SAMPLE_BLOCKS_FLOAT32:
            sizes = _SAMPLE_BLOCKS_FLOAT32[kernel][0 if d <= 64 else 1]
        else:
            sizes = _SAMPLE_BLOCKS[kernel][0 if d <= 64 and not wide else 1]
        block_c, block_n, warps, stages = sizes
        return {"BLOCK_C": block_c, "BLOCK_N": 16 if wide else block_n, **_options(warps, stages)}
    if kernel in _GROUPS:
        block_n, warps = _GROUPS[kernel][d > 64]
        return {"BLOCK_N": block_n, **_group_blocks(kernel, d, C), **_options(warps, 1)}
    if kernel in ("segment_sums", "farthest_of_segment", "segment_backward"):
        return {"BLOCK_N": 16, **_options(2, 1)}
    if kernel in ("proposals_forward", "proposals_backward"):
        return {"BLOCK_C": 16, **_options(8, 1)}
    if kernel == "temporal_sum":
        return {"BLOCK_N": 16, "BLOCK_X": 128, **_options(4, 2)}
    columns = 16 if wide else _TEMPORAL[kernel]
    block = {"BLOCK_H": 16, "BLOCK_E": columns, "BLOCK_N": 16, "BLOCK_X": 16, "BLOCK_F": 16}
    return {**block, **_options(4 if wide and kernel == "temporal_backward_weight" else 8, 1)}


def _group_blocks(kernel: str, d: int, C: int) -> dict[str, int]:
    """Block sizes of a kernel of `merged`, in addition to BLOCK_N.

    BLOCK_C: all groups. BLOCK_M: a block of groups. BLOCK_E: head components. BLOCK_I: keys, in
    loops that sum over the keys of each group.
    """
    if kernel == "query_moments":
        return {}
    blocks = {"BLOCK_C": block_size(C)}
    if kernel == "attend_backward_groups":
        blocks["BLOCK_E"] = min(64, block_size(d))
    if kernel in ("choose_groups", "group_means_backward"):
        blocks["BLOCK_I"] = 32
    if kernel == "choose_groups":
        blocks["BLOCK_M"] = 32
    return blocks


def _options(warps: int, stages: int) -> dict[str, int]:
    return {"num_warps": warps, "num_stages": stages}


def _parts(heads: int, C: int, block_c: int) -> int:
    """Number of parts of a sum with which MIN_PROGRAMS programs run; 1 if one part is enough.

    A program owns a part of the sum and a block of samples, of one of `heads` (of all clips).
    """
    return -(-MIN_PROGRAMS // (heads * -(-C // block_c)))


def queries_of_part(
    kernel: str, queries: int, heads: int, *, element_size: int, d: int, C: int
) -> int:
    """Number of queries over which one program sums, a multiple of BLOCK_N.

    There are about as many parts as `_parts` requires. The last part may be shorter.
    """
    block = tile(kernel, element_size=element_size, d=d, C=C)
    parts = _parts(heads, C, block["BLOCK_C"])
    return block["BLOCK_N"] * -(-queries // (block["BLOCK_N"] * parts))


def frames_of_part(
    kernel: str, frames: int, heads: int, *, element_size: int, d: int, C: int
) -> int:
    """Number of frames over which one program sums.

    There are at least as many parts as `_parts` requires, if there are so many frames. The last
    part may be shorter.
    """
    block = tile(kernel, element_size=element_size, d=d, C=C)
    return max(1, frames // _parts(heads, C, block["BLOCK_C"]))


def weight_gradient_parts(tokens: int) -> int:
    """Number of partial sums over tokens in the temporal weight gradient, computed in parallel."""
    return max(1, min(16, tokens // 256))
