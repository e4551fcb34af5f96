"""Exact attention over groups of keys, the common form of `merged`, `tome` and `pooled`.

The keys of a frame are divided into m groups. A key p of group c has a share s_p of its group (the
shares of a group add up to 1), and the group acts as one key, value and bias:

    k_c = sum_p s_p k_p,   v_c = sum_p s_p v_p,   b_c = -sum_p s_p log s_p
    out_n = sum_c softmax_c(q_n.k_c / sqrt(d) + b_c) v_c

b_c is the entropy of the shares: 0 for a single key, log(size) for equal shares. By Jensen's
inequality q_n.k_c / sqrt(d) + b_c never exceeds the true log-mass log sum_p exp(q_n.k_p / sqrt(d))
of the group, whatever the shares. Both are equal for the query r if s_p is proportional to
exp(r.k_p / sqrt(d)); `merged` takes the mean query as r. With r = 0 the shares are equal.

The error is bounded. For a query q, let delta be the largest difference of (q - r).k_p / sqrt(d)
between two keys of a group. Then the log-mass is too small by at most delta^2 / 8 (Hoeffding's
lemma), and v_c differs from the exact mean of the group's values by at most tanh(delta / 4) times
the largest distance between two of them. If the errors of the log-masses of a frame lie in a range
of length e, the output differs by at most the largest error of a v_c plus tanh(e / 4) times the
largest distance between two values. So equal keys merge without an error.

The groups carry no gradient. Everything else does, including the shares and r.

Shapes: B batch, h heads, N queries, F frames, P tokens of a frame, m groups of a frame, d head
size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slowfast_lara.attention.components import append_biases, append_units
from slowfast_lara.attention.softmax import frames_first, frames_last
from slowfast_lara.attention.tensors import is_exporting, split_frames, to_float32

# Smallest log-weight relative to the largest of the frame, so that no weight underflows in float32.
MIN_LOG_WEIGHT = -60.0
_SDPA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def sdpa_supports(x: Tensor) -> bool:
    """Whether a GPU has fused attention for the dtype of x; the meta device counts as a GPU."""
    return x.device.type in ("cuda", "meta") and x.dtype in _SDPA_DTYPES


def keys_and_values(q: Tensor, k: Tensor, v: Tensor, num_frames: int) -> tuple[Tensor, Tensor]:
    """q [B,h,N,d], and keys and values side by side [B,h,F,P,2d], in the dtype of the computation.

    That is the dtype of q on a GPU, and at least float32 elsewhere and in exported programs.
    """
    if not sdpa_supports(q) or is_exporting():
        q = to_float32(q)
    return q, torch.cat([split_frames(x.to(q.dtype), num_frames) for x in (k, v)], dim=-1)


def attend_to_groups(q: Tensor, pairs: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Attention over groups with equal shares: q [B,h,N,d] -> [B,h,N,F,d].

    Args:
        pairs: keys and values, side by side [B,h,F,P,2d].
        groups: group of each key [B,h,F,P], from 0 to num_groups - 1; no group may be empty.
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
    """The entropy b_c of the shares [B,h,F,P] in each group: [B,h,F,m]."""
    return group_sums((-shares * shares.log()).unsqueeze(-1), groups, num_groups).squeeze(-1)


def group_sums(x: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Sums over the keys of each group: [...,P,e] and [...,P] -> [...,m,e].

    The order of summation is fixed on every device. On a GPU, index_add uses atomics in any order.
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
    """Attention over k_c, v_c [B,h,F,m,2d] with biases [B,h,F,m]: q [B,h,N,d] -> [B,h,N,F,d]."""
    k, v = means.split(q.shape[-1], dim=-1)
    if sdpa_supports(q) and not is_exporting():
        return _attend_by_components(q, k, v, biases)
    queries = frames_first(q.unsqueeze(2))[0]  # [B*h,N,d]
    biases = biases.permute(2, 0, 1, 3).flatten(1, 2)  # [F,B*h,m]
    arguments = (queries, frames_first(k), frames_first(v), biases)
    if q.device.type == "cpu" and not is_exporting():
        return frames_last(_AttendOnCpu.apply(*arguments), q.shape[1])
    return frames_last(_masked_attention(*arguments), q.shape[1])


def _attend_by_components(q: Tensor, k: Tensor, v: Tensor, biases: Tensor) -> Tensor:
    """`attend` with biases as extra components of the keys: no mask, and biases get gradients."""
    d, frames = q.shape[-1], k.shape[2]
    queries = append_units(q.permute(2, 0, 1, 3)).flatten(1, 2).transpose(0, 1)  # [B*h,N,d']
    keys = append_biases(k, biases * d**0.5)
    keys, values = (x.permute(2, 0, 1, 3, 4).flatten(1, 2) for x in (keys, v))
    queries = queries.expand(frames, -1, -1, -1)
    out = functional.scaled_dot_product_attention(queries, keys, values, scale=d**-0.5)
    return frames_last(out, q.shape[1])


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, biases: Tensor) -> Tensor:
    """q [B*h,N,d]; k, v [F,B*h,m,d]; biases [F,B*h,m] -> [F,B*h,N,d]."""
    mask = biases.unsqueeze(2).expand(-1, -1, q.shape[1], -1)
    return functional.scaled_dot_product_attention(
        q.expand(len(k), -1, -1, -1), k, v, attn_mask=mask
    )


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
