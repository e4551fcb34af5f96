"""Preprocessing of Hugging Face folders against transformers' processors; the shipped configs."""

from __future__ import annotations

import json

import av
import numpy as np
import pytest
import torch
import transformers
from transformers.models.videomae.image_processing_pil_videomae import VideoMAEImageProcessorPil

import slowfast_lara
from slowfast_lara.config.load import config_of
from slowfast_lara.data import load_views
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.inference.hugging_face import config_tree
from tests.helpers.clips import CLIPS, write_clip
from tests.helpers.comparing import assert_close
from tests.helpers.videos import NEEDS_REAL_VIDEOS, real_videos

SHARED = {"do_resize": True, "do_center_crop": True, "resample": 2}
SIZES = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
# The published preprocessor_config.json of the models that the shipped configs name.
PUBLISHED = {
    "videomae": {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    "vivit": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 127.5},
    "timesformer": {"image_mean": [0.45] * 3, "image_std": [0.225] * 3},
}
CONFIGS = {
    "videomae": ("videomae_224_16x4", transformers.VideoMAEConfig),
    "vivit": ("vivit_224_32x2", transformers.VivitConfig),
    "timesformer": ("timesformer_224_8x32", transformers.TimesformerConfig),
}
over_kinds = pytest.mark.parametrize("kind", PUBLISHED)


def folder_and_processor(kind, folder, **changes):
    """A folder with the base model's config and the published processor, and this processor."""
    settings = {**SHARED, **SIZES, **PUBLISHED[kind], **changes}
    CONFIGS[kind][1]().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if kind == "vivit":
        return transformers.VivitImageProcessor(**settings)
    return VideoMAEImageProcessorPil(**settings)


def frames_at(path, choose):
    """The frames at the indices `choose(number of frames, frame rate)`, by PyAV."""
    with av.open(str(path)) as container:
        fps = float(container.streams.video[0].average_rate)
        indices = choose(sum(1 for _ in container.decode(video=0)), fps)
    wanted = set(map(int, indices))
    with av.open(str(path)) as container:
        decoded = enumerate(container.decode(video=0))
        images = {n: frame.to_ndarray(format="rgb24") for n, frame in decoded if n in wanted}
    return [images[int(n)] for n in indices]


def check_pixels(path, kind, folder, **changes):
    """Compare two clips of a video with the processor; the largest difference."""
    processor = folder_and_processor(kind, folder, **changes)
    opts = ["TEST.NUM_ENSEMBLE_VIEWS", 2, "TEST.NUM_SPATIAL_CROPS", 1]
    cfg = config_of(config_tree(str(folder)), str(folder), opts)
    largest = 0.0
    for number, view in enumerate(load_views(str(path), cfg)):
        chosen = frames_at(
            path,
            lambda count, fps, n=number: dataset_class(cfg, "TEST").view_frames(
                cfg, n, 2, count, fps
            ),
        )
        expected = torch.as_tensor(np.stack(processor(chosen)["pixel_values"][0]))
        assert_close(view.transpose(0, 1), expected, 1e-5)
        largest = max(largest, (view.transpose(0, 1) - expected).abs().max().item())
    return largest


@pytest.fixture(scope="module", params=CLIPS)
def clip(request, tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clips"), request.param)


@over_kinds
def test_pixels_equal_the_processor(tmp_path, kind, clip):
    check_pixels(clip, kind, tmp_path)


@over_kinds
def test_pixels_with_a_margin(tmp_path, kind):
    """A short side that is larger than the crop, with an odd margin."""
    path = write_clip(tmp_path, "lossless.mkv")
    check_pixels(path, kind, tmp_path, size={"shortest_edge": 257})


@NEEDS_REAL_VIDEOS
@over_kinds
@pytest.mark.parametrize("path", real_videos(), ids=lambda path: path.name)
def test_pixels_of_real_videos(tmp_path, kind, path):
    check_pixels(path, kind, tmp_path)


@pytest.mark.parametrize("frames, apart", [(8, 32), (16, 16), (96, 4)])
def test_sampling_of_timesformer(tmp_path, frames, apart):
    """The sampling rates of the releases for the base, the 448-pixel and the long model."""
    folder_and_processor("timesformer", tmp_path)
    transformers.TimesformerConfig(num_frames=frames).save_pretrained(tmp_path)
    data = config_tree(str(tmp_path))["DATA"]
    assert (data["NUM_FRAMES"], data["SAMPLING_RATE"]) == (frames, apart)


@over_kinds
def test_shipped_configs(tmp_path, kind):
    """A shipped config has the settings that `load` finds in the published folder."""
    name, _ = CONFIGS[kind]
    folder_and_processor(kind, tmp_path)
    tree, shipped = config_tree(str(tmp_path)), slowfast_lara.load_config(f"K400/{name}")
    for node in ("VIT", "TEST"):
        for key, value in tree[node].items():
            assert shipped[node][key] == value, key
    for key in ("NUM_FRAMES", "SAMPLING_RATE", "TEST_CROP_SIZE", "TEST_SHORT_SIDE", "TEST_RESIZE"):
        assert shipped.DATA[key] == tree["DATA"][key], key
    for key in ("MEAN", "STD"):
        assert shipped.DATA[key] == pytest.approx(tree["DATA"][key], abs=1e-7), key
