"""Each estimator against a float64 reference: outputs and gradients."""

from typing import get_args

import pytest
import torch

from slowfast_lara import attention
from slowfast_lara.attention import importance_sampling, lara, ra
from slowfast_lara.attention.landmarks import farthest_tokens, segment_means
from tests.helpers import reference
from tests.helpers.comparing import assert_close, assert_same_function
from tests.helpers.qkv import SIZES, normal, qkv


@pytest.fixture(params=SIZES, ids=str)
def sizes(request):
    return request.param


def compare(function, reference_function, inputs):
    for dtype in (torch.float64, torch.float32):
        assert_same_function(function, reference_function, inputs, dtype)


def test_softmax(sizes):
    *shape, _ = sizes
    F = shape[2]
    compare(
        lambda q, k, v: attention.softmax_attention(q, k, v, num_frames=F),
        lambda q, k, v: reference.softmax(q, k, v, F),
        qkv(*shape),
    )


def test_performer(sizes):
    *shape, C = sizes
    F = shape[2]
    projection = normal(shape[1], C, shape[4], seed=1)
    compare(
        lambda q, k, v, w: attention.performer_attention(q, k, v, w, num_frames=F),
        lambda q, k, v, w: reference.performer(q, k, v, w, F),
        [*qkv(*shape), projection],
    )


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(
    "weighting, beta", [("balance", 1.0), ("decoupled", 2.0), ("coupled", 1.0)]
)
def test_lara(sizes, weighting, beta, noisy):
    B, h, F, P, d, C = sizes
    q, k, v = qkv(B, h, F, P, d)
    landmarks = [segment_means(x, C, num_frames=F) for x in (q, k)]
    noise = normal(B, h, C, d, seed=3) if noisy else None

    def function(q, k, v, q_landmarks, k_landmarks):
        own = None if noise is None else noise.to(q.dtype)
        return attention.lara_attention(
            q,
            k,
            v,
            q_landmarks,
            k_landmarks,
            num_frames=F,
            weighting=weighting,
            beta=beta,
            noise=own,
        )

    def expected(*inputs):
        return reference.lara(*inputs, F, weighting, beta, noise)

    compare(function, expected, [q, k, v, *landmarks])


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("weighting", lara.WEIGHTINGS)
def test_lara_with_mixtures(sizes, weighting, noisy):
    B, h, F, P, d, C = sizes
    q, k, v = qkv(B, h, F, P, d)
    q_landmarks = segment_means(q, C, num_frames=F)
    component = torch.randint(F * P, (B, h, C), generator=torch.Generator().manual_seed(4))
    noise = normal(B, h, C, d, seed=3) if noisy else None

    def function(q, k, v, q_landmarks):
        if not noisy:
            uniform = None
        else:  # numbers that select exactly these components
            pi = (reference.scaled(q_landmarks) @ reference.scaled(k).mT).softmax(-1).detach()
            at = component.unsqueeze(-1)
            uniform = (pi.cumsum(-1).gather(-1, at) - pi.gather(-1, at) / 2) / pi.sum(-1, True)
        return lara.lara_mixture_attention(
            q,
            k,
            v,
            q_landmarks,
            num_frames=F,
            weighting=weighting,
            uniform=uniform,
            noise=None if noise is None else noise.to(q.dtype),
        )

    def expected(*inputs):
        chosen = component if noisy else None
        return reference.lara_mixture(*inputs, F, weighting, 1.0, chosen, noise)

    compare(function, expected, [q, k, v, q_landmarks])


@pytest.mark.parametrize("noisy", [False, True])
def test_biased_ra(sizes, noisy):
    *shape, _ = sizes
    B, h, F, P, d = shape
    noise = normal(F, B, h, F * P, d, seed=5)

    def function(q, k, v):
        draws = iter(noise.to(q.dtype))
        draw = (lambda like: next(draws)) if noisy else None
        return ra.ra_with_draws(q, k, v, num_frames=F, num_samples=1, biased=True, draw=draw)

    compare(
        function,
        lambda q, k, v: reference.ra_biased(q, k, v, F, noise if noisy else None),
        qkv(*shape),
    )
    q, k, v = qkv(*shape)
    if not noisy:
        out = attention.ra_attention(q, k, v, num_frames=F, biased=True)
        assert_close(out, function(q, k, v), 0.0)


