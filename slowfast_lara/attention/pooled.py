"""Pooled attention: exact attention over the means of blocks of neighbouring keys.

MViT (Fan et al., ICCV 2021) and PVT (Wang et al., ICCV 2021) pool keys and values in this way, with
learned layers in addition. The P tokens of a frame form a square grid, which is divided into at
most m (`num_groups`) blocks of nearly equal size. If P is not a square number, the blocks are m
runs of adjacent tokens. The logits of a block include the log of its size (groups.py). With m >= P
the result is exact.
"""

from __future__ import annotations

import math

from torch import Tensor

from slowfast_lara.attention.groups import attend_to_groups, keys_and_values
from slowfast_lara.attention.registry import LandmarkEstimator, register
from slowfast_lara.attention.softmax import softmax_attention
from slowfast_lara.attention.tensors import index_tensor, without_autocast


def pooled_attention(
    q: Tensor, k: Tensor, v: Tensor, *, num_groups: int, num_frames: int = 1
) -> Tensor:
    """Pooled attention: q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d]."""
    if num_groups >= k.shape[2] // num_frames:
        return softmax_attention(q, k, v, num_frames=num_frames)
    dtype = q.dtype
    with without_autocast(q.device.type):
        q, pairs = keys_and_values(q, k, v, num_frames)
        blocks = grid_blocks(pairs.shape[3], num_groups)
        groups = index_tensor(blocks, q.device).expand(pairs.shape[:-1])
        return attend_to_groups(q, pairs, groups, max(blocks) + 1).to(dtype)


def grid_blocks(tokens: int, most: int) -> list[int]:
    """Divide a square grid of tokens into at most `most` blocks; returns each token's block index.

    If the number of tokens is not a square number, the blocks are `most` runs of adjacent tokens.
    """
    side = math.isqrt(tokens)
    if side * side != tokens:
        return [token * most // tokens for token in range(tokens)]
    # Among the divisions with the most blocks, choose the one whose blocks are closest to squares.
    shapes = [(rows, min(side, most // rows)) for rows in range(1, min(side, most) + 1)]
    rows, columns = max(shapes, key=lambda shape: (shape[0] * shape[1], -abs(shape[0] - shape[1])))
    return [
        (y * rows // side) * columns + x * columns // side for y in range(side) for x in range(side)
    ]


@register("pooled")
class PooledAttention(LandmarkEstimator):
    counts_keys_of_a_frame = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        return pooled_attention(q, k, v, num_groups=self.num_landmarks, num_frames=num_frames)
