from __future__ import annotations

import numpy as np
import pytest
import torch
from fvcore.common.config import CfgNode
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from slowfast_lara.config import load_config
from slowfast_lara.data import rand_augment, transforms
from slowfast_lara.data.rand_augment import RandAugment
from slowfast_lara.errors import ConfigError
from tests.helpers.videos import REPOSITORY


@pytest.fixture
def clip():
    rng = np.random.default_rng(0)
    coarse = rng.integers(20, 220, (3, 6, 5, 3))
    noise = rng.integers(0, 30, (3, 36, 40, 3))
    return (np.kron(coarse, np.ones((1, 6, 8, 1), int)) + noise).astype(np.uint8)


ONE_SIDED, SYMMETRIC = rand_augment.operations(increasing=True)


def by_pil(clip, change):
    return np.stack([np.asarray(change(Image.fromarray(frame))) for frame in clip])


@pytest.mark.parametrize("factor", [0.1, 0.6, 1, 1.4, 1.9])
@pytest.mark.parametrize(
    "ours, theirs",
    [
        (transforms.brightness, ImageEnhance.Brightness),
        (transforms.contrast, ImageEnhance.Contrast),
        (transforms.saturation, ImageEnhance.Color),
        (rand_augment.sharpness, ImageEnhance.Sharpness),
    ],
)
def test_enhancements_are_those_of_pillow(clip, ours, theirs, factor):
    expected = by_pil(clip, lambda image: theirs(image).enhance(factor))
    assert np.abs(ours(clip, factor).astype(int) - expected).max() <= 2


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (rand_augment.auto_contrast, ImageOps.autocontrast),
        (rand_augment.equalize, ImageOps.equalize),
        (lambda clip: ONE_SIDED["invert"](clip, 1.0), ImageOps.invert),
        (lambda clip: rand_augment.posterize(clip, 3), lambda image: ImageOps.posterize(image, 3)),
        (
            lambda clip: rand_augment.solarize(clip, 100),
            lambda image: ImageOps.solarize(image, 100),
        ),
    ],
    ids=["auto_contrast", "equalize", "invert", "posterize", "solarize"],
)
def test_operations_are_those_of_pillow(clip, ours, theirs):
    assert np.abs(ours(clip).astype(int) - by_pil(clip, theirs)).max() <= 1


@pytest.mark.parametrize(
    "ours, matrix",
    [
        (lambda clip: SYMMETRIC["translate_x"](clip, 0.25 / 0.45), (1, 0, 10, 0, 1, 0)),
        (lambda clip: SYMMETRIC["translate_y"](clip, -0.25 / 0.45), (1, 0, 0, 0, 1, -9)),
        (lambda clip: rand_augment.rotate(clip, 90), None),
    ],
    ids=["translate_x", "translate_y", "rotate"],
)
def test_translations_and_rotation(clip, ours, matrix):
    if matrix is None:
        square, expected = clip[:, :36, :36], np.rot90(clip[:, :36, :36], 1, (1, 2))
        assert np.abs(ours(square).astype(int) - expected).max() <= 1
        return
    expected = by_pil(
        clip,
        lambda image: image.transform(
            image.size, Image.AFFINE, matrix, fillcolor=rand_augment.FILL
        ),
    )
    assert np.abs(ours(clip).astype(int) - expected).max() <= 1


def test_flat_frames_do_not_change():
    flat = np.full((2, 8, 8, 3), 77, np.uint8)
    assert np.array_equal(rand_augment.auto_contrast(flat), flat)
    assert np.array_equal(rand_augment.equalize(flat), flat)


@pytest.mark.parametrize(
    "spec", ["rand-m20-n2-mstd0.5-inc", "rand-m9-n3", "rand-m0-n15-inc", "rand-m4.5-n2-mstd2"]
)
def test_the_same_draw_on_all_frames(spec, clip):
    same = np.repeat(clip[:1], 4, axis=0)
    augment, changed = RandAugment(spec), 0
    for seed in range(60):
        result = augment(same, np.random.default_rng(seed))
        assert result.shape == same.shape and result.dtype == np.uint8
        assert (result == result[:1]).all()
        changed += not np.array_equal(result, same)
        assert np.array_equal(result, augment(same, np.random.default_rng(seed)))
    assert changed > 10


