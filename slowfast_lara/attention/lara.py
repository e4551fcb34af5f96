"""LARA: linear randomized attention.

Zheng et al., "Linear Complexity Randomized Self-attention Mechanism", ICML 2022, sec. 4 and
appendix G.3. The C proposals q_c are built from landmarks q~_c of the queries and k~_c of the keys.
One sample w_c of each proposal is shared by all queries and frames. Each query gives the samples
weights of its own (multiple importance sampling), except with the weighting "balance", which gives
all queries the same weights. In the scaled space, the weights in the estimate of
importance_sampling.py are

    a'_nc = alpha_nc N(w_c;0,I) / q_c(w_c)

In eval mode w_c is the mean of q_c. alpha_nc (samples.py) is clamped at 1e-8, because its
query-dependent term may be negative. The paper's equation of the "mixed" proposal has a wrong
index. This file follows the paper's text, which sums over the key landmarks.

Shapes: B batch, h heads, N queries, F frames, P tokens of a frame, C landmarks, d head size. The
element (c, j) of `log_q` [B,h,C,C] is log(q_j(w_c) / N(w_c;0,I)).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn

from slowfast_lara.attention.importance_sampling import estimate, log_xi
from slowfast_lara.attention.kernels.choice import Kernels
from slowfast_lara.attention.kernels.key_stats import key_stats
from slowfast_lara.attention.kernels.landmarks import landmarks as triton_landmarks
from slowfast_lara.attention.kernels.proposals import proposals as triton_proposals
from slowfast_lara.attention.landmarks import farthest_tokens, segment_means
from slowfast_lara.attention.registry import Estimator, register
from slowfast_lara.attention.samples import (
    MIN_ALPHA,
    Noise,
    QueryWeights,
    Samples,
    draw_components,
    noise_scale,
)
from slowfast_lara.attention.softmax import softmax_attention
from slowfast_lara.attention.tensors import gather_tokens, scaled, to_float32, without_autocast

Proposal = Literal["local", "global", "mixed", "mixture", "single"]
Landmarks = Literal["means", "farthest"]
Weighting = Literal["balance", "coupled", "decoupled"]
WEIGHTINGS = get_args(Weighting)


def lara_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    *,
    num_frames: int = 1,
    weighting: Weighting = "decoupled",
    beta: float = 1.0,
    noise: Tensor | None = None,
    kernels: Kernels = "torch",
) -> Tensor:
    """LARA with proposals N(q~_c + k~_c, I) in the scaled space.

    q [B,h,N,d]; k, v [B,h,F*P,d]; landmarks and noise [B,h,C,d] -> [B,h,N,F,d]. q, k and the
    landmarks are passed unscaled. `noise` is added to the scaled samples; None means no noise.
    """

    def samples(
        k: Tensor, triton: bool, q_landmarks: Tensor, k_landmarks: Tensor, noise: Tensor | None
    ) -> Samples:
        if triton:
            w, q_landmarks, log_own, balance = triton_proposals(q_landmarks, k_landmarks, noise)
            return weighted(w, q_landmarks, log_own, balance, weighting, beta)
        q_landmarks = scaled(q_landmarks)
        mu = q_landmarks + scaled(k_landmarks)
        w = mu if noise is None else mu + noise
        return weighted(w, q_landmarks, *own_densities(log_xi(mu, w)), weighting, beta)

    given = (q_landmarks, k_landmarks, noise)
    return estimate(samples, q, k, v, *given, num_frames=num_frames, kernels=kernels)


def lara_mixture_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_landmarks: Tensor,
    *,
    num_frames: int = 1,
    weighting: Weighting = "decoupled",
    beta: float = 1.0,
    uniform: Tensor | None = None,
    noise: Tensor | None = None,
    kernels: Kernels = "torch",
) -> Tensor:
    """LARA with the Gaussian mixtures sum_m softmax_m(q~_c.k_m) N(q~_c + k_m, I) over all keys m.

    This is in the scaled space; q, k and the landmarks are passed unscaled. `uniform` [B,h,C,1] in
    [0, 1) selects a component of each mixture, and its mean is the sample; None means the mean of
    the mixture. `noise` [B,h,C,d] is added to the scaled samples; None means no noise.
    """

    def samples(
        k: Tensor, triton: bool, q_landmarks: Tensor, uniform: Tensor | None, noise: Tensor | None
    ) -> Samples:
        k, q_landmarks = scaled(to_float32(k)), scaled(q_landmarks)
        logits = q_landmarks @ k.mT  # [B,h,C,F*P]
        if uniform is None:
            w = q_landmarks + logits.softmax(-1) @ k
        else:
            w = q_landmarks + gather_tokens(k, draw_components(logits.softmax(-1), uniform))
        if noise is not None:
            w = w + noise
        # Prop. 1: the mixture's density is N(w;0,I) xi(q~,w) sum_m xi(k_m,w) / sum_m exp(q~.k_m).
        # log_q is the log of the ratio of this density to N(w;0,I).
        log_sums = log_xi(k, w).logsumexp(-1).unsqueeze(-1)
        log_q = log_xi(q_landmarks, w) + log_sums - logits.logsumexp(-1).unsqueeze(-2)
        return weighted(w, q_landmarks, *own_densities(log_q), weighting, beta)

    given = (q_landmarks, uniform, noise)
    return estimate(samples, q, k, v, *given, num_frames=num_frames, kernels=kernels)


def own_densities(log_q: Tensor) -> tuple[Tensor, Tensor]:
    """log(q_c(w_c) / N(w_c;0,I)), and the balance heuristic q_c(w_c) / sum_j q_j(w_c)."""
    log_own = log_q.diagonal(dim1=-2, dim2=-1)
    return log_own, (log_own - log_q.logsumexp(-1)).exp()


def weighted(
    w: Tensor,
    q_landmarks: Tensor,
    log_own: Tensor,
    balance: Tensor,
    weighting: Weighting,
    beta: float,
) -> Samples:
    """The samples w with their weights; `log_own` and `balance` are results of `own_densities`.

    If all w_c are equal, alpha_nc before the clamp sums to 1 over c, as the method requires.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting is {weighting!r}; must be one of {', '.join(WEIGHTINGS)}")
    if weighting == "balance":
        return Samples(w, balance.clamp(min=MIN_ALPHA).log() - log_own)
    if weighting == "decoupled":
        gain = torch.full_like(balance, beta)
        shares = torch.full_like(balance, 1 / balance.shape[-1])
    else:
        log_normal = -w.square().sum(-1) / 2 - w.shape[-1] * math.log(2 * math.pi) / 2
        gain, shares = (log_own + log_normal).exp(), balance  # the gain is q_c(w_c)
    return Samples(w, -log_own, QueryWeights(q_landmarks, balance, gain, shares))


