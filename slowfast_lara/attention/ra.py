"""RA: randomized attention, an unbiased estimate of softmax attention.

Zheng et al., "Linear Complexity Randomized Self-attention Mechanism", ICML 2022, sec. 3.2 and
appendix G.2. For each query n and frame f, with q and k times d**-0.25, the estimate is the mean of
g_f(w) over S samples w:

    z ~ pi = softmax_p(q_n.k_fp),   w = q_n + k_fz + eps,   eps ~ N(0, I)
    g_f(w) = sum_p softmax_p(w.k_fp - |k_fp|^2/2) v_fp

The biased variant replaces the drawn key k_fz by its expectation sum_p pi_p k_fp, and eps by 0 in
eval mode. The option `noise` scales eps in training (by d**-0.25 in the authors' image code). Any
value except 1 makes the estimate in training biased.

Time is quadratic in the number of tokens. The unbiased variant stores the N x P probabilities of
one frame at a time; the biased variant stores no probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from slowfast_lara.attention.registry import Estimator, register
from slowfast_lara.attention.samples import Noise, draw_components, noise_scale, seeded_normal
from slowfast_lara.attention.sdpa import fused_attention
from slowfast_lara.attention.tensors import at_least_float32, gather_tokens, scaled, split_frames

Draw = Callable[[Tensor], Tensor]  # returns standard normal numbers with the shape of its argument


def ra_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_frames: int = 1,
    num_samples: int = 1,
    biased: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Randomized attention: q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d].

    `generator` draws the random numbers. If it is None, the unbiased estimate uses torch's
    global generator, and the biased estimate has no noise, as in eval mode.
    """

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)

    noise = None if biased and generator is None else draw
    return ra_with_draws(
        q, k, v, num_frames=num_frames, num_samples=num_samples, biased=biased, draw=noise
    )


@at_least_float32
def ra_with_draws(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_frames: int,
    num_samples: int,
    biased: bool,
    draw: Draw | None,
    noise: float = 1.0,
) -> Tensor:
    """`ra_attention` with eps = noise * draw(q).

    `draw` also selects the keys k_fz of the unbiased estimate. draw=None means eps = 0; this is
    allowed only if `biased`.
    """
    q, k = scaled(q), scaled(k)
    # `sample_attention` appends the norms to the d components of the keys. On a GPU, it also pads
    # the head size with zeros to a multiple of 8, which fused kernels support; otherwise
    # `fused_attention` would pad with another copy. On a CPU, padding is not needed and would take
    # 10 % more time.
    zeros = 0 if q.device.type == "cpu" else -(q.shape[-1] + 1) % 8
    frames = zip(split_frames(k, num_frames).unbind(2), split_frames(v, num_frames).unbind(2))
    out = []
    for k_frame, v_frame in frames:
        if biased:
            centre = fused_attention(q, k_frame, k_frame, scale=1.0)  # sum_p pi_p k_fp
        else:
            probabilities = (q @ k_frame.mT).detach().softmax(-1)
        estimates = []
        for _ in range(num_samples):
            if not biased:
                assert draw is not None  # draw=None is allowed only if `biased`
                uniform = torch.special.ndtr(draw(q[..., :1]))
                centre = gather_tokens(k_frame, draw_components(probabilities, uniform))
            samples = q + centre
            if draw is not None:
                samples = samples.add(draw(q), alpha=noise)
            estimates.append(sample_attention(samples, k_frame, v_frame, zeros))
        out.append((sum(estimates[1:], estimates[0]) / num_samples).transpose(1, 2))
    # [B,F,N,h,d] is the memory layout that the temporal stage of trajectory attention reads.
    return torch.stack(out, dim=1).permute(0, 3, 2, 1, 4)


def sample_attention(samples: Tensor, k: Tensor, v: Tensor, zeros: int) -> Tensor:
    """g(w) = sum_p softmax_p(w.k_p - |k_p|^2/2) v_p for samples w [B,h,N,d]; k, v [B,h,P,d].

    The norms |k_p|^2/2 are an extra component of the keys, followed by `zeros` zeros. If the norms
    were an attention mask, the mask would need a gradient: PyTorch then uses no fused attention on
    a CPU, and computes N x P gradients on a GPU.
    """
    half_norms = k.square().sum(-1, keepdim=True) / 2
    minus = samples.new_full((*samples.shape[:-1], 1 + zeros), -1.0)
    out = fused_attention(
        torch.cat((samples, minus), dim=-1),
        torch.cat((k, functional.pad(half_norms, (0, zeros))), dim=-1),
        functional.pad(v, (0, 1 + zeros)),
        scale=1.0,
    )
    return out[..., : v.shape[-1]]


@register("ra")
class RandomizedAttention(Estimator):
    def __init__(
        self,
        *,
        head_dim: int,
        seed: int,
        num_samples: Annotated[int, "S, the number of samples for each query and frame"] = 1,
        biased: Annotated[
            bool,
            "use the mean of the keys, weighted by their attention weights, instead of drawing a "
            "key with these weights; no noise in eval mode",
        ] = False,
        noise: Noise = 1.0,
    ) -> None:
        super().__init__()
        self.seed, self.num_samples, self.biased = seed, num_samples, biased
        self.noise = noise_scale(noise, head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        options = {"num_frames": num_frames, "num_samples": self.num_samples}
        if self.training:
            drawn = {"draw": torch.randn_like, "noise": self.noise}
            return ra_with_draws(q, k, v, biased=self.biased, **drawn, **options)
        if self.biased:
            options["num_samples"] = 1
            return ra_with_draws(q, k, v, biased=True, draw=None, **options)
        # All clips of a batch use the same random numbers, so that the result of a clip does not
        # depend on the rest of the batch. A forward pass uses consecutive seeds, and the seeds of
        # two layers may differ by 1. The factor prevents an overlap.
        seeds = itertools.count(self.seed * 1_000_003)

        def draw(like: Tensor) -> Tensor:
            return seeded_normal(like[:1].detach(), next(seeds)).expand(like.shape)

        return ra_with_draws(q, k, v, biased=False, draw=draw, **options)
