"""EVA: exact attention to a local window, and control variates for all other keys.

Zheng et al., "Efficient Attention via Control Variates", ICLR 2023, by LARA's authors. The tokens
of a frame are divided into windows, and the windows into chunks. In every frame, a query attends
exactly to the keys of its own window, and to one summary of each chunk c outside of this window:

    k_c = mean of the chunk's keys,   b_c = log(size of c)
    v_c = sum_p xi(k_p, w_c) v_p / sum_p xi(k_p, w_c),   log xi(x, w) = w.x - |x|^2/2

In training, w_c is drawn from N(mu_c, I), where mu_c is the sum of the chunk's mean query and mean
key. In eval mode, w_c = mu_c. All vectors are in the scaled space (samples.py). The paper learns
k_c and needs no b_c. In a frame, a query attends to about m/2 keys of its window and about m/2
summaries, where m is `num_keys`. Each window has at least one chunk, so with m below about
2 sqrt(P) there are more summaries, about 2P/m. With m >= P the result is exact.

Shapes: F frames; P tokens of a frame; N = F*P queries, which must be the tokens of the keys
(self-attention); C chunks of a frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slowfast_lara.attention.groups import attend, group_softmax, group_sums, keys_and_values
from slowfast_lara.attention.pooled import grid_blocks
from slowfast_lara.attention.registry import LandmarkEstimator, register
from slowfast_lara.attention.softmax import softmax_attention
from slowfast_lara.attention.tensors import index_tensor, scaled, split_frames, without_autocast


def eva_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_keys: int,
    num_frames: int = 1,
    noise: Tensor | None = None,
) -> Tensor:
    """EVA attention: q, k, v [B,h,F*P,d] -> [B,h,F*P,F,d].

    `num_keys` is m, roughly the number of keys and summaries that a query attends to in a frame.
    `noise` [B,h,F,C,d] is standard normal. If it is None, each sample w_c is mu_c.
    """
    tokens = k.shape[2] // num_frames
    if num_keys >= tokens:
        return softmax_attention(q, k, v, num_frames=num_frames)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"eva needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}")
    dtype = q.dtype
    with without_autocast(q.device.type):
        q, pairs = keys_and_values(q, k, v, num_frames)
        windows, chunks = windows_and_chunks(tokens, num_keys)
        summaries, biases = _summaries(q, pairs, chunks, noise)
        outs, order = [], []
        for window in range(max(windows) + 1):
            inside = [token for token in range(tokens) if windows[token] == window]
            own = {chunks[token] for token in inside}
            others = [chunk for chunk in range(max(chunks) + 1) if chunk not in own]
            at, rest = (index_tensor(x, q.device) for x in (inside, others))
            keys = torch.cat((pairs[..., at, :], summaries[..., rest, :]), dim=-2)
            bias = torch.cat((biases.new_zeros(len(inside)), biases[rest]))
            queries = split_frames(q, num_frames)[..., at, :].flatten(2, 3)
            out = attend(queries, keys, bias.expand(keys.shape[:-1]))
            outs.append(out.unflatten(2, (num_frames, len(inside))))  # [B,h,F,tokens,F,d]
            order += inside
        position = index_tensor(sorted(range(tokens), key=order.__getitem__), q.device)
        return torch.cat(outs, dim=3)[:, :, :, position].flatten(2, 3).to(dtype)


def windows_and_chunks(tokens: int, num_keys: int) -> tuple[list[int], list[int]]:
    """Indices of the window and of the chunk of each token; each chunk is part of one window."""
    half = max(1, num_keys // 2)
    windows = grid_blocks(tokens, -(-tokens // half))
    number = max(windows) + 1
    chunks, first = [0] * tokens, 0
    for window in range(number):
        inside = [token for token in range(tokens) if windows[token] == window]
        parts = min(max(1, half // number), len(inside))
        for place, token in enumerate(inside):
            chunks[token] = first + place * parts // len(inside)
        first += parts
    return windows, chunks


def _summaries(
    q: Tensor, pairs: Tensor, chunks: Sequence[int], noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Summaries of all chunks: k_c and v_c, concatenated [B,h,F,C,2d], and b_c [C]."""
    d, number = q.shape[-1], max(chunks) + 1
    sizes = index_tensor([chunks.count(c) for c in range(number)], q.device).to(pairs.dtype)
    index = index_tensor(chunks, q.device)
    groups = index.expand(pairs.shape[:-1])
    k, v = pairs.split(d, dim=-1)
    q_and_k = torch.cat((split_frames(q, pairs.shape[2]), k), dim=-1)
    means = group_sums(q_and_k, groups, number) / sizes.unsqueeze(-1)
    q_means, k_means = means.split(d, dim=-1)
    samples = scaled(q_means + k_means)
    if noise is not None:
        samples = samples + noise.to(samples.dtype)
    keys = scaled(k)
    logits = (samples[..., index, :] * keys).sum(-1) - keys.square().sum(-1) / 2
    shares = group_softmax(logits, groups, number).to(v.dtype)
    v_means = group_sums(v * shares.unsqueeze(-1), groups, number)
    return torch.cat((k_means, v_means), dim=-1), sizes.log()


@register("eva")
class EvaAttention(LandmarkEstimator):
    counts_keys_of_a_frame = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        noise = None
        tokens = k.shape[2] // num_frames
        if self.training and self.num_landmarks < tokens:
            number = max(windows_and_chunks(tokens, self.num_landmarks)[1]) + 1
            noise = q.new_empty(*q.shape[:2], num_frames, number, q.shape[-1]).normal_()
        return eva_attention(
            q, k, v, num_keys=self.num_landmarks, num_frames=num_frames, noise=noise
        )
