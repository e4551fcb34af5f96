"""LARA and Performer by the operators `seen` and `mix`.

What is as small as the landmarks stays in PyTorch, in float32; q, k and v are taken as they
are. The formulas are those of lara.py and importance.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slowfast_lara.attention.importance import log_xi, scale_down
from slowfast_lara.attention.kernels.mix import mix
from slowfast_lara.attention.kernels.seen import seen
from slowfast_lara.attention.precision import without_autocast
from slowfast_lara.attention.sampling import draw_components, take_tokens

if TYPE_CHECKING:
    from slowfast_lara.attention.lara import LaraAttention

SMALLEST_ALPHA = 1e-8


def performer(q: Tensor, k: Tensor, v: Tensor, projection: Tensor, *, num_frames: int) -> Tensor:
    """performer.performer_attention."""
    samples = projection.float().expand(*q.shape[:2], *projection.shape[-2:])
    log_sums, means, _ = seen(samples, k, v, num_frames, True)
    return mix(q, samples, log_sums, means, None, None, None, None)[0]


def lara_of(estimator: LaraAttention, q: Tensor, k: Tensor, v: Tensor, num_frames: int) -> Tensor:
    """What a LARA module computes: its landmarks and noise, then one of the two below."""
    with without_autocast(q.device.type):
        q_landmarks = estimator.query_landmarks(q, num_frames)
        training, size = estimator.training, estimator.noise
        noise = torch.randn_like(q_landmarks) * size if training else None
        options: dict[str, Any] = {"num_frames": num_frames, "weighting": estimator.weighting}
        options |= {"beta": estimator.beta, "noise": noise}
        if estimator.proposal in ("mixture", "single"):
            uniform = torch.rand_like(q_landmarks[..., :1]) if training else None
            return lara_mixture(q, k, v, q_landmarks, uniform=uniform, **options)
        if estimator.proposal == "global":
            k_landmarks = attention_of_landmarks(q_landmarks, k)
        else:
            k_landmarks = estimator.key_landmarks(q_landmarks, k, num_frames)
        return lara(q, k, v, q_landmarks, k_landmarks, **options)


def lara(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    *,
    num_frames: int,
    weighting: str,
    beta: float,
    noise: Tensor | None,
) -> Tensor:
    """lara.lara_attention, with landmarks in float32."""
    landmarks = scale_down(q_landmarks)
    means = landmarks + scale_down(k_landmarks)
    samples = means if noise is None else means + noise
    log_q = log_xi(means, samples)
    return _lara(q, k, v, samples, log_q, landmarks, num_frames, weighting, beta)


def lara_mixture(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_landmarks: Tensor,
    *,
    num_frames: int,
    weighting: str,
    beta: float,
    uniform: Tensor | None,
    noise: Tensor | None,
) -> Tensor:
    """lara.lara_mixture_attention. Drawing components makes their probabilities, [C,F*P]."""
    landmarks = scale_down(q_landmarks)
    log_totals, centres, _ = seen(landmarks, k, k, 1, False)
    if uniform is None:
        samples = landmarks + scale_down(centres.squeeze(2).float())
    else:
        logits = (landmarks.to(k.dtype) @ scale_down(k.detach()).mT).float().detach()
        chosen = take_tokens(k, draw_components(logits.softmax(-1), uniform))
        samples = landmarks + scale_down(chosen.float())
    if noise is not None:
        samples = samples + noise
    # Prop. 1, as in lara.py.
    all_seen = seen(samples, k, k, 1, True)[0].squeeze(2).unsqueeze(-1)
    log_q = log_xi(landmarks, samples) + all_seen - log_totals
    return _lara(q, k, v, samples, log_q, landmarks, num_frames, weighting, beta)


def attention_of_landmarks(landmarks: Tensor, k: Tensor) -> Tensor:
    """softmax_attention(landmarks, k, k) for few queries, in float32."""
    return seen(scale_down(landmarks), k, k, 1, False)[1].squeeze(2).float()


def _lara(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    samples: Tensor,
    log_q: Tensor,
    landmarks: Tensor,
    num_frames: int,
    weighting: str,
    beta: float,
) -> Tensor:
    own = log_q.diagonal(dim1=-2, dim2=-1)
    balance = (own - log_q.logsumexp(-1)).exp()  # [B,h,C]
    log_sums, means, _ = seen(samples, k, v, num_frames, True)
    log_sums = log_sums - own.unsqueeze(2)
    if weighting == "balance":
        # The same for all queries, so that it may stand beside what the samples saw.
        log_sums = log_sums + balance.clamp(min=SMALLEST_ALPHA).log().unsqueeze(2)
        return mix(q, samples, log_sums, means, None, None, None, None)[0]
    if weighting == "decoupled":
        gain = torch.full_like(balance, beta)
        share = torch.full_like(balance, 1 / balance.shape[-1])
    else:
        log_normal = -samples.square().sum(-1) / 2 - samples.shape[-1] * math.log(2 * math.pi) / 2
        gain, share = (own + log_normal).exp(), balance
    return mix(q, samples, log_sums, means, landmarks, balance, gain, share)[0]
