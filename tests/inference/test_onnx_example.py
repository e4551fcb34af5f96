"""The example script of ONNX exports reads the same clip as the package."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from slowfast_lara.data import load_views
from slowfast_lara.data.transforms import pixels_of
from slowfast_lara.inference.export_folder import description_of
from tests.helpers.clips import CLIPS, write_clip
from tests.helpers.comparing import assert_close
from tests.helpers.pictures import write_pictures, write_with_cover
from tests.helpers.videos import config

onnx_example = pytest.importorskip("slowfast_lara.inference.onnx_example")

VARIABLE = {"frames": 35, "milliseconds": np.cumsum([20, 70, 35, 50, 25] * 7).tolist()}
VIDEOS: dict[str, dict] = {
    "plain.mp4": {},
    "rotated.mov": {"turn": 270},
    "mirrored.mp4": {"turn": 90, "mirror": True},
    "upside_down.mp4": {"turn": 180, "mirror": True},
    "flipped.mp4": {"mirror": True},
    "wide_pixels.mp4": {"pixel_aspect": Fraction(4, 3), "turn": 90},
    "tall_pixels.mkv": {"pixel_aspect": Fraction(8, 9)},
    "variable_rate.mp4": VARIABLE,
    "rate_of_a_tick.avi": VARIABLE,
    "no_rate.mpg": VARIABLE,
    # Side data (EXIF) of a type that PyAV 18 does not define.
    "unknown_side_data.mov": {"codec": "tiff", "pix_fmt": "rgb24", "turn": 90},
}


def check(path: Path, dataset: str, resize: str = "opencv", short_side: int = 0) -> None:
    cfg = config(
        TEST__DATASET=dataset,
        TEST__NUM_ENSEMBLE_VIEWS=1,
        TEST__NUM_SPATIAL_CROPS=1,
        DATA__SAMPLING_RATE=3,
        DATA__TEST_RESIZE=resize,
        DATA__TEST_SHORT_SIDE=short_side,
    )
    spec = description_of(cfg, ["a"] * 12, "onnx")["input"]
    (found,), (expected,) = onnx_example.read_clip(str(path), spec), load_views(path, cfg)
    views = (torch.from_numpy(found), expected)
    if resize == "pillow":
        assert_close(*views, 1e-5)
    images = [pixels_of(view, cfg).astype(int) for view in views]
    # OpenCV scales with integers, the example with floats.
    assert np.abs(images[0] - images[1]).max() <= 2


@pytest.mark.parametrize("dataset", ["Kinetics", "Ssv2"])
@pytest.mark.parametrize("name", VIDEOS)
def test_example_reads_the_view_of_a_test(tmp_path, name, dataset):
    check(write_pictures(tmp_path / name, **VIDEOS[name]), dataset)


@pytest.mark.parametrize("name", CLIPS)
def test_short_side_and_resizing(tmp_path, name):
    """Pillow's resizing, as in models of Hugging Face, is the same to the last level."""
    path = write_clip(tmp_path, name)
    for short_side in (0, 43, 300):
        check(path, "Kinetics", "pillow", short_side)
    check(path, "Kinetics", "opencv", 43)


@pytest.mark.parametrize("dataset", ["Kinetics", "Ssv2"])
def test_a_cover_picture_is_not_the_video(tmp_path, dataset):
    path = write_with_cover(tmp_path / "a.mp4")
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "mjpeg"
    check(path, dataset)
