"""Exact attention over groups of keys, the common form of `merged`, `tome` and `pooled`.

The keys of a frame are divided into m groups. Each key p has a weight s_p, and the weights of a
group sum to 1. A group c acts as one key, value and bias:

    k_c = sum_p s_p k_p,   v_c = sum_p s_p v_p,   b_c = -sum_p s_p log s_p
    out_n = sum_c softmax_c(q_n.k_c / sqrt(d) + b_c) v_c

b_c is the entropy of the weights: 0 for a single key, log(size) for equal weights. By Jensen's
inequality, for any weights, the logit q_n.k_c / sqrt(d) + b_c is at most the exact log-mass of the
group, log sum_p exp(q_n.k_p / sqrt(d)). If s_p is proportional to exp(r.k_p / sqrt(d)) for a
reference query r, the logit of r equals the log-mass. In `merged`, r is the mean query, and b_c has
a second term (merged.py), which is not part of the bounds here. `tome` and `pooled` have equal
weights, which corresponds to r = 0.

The error is bounded. For a query q, let delta be the largest difference of (q - r).k_p / sqrt(d)
between two keys of a group. Then the logit of the group is below its log-mass by at most
delta^2 / 8 (Hoeffding's lemma). v_c differs from the exact mean of the group's values by at most
tanh(delta / 4) times the largest distance between two of these values. If the logit errors of all
groups of a frame lie in a range of length e, the output error is at most the largest error of a v_c
plus tanh(e / 4) times the largest distance between two values. So merging equal keys is exact.

No gradient flows through the choice of groups. All terms of the equations above have gradients,
including s_p and r.

Shapes: B batch, h heads, N queries, F frames, P tokens of a frame, m groups of a frame, d head
size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.components import append_biases, append_units
from slowfast_lara.attention.sdpa import fused_attention, sdpa_supports
from slowfast_lara.attention.softmax import frames_first, frames_last
from slowfast_lara.attention.tensors import is_exporting, split_frames, to_float32

# Lower limit of the difference between a logit and the largest logit of its frame. Without the
# limit, exp could underflow for all keys of a group, and their weights would sum to 0.
MIN_LOG_WEIGHT = -60.0


def keys_and_values(q: Tensor, k: Tensor, v: Tensor, num_frames: int) -> tuple[Tensor, Tensor]:
    """Convert q, k and v to the compute dtype; return q and the pairs (k, v) [B,h,F,P,2d].

    A pair is a key and its value, concatenated. The compute dtype is the dtype of q on a GPU.
    Elsewhere and in exported programs it is at least float32.
    """
    if not sdpa_supports(q):
        q = to_float32(q)
    return q, torch.cat([split_frames(x.to(q.dtype), num_frames) for x in (k, v)], dim=-1)


def attend_to_groups(q: Tensor, pairs: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Attention over groups, with equal weights in a group: q [B,h,N,d] -> [B,h,N,F,d].

    Args:
        pairs: concatenated keys and values [B,h,F,P,2d].
        groups: group index of each key [B,h,F,P], from 0 to num_groups - 1; no group may be empty.
    """
    ones = torch.ones_like(groups, dtype=torch.promote_types(pairs.dtype, torch.float32))
    sizes = group_sums(ones.unsqueeze(-1), groups, num_groups)
    means = group_sums(pairs, groups, num_groups) / sizes.to(pairs.dtype)
    return attend(q, means, sizes.squeeze(-1).log())


