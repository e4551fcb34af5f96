"""Mixup and cutmix against their definitions, clip by clip and label by label in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slowfast_lara.config import get_cfg
from slowfast_lara.engine.mixup import NOT_MIXED, Mix, draw_mix, main_labels, mix_clips, mixed_loss

SIZES = [(8, 8), (7, 12), (1, 5)]


def node(**changes):
    mixup = get_cfg().MIXUP
    mixup.ENABLE = True
    for key, value in changes.items():
        mixup[key] = value
    return mixup


def reference_clips(clips, mix):
    """[B,C,T,H,W] by loops over everything that decides about a pixel."""
    out = np.empty(clips.shape)
    batch, _, _, height, width = clips.shape
    for i in range(batch):
        other = batch - 1 - i
        for y in range(height):
            for x in range(width):
                mine, theirs = clips[i, :, :, y, x], clips[other, :, :, y, x]
                if mix.cut is None:
                    out[i, :, :, y, x] = mix.own * mine + (1 - mix.own) * theirs
                else:
                    top, bottom, left, right = mix.cut
                    inside = top <= y < bottom and left <= x < right
                    out[i, :, :, y, x] = theirs if inside else mine
    return out


def reference_loss(logits, labels, mix, smoothing):
    """The cross-entropy to soft labels, written out."""
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


@pytest.mark.parametrize("height, width", SIZES)
@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0), (0.3, 2.0)])
@pytest.mark.parametrize("batch", [2, 5])
def test_clips_and_loss_are_those_of_the_definition(batch, alphas, height, width):
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
        assert torch.equal(clips, before)  # the loader's batch is left alone
        logits, labels = 5 * torch.randn(batch, 4), torch.randint(4, (batch,))
        for smoothing in (0.0, 0.2):
            found = mixed_loss(logits, labels, mix, smoothing).item()
            assert found == pytest.approx(
                reference_loss(logits, labels, mix, smoothing), rel=1e-5, abs=1e-6
            )


@pytest.mark.parametrize("height, width", SIZES)
def test_the_part_of_a_cut_clip_is_counted_in_pixels(height, width):
    settings = node(ALPHA=0.0)
    for seed in range(300):
        own, (top, bottom, left, right) = draw_mix(settings, height, width, seed)
        assert 0 <= top <= bottom <= height and 0 <= left <= right <= width
        covered = np.zeros((height, width))
        covered[top:bottom, left:right] = 1
        assert own == pytest.approx(1 - covered.mean(), abs=1e-12)


def test_draws_have_their_distribution():
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


def test_only_one_of_them_where_the_other_has_no_alpha():
    sums, cuts = node(CUTMIX_ALPHA=0.0, SWITCH_PROB=1.0), node(ALPHA=0.0, SWITCH_PROB=0.0)
    disabled, never = node(ENABLE=False), node(PROB=0.0)
    for seed in range(50):
        assert draw_mix(sums, 8, 8, seed).cut is None
        assert draw_mix(cuts, 8, 8, seed).cut is not None
        assert draw_mix(disabled, 8, 8, seed) == NOT_MIXED
        assert draw_mix(never, 8, 8, seed) == NOT_MIXED


def test_a_batch_that_is_not_mixed_is_the_plain_one_to_the_bit():
    clips, logits, labels = torch.randn(3, 3, 2, 4, 4), torch.randn(3, 5), torch.tensor([0, 4, 2])
    assert mix_clips(clips, NOT_MIXED) is clips
    plain = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.equal(mixed_loss(logits, labels, NOT_MIXED, 0.1), plain)
    assert torch.equal(main_labels(labels, NOT_MIXED), labels)


def test_the_label_with_the_larger_part_counts():
    labels = torch.tensor([0, 1, 2, 3])
    assert torch.equal(main_labels(labels, Mix(0.7)), labels)
    assert torch.equal(main_labels(labels, Mix(0.3)), labels.flip(0))
    assert torch.equal(main_labels(labels, Mix(0.2, (0, 1, 0, 1))), labels.flip(0))


def test_what_is_not_finite_stays_so():
    """No step is taken on it: see the head of engine/train.py."""
    logits = torch.full((2, 3), math.nan, requires_grad=True)
    loss = mixed_loss(logits, torch.tensor([0, 1]), Mix(0.6), 0.1)
    assert not loss.isfinite()
    clips = torch.zeros(2, 3, 1, 2, 2)
    clips[0] = math.inf
    assert not mix_clips(clips, Mix(0.6)).isfinite().all()