@register("lara")
class LaraAttention(Estimator):
    landmarks_are_tokens = True

    def __init__(
        self,
        *,
        head_dim: int,
        num_landmarks: int,
        proposal: Annotated[
            Proposal,
            "the C proposals; local: N(q~_c + k~_c, I) with landmarks q~_c and k~_c of queries and "
            "keys; global: with the attention of q~_c over all keys instead of k~_c; mixed: with "
            "the attention of k~_c over the key landmarks instead of k~_c; mixture: a Gaussian "
            "mixture around each q~_c; single: one mixture around the mean of all queries",
        ] = "local",
        landmarks: Annotated[
            Landmarks,
            "landmarks of the C segments of tokens; means: the mean of each segment, as in the "
            "paper; farthest: the token of each segment that is farthest from the mean; unused by "
            "the proposal single",
        ] = "means",
        weighting: Annotated[
            Weighting,
            "weights of the samples; balance: the balance heuristic; coupled: the balance "
            "heuristic plus a term for each query, scaled by the proposal's density; decoupled: "
            "the balance heuristic plus a similar term, scaled by beta",
        ] = "decoupled",
        beta: Annotated[
            float,
            "factor of the term for each query in the decoupled weighting; the paper found 2 "
            "slightly better than 1",
        ] = 1.0,
        learned: Annotated[
            bool, "apply a linear layer and LayerNorm, shared by all heads, to the landmarks"
        ] = False,
        noise: Noise = 1.0,
        kernels: Kernels = "auto",
    ) -> None:
        super().__init__()
        self.num_landmarks, self.proposal, self.landmarks = num_landmarks, proposal, landmarks
        self.kernels, self.kernel_sizes = kernels, (head_dim, num_landmarks)
        self.weighting, self.beta, self.noise = weighting, beta, noise_scale(noise, head_dim)
        self.project_q, self.project_k = (
            nn.Sequential(nn.Linear(head_dim, head_dim), nn.LayerNorm(head_dim))
            if wanted
            else nn.Identity()
            for wanted in (learned, learned and proposal in ("local", "mixed"))
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        with without_autocast(q.device.type):
            kernels = self.chosen_kernels(q, k, v, num_frames)
            triton = kernels == "triton"
            q_landmarks = self._query_landmarks(q, num_frames, triton)
            noise = torch.randn_like(q_landmarks) * self.noise if self.training else None
            options: dict[str, Any] = {
                "num_frames": num_frames,
                "weighting": self.weighting,
                "beta": self.beta,
                "kernels": kernels,
            }
            if self.proposal in ("mixture", "single"):
                uniform = torch.rand_like(q_landmarks[..., :1]) if self.training else None
                return lara_mixture_attention(
                    q, k, v, q_landmarks, uniform=uniform, noise=noise, **options
                )
            k_landmarks = self._key_landmarks(q_landmarks, k, num_frames, triton)
            return lara_attention(q, k, v, q_landmarks, k_landmarks, noise=noise, **options)

    def _query_landmarks(self, q: Tensor, num_frames: int, triton: bool) -> Tensor:
        """Query landmarks q~ [B,h,C,d], in float32 for half-precision queries."""
        if self.proposal == "single":
            mean = to_float32(q).mean(2, keepdim=True)
            return self.project_q(mean.expand(-1, -1, self.num_landmarks, -1))
        return self.project_q(self._segment_landmarks(q, num_frames, triton))

    def _key_landmarks(
        self, q_landmarks: Tensor, k: Tensor, num_frames: int, triton: bool
    ) -> Tensor:
        """Key landmarks k~ [B,h,C,d], in float32 for half-precision keys."""
        if self.proposal == "global":
            if triton:
                _, means, remainder, _ = key_stats(scaled(q_landmarks), k, None, 1)
                # The means are part of an exponent: add back the remainder that rounding removed.
                means = means if remainder.numel() == 0 else means.float() + remainder
                return means.squeeze(2)
            k = to_float32(k)
            return softmax_attention(q_landmarks, k, k).squeeze(3)
        landmarks = self.project_k(self._segment_landmarks(k, num_frames, triton))
        if self.proposal == "mixed":
            return softmax_attention(landmarks, landmarks, landmarks).squeeze(3)
        return landmarks

    def _segment_landmarks(self, x: Tensor, num_frames: int, triton: bool) -> Tensor:
        farthest = self.landmarks == "farthest"
        if triton:
            return triton_landmarks(x, self.num_landmarks, num_frames, farthest)[0]
        function = farthest_tokens if farthest else segment_means
        return function(x, self.num_landmarks, num_frames=num_frames)
