"""The views of a test against a reference computed from all frames."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch

from slowfast_lara.data import load_views
from slowfast_lara.data.sources import list_images
from slowfast_lara.errors import DecodeError
from tests.helpers.videos import (
    NEEDS_REAL_VIDEOS,
    config,
    decode_all,
    real_videos,
    write_image,
    write_video,
)


def reference_views(frames, fps, cfg) -> torch.Tensor:
    """Every view from all frames, in torch."""
    data, views, size = cfg.DATA, cfg.TEST.NUM_ENSEMBLE_VIEWS, cfg.DATA.TEST_CROP_SIZE
    video = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float()
    clip_frames = data.NUM_FRAMES * data.SAMPLING_RATE * fps / data.TARGET_FPS
    result = []
    for clip in range(views):
        start = max(len(frames) - clip_frames, 0) * clip / views
        index = torch.linspace(start, start + clip_frames - 1, data.NUM_FRAMES)
        picked = video[index.clamp(0, len(frames) - 1).long()]
        height, width = picked.shape[2:]
        scale = size / min(height, width)
        picked = torch.nn.functional.interpolate(
            picked,
            (
                max(size, math.floor(height * scale + 1e-9)),
                max(size, math.floor(width * scale + 1e-9)),
            ),
            mode="bilinear",
            align_corners=False,
        )
        height, width = picked.shape[2:]
        middle_y, middle_x = math.ceil((height - size) / 2), math.ceil((width - size) / 2)
        for share in (0, 1, 2) if cfg.TEST.NUM_SPATIAL_CROPS == 3 else (1,):
            y = (0, middle_y, height - size)[share] if height > width else middle_y
            x = (0, middle_x, width - size)[share] if height <= width else middle_x
            crop = picked[:, :, y : y + size, x : x + size] / 255
            mean, std = torch.tensor(data.MEAN), torch.tensor(data.STD)
            result.append(((crop.permute(0, 2, 3, 1) - mean) / std).permute(3, 0, 1, 2))
    return torch.stack(result)


def check(path, cfg):
    views, expected = load_views(path, cfg), reference_views(*decode_all(path), cfg)
    assert views.dtype == torch.float32 and views.shape == expected.shape
    # Only rounding to integer pixel values may differ.
    difference = (views - expected).abs() * torch.tensor(cfg.DATA.STD).view(3, 1, 1, 1) * 255
    assert difference.mean() < 0.5 and difference.amax() <= 1.5


@pytest.mark.parametrize(
    "options",
    [
        {"size": (48, 64)},
        {"size": (64, 48)},
        {"size": (56, 56)},
        {"frames": 1},
        {"frames": 5},
        {"fps": 25},
        {"fps": 12},
        {"frames": 90, "size": (40, 200)},
        {"pts": np.cumsum([20, 55, 35, 20, 80] * 8).tolist()},
    ],
    ids=str,
)
@pytest.mark.parametrize("crops", [1, 3])
def test_views_equal_the_reference(tmp_path, options, crops):
    path = write_video(tmp_path / "a.mp4", **options)
    check(path, config(TEST__NUM_SPATIAL_CROPS=crops, TEST__NUM_ENSEMBLE_VIEWS=4))


@NEEDS_REAL_VIDEOS
@pytest.mark.parametrize("path", real_videos(), ids=lambda path: path.name)
def test_views_of_real_videos(path):
    check(
        path,
        config(
            DATA__NUM_FRAMES=16,
            DATA__SAMPLING_RATE=4,
            DATA__TEST_CROP_SIZE=112,
            TEST__NUM_ENSEMBLE_VIEWS=10,
        ),
    )


def test_statistics_and_channel_order(tmp_path):
    path = write_video(tmp_path / "a.mp4")
    cfg = config(DATA__MEAN=[0.1, 0.2, 0.3], DATA__STD=[0.5, 0.25, 0.2])
    check(path, cfg)
    rgb = load_views(path, cfg)
    cfg.DATA.REVERSE_INPUT_CHANNEL = True
    assert torch.equal(load_views(path, cfg), rgb.flip(1))


def test_more_decoding_threads_give_the_same(tmp_path):
    path, cfg = write_video(tmp_path / "a.mp4", options={"bf": "3"}), config()
    one = load_views(path, cfg)
    cfg.DATA_LOADER.ENABLE_MULTI_THREAD_DECODE = True
    assert torch.equal(load_views(path, cfg), one)


def test_results_do_not_share_memory(tmp_path):
    paths = [write_video(tmp_path / f"{frames}.mp4", frames) for frames in (20, 30, 40, 50)]
    cfg = config()
    expected = [load_views(path, cfg).clone() for path in paths]
    kept = [load_views(path, cfg) for path in paths]
    slices = [load_views(path, cfg)[3:5, :, 2] for path in paths]  # keep their memory alive
    load_views(paths[0], cfg)
    for views, part, right in zip(kept, slices, expected):
        assert torch.equal(views, right) and torch.equal(part, right[3:5, :, 2])


def test_ssv2_views_of_video_and_frames(tmp_path):
    path = write_video(tmp_path / "a.mp4", frames=33)
    frames, _ = decode_all(path)
    folder = tmp_path / "frames"
    folder.mkdir()
    for number, frame in enumerate(frames):  # names in natural order
        write_image(folder / f"{number}.png", frame)
    cfg = config(TEST__DATASET="ssv2")
    views = load_views(path, cfg)
    assert torch.equal(load_views(folder, cfg), views)
    centres = views[1::3]  # 10 views, all different
    assert len({view.numpy().tobytes() for view in centres}) == 10


def test_errors_are_one_line_with_the_path(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "images").mkdir()
    write_image(tmp_path / "images" / "1.png")
    for name in ("absent.mp4", "empty"):
        for dataset in ("Kinetics", "Ssv2"):
            with pytest.raises(DecodeError) as caught:
                load_views(tmp_path / name, config(TEST__DATASET=dataset))
            assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(DecodeError):
        load_views("a\0b", config())
    with pytest.raises(DecodeError, match="images: is a folder; Kinetics"):
        load_views(tmp_path / "images", config())


def test_images_are_listed_by_number(tmp_path):
    for name in ("2.jpg", "10.jpg", "1.JPG", "notes.txt", "._1.JPG"):
        (tmp_path / name).touch()
    assert [path.rsplit("/")[-1] for path in list_images(str(tmp_path))] == [
        "1.JPG",
        "2.jpg",
        "10.jpg",
    ]
    shutil.rmtree(tmp_path)
    with pytest.raises(DecodeError, match="No such file"):
        list_images(str(tmp_path))