def test_stronger_operations_change_more(clip):
    assert len(ONE_SIDED) + len(SYMMETRIC) == 15
    for name in (
        "posterize",
        "solarize",
        "color",
        "contrast",
        "brightness",
        "sharpness",
        "rotate",
        "shear_x",
        "shear_y",
        "translate_x",
        "translate_y",
        "solarize_add",
    ):
        operation = {**ONE_SIDED, **SYMMETRIC}[name]
        weak, strong = (np.abs(operation(clip, s).astype(int) - clip).mean() for s in (0.1, 1.0))
        assert strong > weak


@pytest.mark.parametrize("spec", ["augmix-m3", "rand-m1..5-n2", "rand-m9-n2-mstd0.5-inc-x", ""])
def test_unknown_notation(spec):
    expected = f"{spec!r}; must be of the form rand-m<magnitude>-n<operations>"
    with pytest.raises(ValueError, match=expected):
        RandAugment(spec)
    with pytest.raises(ConfigError, match=expected):
        load_config(REPOSITORY / "configs/quick/lara.yaml", ["DATA.RAND_AUGMENT", spec])


def test_color_jitter_changes_within_bounds(clip):
    results = [transforms.color_jitter(clip, np.random.default_rng(seed)) for seed in range(20)]
    assert len({result.tobytes() for result in results}) == 20
    grey = np.full((1, 8, 8, 3), 100, np.uint8)
    values = [transforms.color_jitter(grey, np.random.default_rng(seed)) for seed in range(50)]
    assert min(map(np.min, values)) >= 59 and max(map(np.max, values)) <= 141


@pytest.mark.parametrize("inverse", [False, True])
def test_short_side(inverse):
    rng = np.random.default_rng(0)
    sides = [transforms.draw_short_side(rng, 256, 320, inverse) for _ in range(4000)]
    assert min(sides) == 256 and max(sides) == 320
    expected = 2 / (1 / 256 + 1 / 320) if inverse else 288  # the median
    assert abs(np.median(sides) - expected) < 2


@pytest.mark.parametrize("height, width", [(256, 340), (340, 256), (33, 47), (7, 5), (1, 1)])
def test_random_regions_are_inside_the_frame(height, width):
    regions = set()
    for seed in range(300):
        for region in (
            transforms.jittered_crop(height, width, 224, 256 + seed % 65, seed),
            transforms.resized_crop(height, width, 224, seed),
        ):
            assert region.top >= 0 and region.top + region.height <= height
            assert region.left >= 0 and region.left + region.width <= width
            assert min(region.height, region.width) >= 1
            assert (region.out_height, region.out_width) == (224, 224)
            regions.add(region)
    assert len(regions) > 100 or height * width < 100
    tight = {transforms.jittered_crop(10, 12, 10, 10, seed)[1] for seed in range(50)}
    assert tight == {0, 1, 2}  # both ends are reached


def test_normalize_is_exact(clip):
    statistics = {"MEAN": [0.1, 0.2, 0.3], "STD": [0.5, 0.4, 0.3]}
    data = CfgNode({**statistics, "REVERSE_INPUT_CHANNEL": False})
    normalized = transforms.Normalize(data)(clip[:, ::-1, ::-1])
    pixels = torch.from_numpy(clip[:, ::-1, ::-1].copy()).double() / 255
    expected = (pixels - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor([0.5, 0.4, 0.3])
    assert torch.allclose(normalized.double(), expected.permute(3, 0, 1, 2), atol=1e-6)


def test_pillow_has_the_same_smoothing():
    """The kernel of `sharpness` is Pillow's."""
    assert ImageFilter.SMOOTH.filterargs[1] == 13
