"""Statistical properties of the estimators that the paper claims. Seeds are fixed."""

import pytest
import torch

from slowfast_lara import attention
from slowfast_lara.attention import importance_sampling
from slowfast_lara.attention.landmarks import segment_means
from slowfast_lara.attention.lara import WEIGHTINGS, own_densities, weighted
from slowfast_lara.attention.performer import orthogonalise
from slowfast_lara.attention.samples import Samples, draw_components
from slowfast_lara.attention.tensors import scaled
from tests.helpers import reference
from tests.helpers.comparing import assert_close

DRAWS = 20_000


def qkv(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, *shape, generator=generator, dtype=torch.float64).unbind(0)


def assert_mean(draws, expected):
    """Assert that every entry's mean is within four standard errors; draws [n,...]."""
    error = draws.std(0) / len(draws) ** 0.5
    distance = ((draws.mean(0) - expected).abs() / error).max().item()
    assert distance < 4, f"{distance:.1f} standard errors from the expectation"


@pytest.mark.parametrize("num_samples", [1, 4])
def test_ra_is_unbiased(num_samples):
    q, k, v = qkv(1, 1, 6, 4)
    many = (x.expand(DRAWS, -1, -1, -1) for x in (q, k, v))
    generator = torch.Generator().manual_seed(1)
    draws = attention.ra_attention(
        *many, num_frames=2, num_samples=num_samples, generator=generator
    )
    assert_mean(draws, reference.softmax(q, k, v, 2)[0])


def test_the_mean_test_can_fail():
    """The same test rejects the smaller noise of the authors' image code."""
    q, k, v = qkv(1, 1, 6, 4)
    many = (x.expand(DRAWS, -1, -1, -1) for x in (q, k, v))
    torch.manual_seed(1)
    draws = attention.ra.ra_with_draws(
        *many,
        num_frames=2,
        num_samples=1,
        biased=False,
        draw=lambda x: torch.randn_like(x) * (1 if x.shape[-1] == 1 else 4**-0.25),
    )
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(draws, reference.softmax(q, k, v, 2)[0])


@pytest.mark.parametrize("noise, size", [(1.0, 1.0), (0.5, 0.5), ("code", 16**-0.25), (0.0, 0.0)])
@pytest.mark.parametrize(
    "name, options, spread",
    [
        ("lara", {"proposal": "local"}, 0),
        ("lara", {"proposal": "global"}, 0),
        ("lara", {"proposal": "mixture"}, 1),
        ("ra", {"biased": True}, 0),
        ("ra", {}, 1),
    ],
)
def test_training_noise_has_the_requested_size(name, options, spread, noise, size):
    """Two keys k and -k with values 1 and 0: the output is the logistic of 2 k.w.

    For a query of 0, w has mean 0. Its variance along k is that of the noise, plus that of a drawn
    key (k or -k). The standard deviation of n draws has a relative error of 1 / sqrt(2 n).
    """
    estimator = attention.build_estimator(
        name, head_dim=16, num_landmarks=1, noise=noise, **options
    ).train()
    length = 0.25  # of k, in the scaled space
    key = torch.zeros(16, dtype=torch.float64)
    key[3] = length * 16**0.25
    k = torch.stack((key, -key)).expand(DRAWS, 1, 2, 16)
    v = torch.eye(2, 16, dtype=torch.float64).expand(DRAWS, 1, 2, 16)
    torch.manual_seed(3)
    out = estimator(torch.zeros_like(k), k, v)[:, 0, 0, 0, 0]
    along = out.logit() / (2 * length)
    expected = (size**2 + spread * length**2) ** 0.5
    error = expected / (2 * DRAWS) ** 0.5
    assert abs(along.std().item() - expected) <= 4 * error + 1e-12


def test_eval_mode_has_no_noise():
    q, k, v = qkv(1, 1, 6, 16)
    for name, options in (("lara", {}), ("ra", {}), ("ra", {"biased": True})):
        outs = [
            attention.build_estimator(
                name, head_dim=16, num_landmarks=2, noise=size, **options
            ).eval()(q, k, v)
            for size in (1.0, 0.25)
        ]
        assert torch.equal(*outs)


