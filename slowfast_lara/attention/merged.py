"""Merged-key attention: exact attention over groups of similar keys.

For each frame and head, m of its P keys become centres, and every other key joins its nearest
centre. As in groups.py, a group c acts as one key, value and bias. r is the mean query:

    out_n = sum_c softmax_c(q_n.k_c / sqrt(d) + b_c) v_c
    s_p proportional to exp(r.k_p / sqrt(d)), with sum 1 in each group
    k_c = sum_p s_p k_p,   v_c = sum_p s_p v_p,   b_c = -sum_p s_p log s_p + V_c / 2
    V_c = Var(q) sum_p s_p |k_p - k_c|^2 / d

Var(q) is the variance of a query component, averaged over the components. V_c is the variance of
(q - r).k_p / sqrt(d) in the group, averaged over queries with variance Var(q) in every direction.
V_c / 2 is the second-order term of the group's log-mass. The choice of groups and V_c have no
gradient.

The error of merging grows with the spread of logits and values in a group. So the distance between
tokens depends on keys and values. It is computed on vectors of length d: the key plus `values`
times the value, both standardised. This sum preserves |k - k'|^2 + values^2 |v - v'|^2 up to a
cross term, which is small because the bases of keys and values are unrelated. A concatenation of
key and value would cost twice as much.

The first centre is the token nearest the mean. The other centres are chosen in `rounds` rounds of
nearly equal size. The candidates of a round are the tokens farthest from their nearest centre,
twice as many as needed if enough are left, in descending order of distance. The round chooses the
candidates that are also far from the preceding candidates; otherwise it would choose several tokens
of one outlying region. With more rounds, the choice approaches sequential farthest-point search.

Related work: EVA (Zheng et al., ICLR 2023) treats the keys of a local window exactly and summarises
the others by fixed blocks. Token merging (Bolya et al., ICLR 2023) merges tokens of the whole
network pairwise. Clustered attention (Vyas et al., NeurIPS 2020) groups queries. Here the keys of
each head are grouped by similarity; the queries and the tokens of the network are unchanged.

With m >= P the result is exact. Shapes: see groups.py.

On NVIDIA GPUs, Triton kernels can compute all of this in half precision (kernels/merged.py).
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from slowfast_lara.attention.groups import (
    attend,
    group_entropies,
    group_softmax,
    group_sums,
    keys_and_values,
)
from slowfast_lara.attention.kernels import choice
from slowfast_lara.attention.kernels.launch import interpreted
from slowfast_lara.attention.kernels.merged import merged as triton_merged
from slowfast_lara.attention.kernels.merged import unsupported_groups
from slowfast_lara.attention.registry import Estimator, register
from slowfast_lara.attention.softmax import softmax_attention
from slowfast_lara.attention.tensors import is_exporting, largest, split_frames, without_autocast

# Candidates per centre to choose, in each round.
CANDIDATES = 2
# On a CPU, a few heads are processed at a time, with at most this many elements of k, so that the
# keys stay in the cache.
CPU_CHUNK = 2**19


def merged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_groups: int,
    num_frames: int = 1,
    rounds: int = 4,
    values: float = 0.7,
    kernels: choice.Kernels = "auto",
) -> Tensor:
    """Merged-key attention: q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d]."""
    keys = split_frames(k, num_frames).shape[3]
    if num_groups >= keys:
        return softmax_attention(q, k, v, num_frames=num_frames)
    with without_autocast(q.device.type):
        unsupported = unsupported_groups(q.shape[-1], num_groups, rounds, keys)
        if k.shape != v.shape:
            unsupported = unsupported or "values with a shape different from the keys'"
        if q.dtype == torch.float32 and not interpreted():
            unsupported = unsupported or "merged keys in float32"  # kernels would spill registers
        options: dict[str, Any] = {"num_groups": num_groups, "num_frames": num_frames}
        options |= {"rounds": rounds, "values": values}
        if choice.uses_triton(kernels, "merged", (q, k, v), options, unsupported):
            k, v = k.to(q.dtype), v.to(q.dtype)
            return triton_merged(q, k, v, num_frames, num_groups, rounds, values)[0]
        parts = []
        for heads in _head_chunks(k):
            chunk, pairs = keys_and_values(q[:, heads], k[:, heads], v[:, heads], num_frames)
            parts.append(_merge(chunk, pairs, num_groups, rounds, values))
        means, biases = (x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in zip(*parts))
        return attend(q.to(means.dtype), means, biases).to(q.dtype)


def _head_chunks(k: Tensor) -> list[slice]:
    """Slices of heads that are processed one at a time.

    On a CPU, CPU_CHUNK limits their size. Elsewhere and in export, one slice covers all heads.
    """
    size = h = k.shape[1]
    if k.device.type == "cpu" and not is_exporting():
        size = max(1, CPU_CHUNK * h // max(1, k.numel()))
    return [slice(start, start + size) for start in range(0, h, size)]


def _merge(
    q: Tensor, pairs: Tensor, num_groups: int, rounds: int, values: float
) -> tuple[Tensor, Tensor]:
    """Merge the keys of each frame into m groups.

    `pairs` are concatenated keys and values [B,h,F,P,2d]. Returns k_c and v_c, concatenated
    [B,h,F,m,2d], and b_c [B,h,F,m].
    """
    d = q.shape[-1]
    mean = pairs.mean(-2, keepdim=True)
    centred = pairs - mean
    groups = choose_groups(key_features(centred.detach(), values), num_groups, rounds)
    mean_q = q.mean(2)
    logits = pairs[..., :d] @ (mean_q * d**-0.5)[:, :, None, :, None]
    shares = group_softmax(logits.squeeze(-1), groups, num_groups)
    means = group_sums(centred * shares.to(q.dtype).unsqueeze(-1), groups, num_groups)
    biases = group_entropies(shares, groups, num_groups)
    with torch.no_grad():
        variance = (_squares(q).mean(-1) - _squares(mean_q)).clamp(min=0) / d
        spread = shares * _squares(centred[..., :d])
        spread = group_sums(spread.unsqueeze(-1), groups, num_groups).squeeze(-1)
        spread = (spread - _squares(means[..., :d])).clamp(min=0)
    return means + mean, biases + spread * variance[..., None, None] / (2 * d)


def key_features(centred: Tensor, values: float) -> Tensor:
    """Standardised keys plus `values` times standardised values: [...,P,2d] -> [...,P,d]."""
    d = centred.shape[-1] // 2
    wide = torch.promote_types(centred.dtype, torch.float32)
    squares = centred.square().mean(-2, keepdim=True, dtype=wide).unflatten(-1, (2, d)).mean(-1)
    # Scale keys and values to a mean square of 1. If all tokens are equal, both remain 0.
    factors = squares.clamp(min=torch.finfo(wide).tiny).rsqrt().to(centred.dtype)
    keys, others = centred.split(d, dim=-1)
    return keys * factors[..., :1] + others * (values * factors[..., 1:])


def _squares(x: Tensor) -> Tensor:
    """|x|^2 of [...,d] in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).square()


