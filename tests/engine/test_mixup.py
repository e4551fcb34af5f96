"""Mixup and CutMix against float64 references, pixel by pixel and label by label."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slowfast_lara.config import get_cfg
from slowfast_lara.engine.metrics import classification_loss
from slowfast_lara.engine.mixup import NOT_MIXED, Mix, draw_mix, main_labels, mix_clips, mixed_loss
from slowfast_lara.labels import LabelKind
from tests.helpers.mixup_reference import reference_clips

SIZES = [(8, 8), (7, 12), (1, 5)]


def node(**changes):
    mixup = get_cfg().MIXUP
    mixup.ENABLE = True
    for key, value in changes.items():
        mixup[key] = value
    return mixup


def reference_loss(logits, labels, mix, smoothing):
    """Compute the cross-entropy with soft labels."""
    logits, classes = logits.double().numpy(), logits.shape[1]
    total = 0.0
    for i, row in enumerate(logits):
        target = np.full(classes, smoothing / classes)
        target[labels[i]] += (1 - smoothing) * mix.own
        target[labels[len(labels) - 1 - i]] += (1 - smoothing) * (1 - mix.own)
        assert target.sum() == pytest.approx(1)
        log_softmax = row - row.max() - math.log(np.exp(row - row.max()).sum())
        total -= (target * log_softmax).sum()
    return total / len(labels)


def cross_entropy(logits, smoothing):
    kind = LabelKind({"": logits.shape[1]})
    return lambda labels: classification_loss(logits, labels, kind, smoothing)


@pytest.mark.parametrize("height, width", SIZES)
@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0), (0.3, 2.0)])
@pytest.mark.parametrize("batch", [2, 5])
def test_clips_and_loss_equal_the_reference(batch, alphas, height, width):
    torch.manual_seed(0)
    settings = node(ALPHA=alphas[0], CUTMIX_ALPHA=alphas[1])
    for seed in range(6):
        mix = draw_mix(settings, height, width, seed)
        clips = torch.randn(batch, 3, 2, height, width)
        before = clips.clone()
        torch.testing.assert_close(
            mix_clips(clips, mix).double(),
            torch.from_numpy(reference_clips(clips.double().numpy(), mix)),
            atol=1e-6,
            rtol=0,
        )
        assert torch.equal(clips, before)  # the batch of the loader is not changed
        logits, labels = 5 * torch.randn(batch, 4), torch.randint(4, (batch,))
        for smoothing in (0.0, 0.2):
            found = mixed_loss(cross_entropy(logits, smoothing), labels, mix).item()
            assert found == pytest.approx(
                reference_loss(logits, labels, mix, smoothing), rel=1e-5, abs=1e-6
            )


@pytest.mark.parametrize("height, width", SIZES)
def test_the_share_of_a_cut_clip_is_its_share_of_pixels(height, width):
    settings = node(ALPHA=0.0)
    for seed in range(300):
        own, (top, bottom, left, right) = draw_mix(settings, height, width, seed)
        assert 0 <= top <= bottom <= height and 0 <= left <= right <= width
        covered = np.zeros((height, width))
        covered[top:bottom, left:right] = 1
        assert own == pytest.approx(1 - covered.mean(), abs=1e-12)


def test_draws_follow_their_distribution():
    """4,000 draws; the bounds are four standard errors."""
    settings = node(PROB=0.7, SWITCH_PROB=0.25, ALPHA=0.4)
    drawn = [draw_mix(settings, 16, 16, seed) for seed in range(4000)]
    mixed = [mix for mix in drawn if mix != NOT_MIXED]
    assert len(mixed) / 4000 == pytest.approx(0.7, abs=4 * math.sqrt(0.7 * 0.3 / 4000))
    cuts = sum(mix.cut is not None for mix in mixed) / len(mixed)
    assert cuts == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / len(mixed)))
    sums = np.array([mix.own for mix in mixed if mix.cut is None])
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1)).
    variance = 1 / (4 * (2 * 0.4 + 1))
    assert sums.mean() == pytest.approx(0.5, abs=4 * math.sqrt(variance / len(sums)))
    fourth = ((sums - 0.5) ** 4).mean()
    error = math.sqrt((fourth - variance**2) / len(sums))
    assert sums.var() == pytest.approx(variance, abs=4 * error)


def test_an_alpha_of_zero_disables_mixup_or_cutmix():
    sums, cuts = node(CUTMIX_ALPHA=0.0, SWITCH_PROB=1.0), node(ALPHA=0.0, SWITCH_PROB=0.0)
    disabled, never = node(ENABLE=False), node(PROB=0.0)
    for seed in range(50):
        assert draw_mix(sums, 8, 8, seed).cut is None
        assert draw_mix(cuts, 8, 8, seed).cut is not None
        assert draw_mix(disabled, 8, 8, seed) == NOT_MIXED
        assert draw_mix(never, 8, 8, seed) == NOT_MIXED


def test_an_unmixed_batch_is_unchanged_to_the_bit():
    clips, logits, labels = torch.randn(3, 3, 2, 4, 4), torch.randn(3, 5), torch.tensor([0, 4, 2])
    assert mix_clips(clips, NOT_MIXED) is clips
    plain = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.equal(mixed_loss(cross_entropy(logits, 0.1), labels, NOT_MIXED), plain)
    assert torch.equal(main_labels(labels, NOT_MIXED), labels)


def test_the_main_label_has_the_larger_share():
    labels = torch.tensor([0, 1, 2, 3])
    assert torch.equal(main_labels(labels, Mix(0.7)), labels)
    assert torch.equal(main_labels(labels, Mix(0.3)), labels.flip(0))
    assert torch.equal(main_labels(labels, Mix(0.2, (0, 1, 0, 1))), labels.flip(0))


def test_values_that_are_not_finite_stay_so():
    """The optimiser skips such a step: see engine/train.py."""
    logits = torch.full((2, 3), math.nan, requires_grad=True)
    loss = mixed_loss(cross_entropy(logits, 0.1), torch.tensor([0, 1]), Mix(0.6))
    assert not loss.isfinite()
    clips = torch.zeros(2, 3, 1, 2, 2)
    clips[0] = math.inf
    assert not mix_clips(clips, Mix(0.6)).isfinite().all()