def test_components_are_drawn_with_their_probabilities():
    probabilities = torch.tensor([0.5, 0.0, 0.125, 0.25, 0.125], dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    uniform = torch.rand(DRAWS, 1, generator=generator, dtype=torch.float64)
    index = draw_components(probabilities.expand(DRAWS, -1), uniform).squeeze(1)
    counts = torch.bincount(index, minlength=5) / DRAWS
    error = (probabilities * (1 - probabilities) / DRAWS).sqrt()
    assert ((counts - probabilities).abs() <= 4 * error).all()
    edges = draw_components(probabilities.expand(2, -1), torch.tensor([[0.0], [1.0]]).double())
    assert edges.flatten().tolist() == [0, 4]


def squared_error(out, q, k, v, num_frames):
    return (out - reference.softmax(q, k, v, num_frames)).square().mean().item()


REPEATS = 32  # heads with the same q, k, v and independent draws


def repeated_qkv():
    q, k, v = qkv(1, 1, 12, 4, seed=3)
    return [x.expand(-1, REPEATS, -1, -1) for x in (q, k, v)]


def draws_of(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def test_performer_is_consistent():
    """Eight times the samples at least halve the mean squared error over 32 repeats."""
    q, k, v = repeated_qkv()
    errors = []
    for samples in (32, 256, 2048):
        projection = draws_of(REPEATS, samples, 4)
        out = attention.performer_attention(q, k, v, projection, num_frames=3)
        errors.append(squared_error(out, q, k, v, 3))
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 2


@pytest.mark.parametrize("weighting", ["balance", "coupled"])
def test_lara_is_consistent(weighting):
    """As for Performer; several draws per proposal are repeated proposals with new noise."""
    q, k, v = repeated_qkv()
    landmarks = [segment_means(x, 4, num_frames=3) for x in (q, k)]
    errors = []
    for draws in (2, 16, 128):
        many = [x.repeat(1, 1, draws, 1) for x in landmarks]
        noise = draws_of(1, REPEATS, 4 * draws, 4)
        out = attention.lara_attention(
            q, k, v, *many, num_frames=3, weighting=weighting, noise=noise
        )
        errors.append(squared_error(out, q, k, v, 3))
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 2


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_lara_with_standard_normal_proposals_is_performer(weighting):
    q, k, v = qkv(2, 3, 10, 4)
    noise = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    zeros = torch.zeros(2, 3, 7, 4, dtype=torch.float64)
    out = attention.lara_attention(
        q, k, v, zeros, zeros, num_frames=2, weighting=weighting, noise=noise.expand(2, -1, -1, -1)
    )
    assert_close(out, attention.performer_attention(q, k, v, noise, num_frames=2), 1e-12)


def test_lara_with_a_proposal_for_each_query_and_delta_weights_is_ra():
    unscaled_q, unscaled_k, v = qkv(2, 3, 10, 4)
    q, k = scaled(unscaled_q), scaled(unscaled_k)
    generator = torch.Generator().manual_seed(7)
    component = torch.randint(10, (2, 3, 10, 1), generator=generator).expand(-1, -1, -1, 4)
    noise = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    samples = q + k.gather(2, component) + noise
    delta = torch.eye(10, dtype=torch.float64).log().expand(2, 3, 10, 10)
    statistics = importance_sampling.statistics(unscaled_q, unscaled_k, v, Samples(samples), 1)
    statistics = statistics._replace(scores=statistics.scores + delta)
    out = importance_sampling.combine_frames(statistics)
    assert_close(out.squeeze(3), reference.ra_sample(q, k, v, samples), 1e-12)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weights_sum_to_one(weighting):
    """The alphas of equal samples w_c, before the clamp, sum to one over c."""
    q, q_landmarks, k_landmarks = qkv(2, 3, 6, 4, seed=8)
    mean = q_landmarks + k_landmarks
    sample = mean[:, :, :1].expand_as(mean) + 0.3
    log_q = reference.log_normal(sample, mean) - reference.log_normal(
        sample, torch.zeros_like(mean)
    )
    if weighting == "balance":  # the common term, before the clamp
        corrected = weighted(sample, q_landmarks, *own_densities(log_q), "coupled", 2.0)
        alpha = corrected.query_weights.balance.unsqueeze(-2)
    else:
        samples = weighted(sample, q_landmarks, *own_densities(log_q), weighting, 2.0)
        alpha = importance_sampling.alpha(q, samples.query_weights)
    assert_close(alpha.sum(-1), torch.ones_like(alpha[..., 0]), 1e-12)
    expected = reference.alpha(q, q_landmarks, reference.log_normal(sample, mean), weighting, 2.0)
    assert_close(alpha.expand_as(expected), expected, 1e-12)


def smooth_field(F=4, side=12, d=16, seed=0):
    """q, k, v of tokens that resemble their neighbours in space and time."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(3 * 2 * d, 1, 2, 4, 4, generator=generator)
    field = torch.nn.functional.interpolate(coarse, size=(F, side, side), mode="trilinear")
    tokens = field.view(3, 1, 2, d, F * side * side).transpose(3, 4).double()
    return (tokens / tokens.std() * torch.tensor([1.5, 1.5, 1.0]).view(3, 1, 1, 1, 1)).unbind(0)


@pytest.mark.parametrize("num_samples", [16, 64, 256])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_error_order_of_the_papers_figure(num_samples, seed):
    """Error of biased RA below LARA, LARA below Performer."""
    q, k, v = smooth_field(seed=seed)
    errors = {}
    for name, options in (("ra", {"biased": True}), ("lara", {}), ("performer", {})):
        estimator = attention.build_estimator(
            name, head_dim=16, num_heads=2, num_landmarks=num_samples, **options
        )
        estimator = estimator.double().eval()
        errors[name] = squared_error(estimator(q, k, v, num_frames=4), q, k, v, 4)
    assert errors["ra"] < errors["lara"] < errors["performer"], errors


def test_orthogonal_samples_are_orthogonal_and_normal_in_length():
    gaussian = torch.randn(
        200, 20, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    samples = orthogonalise(gaussian)
    gram = samples[:, :8] @ samples[:, :8].mT
    assert_close(gram, torch.diag_embed(gram.diagonal(dim1=1, dim2=2)), 1e-10)
    assert_close(samples.norm(dim=-1), gaussian.norm(dim=-1), 1e-10)
    error = (2 * 8 / (200 * 20)) ** 0.5  # of the mean of |w|^2, whose variance is 2d
    assert abs(samples.square().sum(-1).mean().item() - 8) < 4 * error


def test_hyperbolic_features_are_samples_and_their_opposites():
    q, k, v = qkv(2, 3, 10, 4)
    estimator = attention.build_estimator(
        "performer", head_dim=4, num_heads=3, num_landmarks=5, features="hyperbolic"
    )
    estimator = estimator.double().eval()
    w = estimator.projection
    both = torch.cat((w, -w), dim=1)
    expected = attention.performer_attention(q, k, v, both, num_frames=2)
    assert_close(estimator(q, k, v, num_frames=2), expected, 0.0)