def group_softmax(logits: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Softmax of logits [B,h,F,P] over the keys of each group, in at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits - logits.detach().amax(-1, keepdim=True)
    weights = logits.clamp(min=MIN_LOG_WEIGHT).exp()
    totals = group_sums(weights.unsqueeze(-1), groups, num_groups).squeeze(-1)
    return weights / totals.gather(-1, groups)


def group_entropies(shares: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Entropy b_c of the weights `shares` in each group c: [B,h,F,P] -> [B,h,F,m].

    The weights of a group sum to 1.
    """
    return group_sums((-shares * shares.log()).unsqueeze(-1), groups, num_groups).squeeze(-1)


def group_sums(x: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Sums of x over the keys of each group: x [...,P,e], groups [...,P] -> [...,m,e].

    The sums are deterministic. On a GPU, index_add would not be deterministic: it uses atomics.
    """
    if x.device.type != "cpu" or is_exporting():
        numbers = torch.arange(num_groups, device=x.device).unsqueeze(-1)
        return (groups.unsqueeze(-2) == numbers).to(x.dtype) @ x
    rows = groups.flatten(0, -2)
    rows = rows + num_groups * torch.arange(len(rows), device=x.device).unsqueeze(-1)
    sums = x.new_zeros(rows.shape[0] * num_groups, x.shape[-1])
    sums = sums.index_add(0, rows.flatten(), x.flatten(0, -2))
    return sums.view(*groups.shape[:-1], num_groups, x.shape[-1])


def attend(q: Tensor, means: Tensor, biases: Tensor) -> Tensor:
    """Attention over groups: q [B,h,N,d] -> [B,h,N,F,d].

    `means` are k_c and v_c, concatenated [B,h,F,m,2d]; `biases` are b_c [B,h,F,m].
    """
    k, v = means.split(q.shape[-1], dim=-1)
    if sdpa_supports(q):
        return _attend_by_components(q, k, v, biases)
    queries = frames_first(q.unsqueeze(2))[0]  # [B*h,N,d]
    biases = biases.permute(2, 0, 1, 3).flatten(1, 2)  # [F,B*h,m]
    arguments = (queries, frames_first(k), frames_first(v), biases)
    if q.device.type == "cpu" and not is_exporting():
        return frames_last(_AttendOnCpu.apply(*arguments), q.shape[1])
    return frames_last(_masked_attention(*arguments), q.shape[1])


def _attend_by_components(q: Tensor, k: Tensor, v: Tensor, biases: Tensor) -> Tensor:
    """`attend` with biases as extra components of the keys, so that no mask is needed."""
    d, frames = q.shape[-1], k.shape[2]
    queries = append_units(q.permute(2, 0, 1, 3)).flatten(1, 2).transpose(0, 1)  # [B*h,N,d']
    keys = append_biases(k, biases * d**0.5)
    keys, values = (x.permute(2, 0, 1, 3, 4).flatten(1, 2) for x in (keys, v))
    queries = queries.expand(frames, -1, -1, -1)
    out = fused_attention(queries, keys, values, scale=d**-0.5)
    return frames_last(out, q.shape[1])


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, biases: Tensor) -> Tensor:
    """q [B*h,N,d]; k, v [F,B*h,m,d]; biases [F,B*h,m] -> [F,B*h,N,d]."""
    mask = biases.unsqueeze(2).expand(-1, -1, q.shape[1], -1)
    return fused_attention(q.expand(len(k), -1, -1, -1), k, v, attn_mask=mask)


class _AttendOnCpu(torch.autograd.Function):
    """`_masked_attention` with a gradient for the mask, which fused attention on a CPU lacks.

    The backward pass recomputes the weights of one frame at a time.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, biases: Tensor) -> Tensor:
        out = _masked_attention(*(x.detach() for x in (q, k, v, biases)))
        ctx.save_for_backward(q, k, v, biases, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, biases, out = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        grads = [torch.zeros_like(q), *map(torch.empty_like, (k, v, biases))]
        for f, g in enumerate(grad):
            logits = torch.baddbmm(biases[f].unsqueeze(1), q, k[f].mT, alpha=scale)
            weights = logits.softmax(-1)
            mean_grad = (g * out[f]).sum(-1, keepdim=True)
            grad_logits = (g @ v[f].mT).sub_(mean_grad).mul_(weights)
            grads[0].baddbmm_(grad_logits, k[f], alpha=scale)
            grads[1][f] = (grad_logits.mT @ q).mul_(scale)
            grads[2][f] = weights.mT @ g
            grads[3][f] = grad_logits.sum(1)
        return tuple(grads)