def choose_groups(x: Tensor, num_groups: int, rounds: int) -> Tensor:
    """Choose centres and assign each token to its nearest centre.

    x [...,P,e] are features with mean 0 over the tokens. Returns group indices [...,P].
    The nearest centre z of token p maximises x_p.z - |z|^2 / 2. Ties go to the lower index.
    """
    norms = _squares(x)
    centres = norms.argmin(-1, keepdim=True)
    nearness, groups = _nearest(x, norms, centres)
    for number in _equal_parts(num_groups - 1, rounds):
        taken = centres.shape[-1]
        distances = (norms - 2 * nearness).scatter(-1, centres, -torch.inf)
        candidates = min(CANDIDATES * number, x.shape[-2] - taken)
        chosen = _far_apart(x, norms, distances, number, candidates)
        scores, nearest = _nearest(x, norms, chosen)
        groups = torch.where(scores > nearness, nearest + taken, groups)
        nearness = torch.maximum(nearness, scores)
        centres = torch.cat((centres, chosen), dim=-1)
    # Put each centre into its own group, even if it equals another centre: no group may be empty.
    own = torch.arange(num_groups, device=x.device).expand_as(centres)
    return groups.scatter(-1, centres, own)


def _nearest(x: Tensor, norms: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """For each token, the score of the nearest centre and its position in `centres`, [...,P] each.

    `centres` [...,c] are token indices.
    """
    scores = x @ _take(x, centres).mT
    return (scores - norms.gather(-1, centres).unsqueeze(-2) / 2).max(-1)


def _far_apart(x: Tensor, norms: Tensor, distances: Tensor, number: int, candidates: int) -> Tensor:
    """Indices [...,number] of tokens that are far from the centres and from each other.

    The candidates are the tokens with the largest distances from the centres, in descending order.
    The score of a candidate is its smallest distance from the centres and from the candidates
    before it. The candidates with the largest scores are chosen.
    """
    far, indices = largest(distances, candidates)
    if candidates == number:
        return indices
    x, norms = _take(x, indices), norms.gather(-1, indices)
    between = norms.unsqueeze(-1) + norms.unsqueeze(-2) - 2 * (x @ x.mT)
    after = torch.ones(candidates, candidates, dtype=torch.bool, device=x.device).triu()
    between = between.masked_fill(after, torch.inf).amin(-1)
    _, order = largest(torch.minimum(far, between), number)
    return indices.gather(-1, order)


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
    counts_keys_of_a_frame = True

    def __init__(
        self,
        *,
        head_dim: int,
        num_landmarks: int,
        rounds: Annotated[int, "number of rounds in which the centres are chosen"] = 4,
        values: Annotated[
            float, "weight of the values when tokens are compared; 0: only keys count"
        ] = 0.7,
        kernels: choice.Kernels = "auto",
    ) -> None:
        super().__init__()
        self.num_landmarks, self.rounds, self.values = num_landmarks, rounds, values
        self.kernels, self.head_dim = kernels, head_dim

    def unsupported(self, keys: int = 0) -> str:
        if 0 < keys <= self.num_landmarks:
            return ""  # the result is exact attention, which needs no kernel
        return unsupported_groups(self.head_dim, self.num_landmarks, self.rounds, keys)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        return merged_attention(
            q,
            k,
            v,
            num_groups=self.num_landmarks,
            num_frames=num_frames,
            rounds=self.rounds,
            values=self.values,
            kernels=self.kernels,
        )
