"""Merged-key attention: exact attention over groups of similar keys.

For each frame and head, m of its P keys become centres, and every other key joins its nearest
centre. A group acts as one key, value and bias, with the mean query r as in groups.py:

    out_n = sum_c softmax_c(q_n.k_c / sqrt(d) + b_c) v_c
    s_p proportional to exp(r.k_p / sqrt(d)) in a group,
    k_c = sum_p s_p k_p,   v_c = sum_p s_p v_p,   b_c = -sum_p s_p log s_p + V_c / 2

V_c is the variance of the logits of the group's keys, averaged over the queries of the head: the
second-order term of the group's log-mass. Merging changes the output by the spread of logits and
values within a group. So two keys are compared (`compare`) by the mean square of the difference of
their logits, (k - k')^T S (k - k') / d, plus the squared distance of their values, scaled to the
same spread. S is the covariance of the queries; half of it is replaced by a multiple of the
identity with the same trace, because few directions hold most of the variance, and single queries
lie in the others. The groups and V_c carry no gradient, all else does.

Choice of centres: the key nearest the mean comes first. Then, in `rounds` rounds of equal size, the
keys farthest from all centres. Of twice as many candidates, a round takes those that are also far
from every candidate before them; otherwise it would take several keys of one outlying region. One
round is a few batched operations. More rounds approach the sequential farthest-point search.

Related work: EVA (Zheng et al., ICLR 2023) treats the keys of a local window exactly and summarises
the others by fixed blocks. Token merging (Bolya et al., ICLR 2023) merges tokens of the whole
network pairwise. Clustered attention (Vyas et al., NeurIPS 2020) groups queries. Here the data
decide which keys stay apart, and queries, values and shapes of the network stay as they are.

With m >= P the result is exact. Shapes: see groups.py; e components of the compared features.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from slowfast_lara.attention.groups import (
    attend,
    group_entropies,
    group_softmax,
    group_sums,
    keys_and_values,
)
from slowfast_lara.attention.registry import Estimator, register
from slowfast_lara.attention.softmax import softmax_attention
from slowfast_lara.attention.tensors import is_exporting, without_autocast

# A round compares this many candidates for every centre that it chooses.
CANDIDATES = 2
# On a CPU, keys and values are grouped for a few heads at a time: at most this many elements, so
# that they stay in the cache.
CPU_CHUNK = 2**19

Compare = Literal["queries", "values", "keys"]


class Features(NamedTuple):
    """Features of the keys [B,h,F,P,e], in which distances are measured.

    The squared distance of two keys is norms_p + norms_p' - 2 left_p.right_p'.
    """

    left: Tensor
    right: Tensor
    norms: Tensor  # left_p.right_p, [B,h,F,P]


def merged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_groups: int,
    num_frames: int = 1,
    rounds: int = 4,
    compare: Compare = "queries",
) -> Tensor:
    """q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d]."""
    if num_groups >= k.shape[2] // num_frames:
        return softmax_attention(q, k, v, num_frames=num_frames)
    dtype = q.dtype
    with without_autocast(q.device.type):
        q, pairs = keys_and_values(q, k, v, num_frames)
        chunks = _head_chunks(pairs)
        parts = [_merge(q[:, at], pairs[:, at], num_groups, rounds, compare) for at in chunks]
        means, biases = (x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in zip(*parts))
        return attend(q, means, biases).to(dtype)


def _head_chunks(pairs: Tensor) -> list[slice]:
    """Slices of heads that are processed at a time: all, or on a CPU, as CPU_CHUNK allows."""
    size = h = pairs.shape[1]
    if pairs.device.type == "cpu" and not is_exporting():
        size = max(1, CPU_CHUNK * h // max(1, pairs.numel()))
    return [slice(start, start + size) for start in range(0, h, size)]


def _merge(
    q: Tensor, pairs: Tensor, num_groups: int, rounds: int, compare: Compare
) -> tuple[Tensor, Tensor]:
    """k_c and v_c [B,h,F,m,2d], and b_c [B,h,F,m].

    `pairs` are keys and values, side by side [B,h,F,P,2d].
    """
    d = q.shape[-1]
    mean = pairs.mean(-2, keepdim=True)
    centred = pairs - mean
    metric = query_metric(q.detach()).unsqueeze(2) if compare == "queries" else None
    features = key_features(centred.detach(), metric, d, compare)
    groups = choose_groups(features, num_groups, rounds)
    reference = q.mean(2) * d**-0.5
    logits = pairs[..., :d] @ reference[:, :, None, :, None]
    shares = group_softmax(logits.squeeze(-1), groups, num_groups)
    biases = group_entropies(shares, groups, num_groups)
    means = group_sums(centred * shares.to(q.dtype).unsqueeze(-1), groups, num_groups)
    if metric is not None:
        # V_c = sum_p s_p k_p^T S k_p / d - k_c^T S k_c / d, over centred keys
        squares = shares.detach() * _dot(features.left[..., :d], features.right[..., :d])
        squares = group_sums(squares.unsqueeze(-1), groups, num_groups).squeeze(-1)
        k_means = means.detach()[..., :d].to(metric.dtype)
        biases = biases + (squares - _dot(k_means @ metric, k_means)).clamp(min=0) / 2
    return means + mean, biases


def query_metric(q: Tensor) -> Tensor:
    """S / d of each head: [B,h,N,d] -> [B,h,d,d]."""
    d = q.shape[-1]
    if q.dtype == torch.float16:  # squares would overflow
        q = q.bfloat16()
    q = q - q.mean(2, keepdim=True)
    covariance = q.mT @ q / (q.shape[2] * d)
    identity = torch.eye(d, dtype=q.dtype, device=q.device)
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)
    return covariance.lerp(mean[..., None, None] * identity, 0.5)


def key_features(pairs: Tensor, metric: Tensor | None, d: int, compare: Compare) -> Features:
    """Features of keys and values [B,h,F,P,2d], which are centred: that avoids cancellation."""
    if pairs.dtype == torch.float16:
        pairs = pairs.bfloat16()
    keys, values = pairs.split(d, dim=-1)
    left = keys if metric is None else keys @ metric
    norms = _dot(left, keys)
    if compare == "keys":
        return Features(left, keys, norms)
    value_norms = _dot(values, values)
    spreads = [x.mean(-1, keepdim=True) for x in (norms, value_norms)]
    scale = torch.where(spreads[1] > 0, spreads[0] / spreads[1], 0.0)
    left = torch.cat((left, values * scale.unsqueeze(-1).to(values.dtype)), dim=-1)
    return Features(left, pairs, norms + scale * value_norms)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, dtype=torch.promote_types(x.dtype, torch.float32))


def choose_groups(features: Features, num_groups: int, rounds: int) -> Tensor:
    """The group of each key [B,h,F,P], from 0 to num_groups - 1; ties go to the lower index.

    left_p.right_z - norms_z / 2 is largest for the centre z nearest to key p.
    """
    norms = features.norms
    centres = norms.argmin(-1, keepdim=True)  # the features are centred: their mean is the origin
    nearness, groups = _nearest(features, centres)
    for number in _equal_parts(num_groups - 1, rounds):
        taken = centres.shape[-1]
        distances = (norms - 2 * nearness).scatter(-1, centres, -torch.inf)
        candidates = min(CANDIDATES * number, norms.shape[-1] - taken)
        chosen = _far_apart(features, distances, number, candidates)
        scores, nearest = _nearest(features, chosen)
        groups = torch.where(scores > nearness, nearest + taken, groups)
        nearness = torch.maximum(nearness, scores)
        centres = torch.cat((centres, chosen), dim=-1)
    # A centre belongs to its own group, even if an equal key is a centre too: no group is empty.
    own = torch.arange(num_groups, device=norms.device).expand_as(centres)
    return groups.scatter(-1, centres, own)


def _nearest(features: Features, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Score and number of the nearest of some centres [...,c], for every key: [...,P] each."""
    scores = features.left @ _take(features.right, centres).mT
    return (scores - features.norms.gather(-1, centres).unsqueeze(-2) / 2).max(-1)


