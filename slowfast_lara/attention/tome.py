"""Attention over merged keys by bipartite soft matching, as in token merging (ToMe).

Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023, applied to the keys and values of
each frame and head instead of the tokens of the network. At first, each key is a group. A step puts
the groups alternately into two sets, finds for each group of the first set the nearest group of the
second, and merges the pairs with the smallest distances. Steps repeat until m groups are left. The
logits of a group include the log of its size (proportional attention).

The distance of two groups a and b, with mean keys k_a and k_b and sizes n_a and n_b, is the
increase of the squared error if they are merged (Ward's method):

    |k_a - k_b|^2 n_a n_b / (n_a + n_b)

This distance gave smaller errors than the cosine similarity of the paper. If m is at least the
number of keys of a frame, the result is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slowfast_lara.attention.groups import attend_to_groups, group_sums, keys_and_values
from slowfast_lara.attention.registry import LandmarkEstimator, register
from slowfast_lara.attention.softmax import softmax_attention
from slowfast_lara.attention.tensors import largest, without_autocast


def tome_attention(
    q: Tensor, k: Tensor, v: Tensor, *, num_groups: int, num_frames: int = 1
) -> Tensor:
    """Attention over `num_groups` groups of each frame's keys: q [B,h,N,d] -> [B,h,N,F,d]."""
    if num_groups >= k.shape[2] // num_frames:
        return softmax_attention(q, k, v, num_frames=num_frames)
    dtype = q.dtype
    with without_autocast(q.device.type):
        q, pairs = keys_and_values(q, k, v, num_frames)
        groups = match_groups(pairs[..., : q.shape[-1]].detach(), num_groups)
        return attend_to_groups(q, pairs, groups, num_groups).to(dtype)


def match_groups(k: Tensor, num_groups: int) -> Tensor:
    """Divide keys [B,h,F,P,d] into groups by bipartite matching; returns indices [B,h,F,P]."""
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    k = k - k.mean(-2, keepdim=True)  # avoid cancellation in the distances
    groups = torch.arange(k.shape[-2], device=k.device).expand(k.shape[:-1])
    means, sizes = k, k.new_ones(k.shape[:-1])
    while means.shape[-2] > num_groups:
        number = min((means.shape[-2] + 1) // 2, means.shape[-2] - num_groups)
        merged_into = _match(means, sizes, number)
        remaining = means.shape[-2] - number
        groups = merged_into.gather(-1, groups)
        sums = torch.cat((means * sizes.unsqueeze(-1), sizes.unsqueeze(-1)), dim=-1)
        sums = group_sums(sums, merged_into, remaining)
        sizes = sums[..., -1]
        means = sums[..., :-1] / sizes.unsqueeze(-1)
    return groups


def _match(means: Tensor, sizes: Tensor, number: int) -> Tensor:
    """Merge the `number` nearest pairs of c groups; return the new index of each group, [...,c]."""
    first, second = means[..., ::2, :], means[..., 1::2, :]
    n_first, n_second = sizes[..., ::2, None], sizes[..., None, 1::2]
    distances = first.square().sum(-1, keepdim=True) - 2 * first @ second.mT
    distances = distances + second.square().sum(-1).unsqueeze(-2)
    nearest, partners = (distances * (n_first * n_second / (n_first + n_second))).min(-1)
    _, merged = largest(-nearest, number)
    remains = torch.ones_like(sizes, dtype=torch.long).scatter(-1, 2 * merged, 0)
    numbers = remains.cumsum(-1) - 1
    into = numbers[..., 1::2].gather(-1, partners.gather(-1, merged))
    return numbers.scatter(-1, 2 * merged, into)


@register("tome")
class TomeAttention(LandmarkEstimator):
    counts_keys_of_a_frame = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        return tome_attention(q, k, v, num_groups=self.num_landmarks, num_frames=num_frames)