def test_unbiased_ra_averages_over_the_drawn_components(sizes):
    """The test supplies the draws: normal numbers whose CDF selects a known key."""
    *shape, _ = sizes
    B, h, F, P, d = shape
    S = 3
    noise = normal(F, S, B, h, F * P, d, seed=5)
    component = torch.randint(P, (F, S, B, h, F * P, 1), generator=torch.Generator().manual_seed(6))

    def function(q, k, v):
        scaled_q, frames = reference.scaled(q), reference.frames(reference.scaled(k), F)
        draws = []
        for f, k_f in enumerate(frames):
            pi = (scaled_q @ k_f.mT).softmax(-1).detach().double()
            for s in range(S):
                uniform = (
                    pi.cumsum(-1).gather(-1, component[f, s]) - pi.gather(-1, component[f, s]) / 2
                )
                draws += [torch.special.ndtri(uniform).to(q.dtype), noise[f, s].to(q.dtype)]
        draws = iter(draws)
        return ra.ra_with_draws(
            q, k, v, num_frames=F, num_samples=S, biased=False, draw=lambda like: next(draws)
        )

    def expected(q, k, v):
        q, k = reference.scaled(q), reference.scaled(k)
        out = []
        for f, (k_f, v_f) in enumerate(zip(reference.frames(k, F), reference.frames(v, F))):
            samples = []
            for s in range(S):
                chosen = k_f.gather(2, component[f, s].expand(-1, -1, -1, d))
                samples.append(reference.ra_sample(q, k_f, v_f, q + chosen + noise[f, s]))
            out.append(sum(samples) / S)
        return torch.stack(out, dim=3)

    compare(function, expected, qkv(*shape))


def test_nystrom(sizes):
    B, h, F, P, d, C = sizes
    landmarks = [normal(B, h, C, d, seed=seed) for seed in (1, 2)]
    compare(
        lambda *inputs: attention.nystrom_attention(*inputs, num_frames=F),
        lambda *inputs: reference.nystrom(*inputs, F),
        [*qkv(B, h, F, P, d), *landmarks],
    )


def test_orthoformer(sizes):
    *shape, C = sizes
    F = shape[2]
    compare(
        lambda q, k, v: attention.orthoformer_attention(
            q, k, v, num_landmarks=C, num_frames=F, first_landmark=3
        ),
        lambda q, k, v: reference.orthoformer(q, k, v, C, F, 3),
        qkv(*shape),
    )


@pytest.mark.parametrize("C", [1, 3, 7, 10, 12])
def test_landmarks(C):
    x = normal(2, 3, 12, 4)
    for function in (segment_means, farthest_tokens):
        expected = getattr(reference, function.__name__)(x, C, 3)
        assert_close(function(x, C, num_frames=3), expected, 1e-12)


@pytest.mark.parametrize("landmarks", get_args(lara.Landmarks))
@pytest.mark.parametrize("proposal", get_args(lara.Proposal))
def test_lara_by_its_options(sizes, proposal, landmarks):
    *shape, C = sizes
    F, d = shape[2], shape[4]
    estimator = attention.build_estimator(
        "lara", head_dim=d, num_landmarks=C, proposal=proposal, landmarks=landmarks
    ).eval()
    compare(
        lambda q, k, v: estimator(q, k, v, num_frames=F),
        lambda q, k, v: reference.lara_module(q, k, v, C, F, proposal, landmarks),
        qkv(*shape),
    )


def test_too_many_landmarks_raise():
    q = normal(1, 1, 6, 4)
    for function in (
        lambda: segment_means(q, 7),
        lambda: attention.orthoformer_attention(q, q, q, num_landmarks=7),
        lambda: attention.build_estimator("lara", head_dim=4, num_landmarks=7)(q, q, q),
    ):
        with pytest.raises(ValueError, match="1 to 6 landmarks.*got 7"):
            function()


def test_frames_that_do_not_divide_the_tokens_raise():
    q = normal(1, 1, 7, 4)
    with pytest.raises(ValueError, match="7 tokens cannot be split into 2 equal frames"):
        attention.softmax_attention(q, q, q, num_frames=2)


def test_pseudo_inverse_converges():
    x = normal(2, 9, 9).softmax(-1)
    assert_close(attention.nystrom.pseudo_inverse(x, 30), torch.linalg.pinv(x), 1e-6)


@pytest.mark.parametrize("name", ["lara", "performer"])
@pytest.mark.parametrize("proposal", ["local", "mixture"])
def test_groups_of_heads_do_not_change_the_result(monkeypatch, name, proposal):
    """Outputs and gradients in training, with five heads in groups of two."""
    options = {"proposal": proposal} if name == "lara" else {}
    estimator = attention.build_estimator(
        name, head_dim=8, num_heads=5, num_landmarks=4, **options
    ).double()
    inputs = [x.requires_grad_() for x in qkv(2, 5, 3, 7, 8)]
    results = []
    for group in (10**9, 2 * 2 * 21 * 4):
        monkeypatch.setattr(importance_sampling, "CPU_GROUP", group)
        torch.manual_seed(1)
        out = estimator(*inputs, num_frames=3)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for whole, grouped in zip(*results):
        assert_close(grouped, whole, 1e-12)