def _far_apart(features: Features, distances: Tensor, number: int, candidates: int) -> Tensor:
    """Indices [...,number] of keys that are far from the centres and from each other.

    The candidates are the keys with the largest distances from the centres, in this order. Each is
    compared with the candidates before it. Those whose smallest distance is largest are chosen.
    """
    far, indices = distances.sort(dim=-1, descending=True, stable=True)
    far, indices = far[..., :candidates], indices[..., :candidates]
    if candidates == number:
        return indices
    left, right = (_take(x, indices) for x in features[:2])
    norms = features.norms.gather(-1, indices)
    between = norms.unsqueeze(-1) + norms.unsqueeze(-2) - 2 * (left @ right.mT)
    after = torch.ones(candidates, candidates, dtype=torch.bool, device=far.device).triu()
    between = between.masked_fill(after, torch.inf).amin(-1)
    order = torch.minimum(far, between).sort(dim=-1, descending=True, stable=True).indices
    return indices.gather(-1, order[..., :number])


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Select tokens: x [...,P,e] at the indices [...,c] -> [...,c,e]; faster than gather."""
    first = torch.arange(0, index[..., 0].numel() * x.shape[-2], x.shape[-2], device=x.device)
    rows = index.flatten(0, -2) + first.unsqueeze(-1)
    return x.flatten(0, -2).index_select(0, rows.flatten()).view(*index.shape, x.shape[-1])


def _equal_parts(total: int, parts: int) -> list[int]:
    sizes = [total // parts + (part < total % parts) for part in range(parts)]
    return [size for size in sizes if size]


@register("merged")
class MergedAttention(Estimator):
    def __init__(
        self,
        *,
        num_landmarks: int,
        rounds: Annotated[int, "rounds of the choice of centres"] = 4,
        compare: Annotated[
            Compare, "distance of keys: by queries and values, by keys and values, or by keys"
        ] = "queries",
    ) -> None:
        super().__init__()
        self.num_landmarks, self.rounds, self.compare = num_landmarks, rounds, compare

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        return merged_attention(
            q,
            k,
            v,
            num_groups=self.num_landmarks,
            num_frames=num_frames,
            rounds=self.rounds,
            compare=self.compare,
        )
