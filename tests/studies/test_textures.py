"""Textured sets: textures, splits, camera, and motion relative to the background."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from slowfast_lara.prepare.motions import CLASSES, ObjectPath, scene_paths, scene_time
from slowfast_lara.prepare.synthetic import SPLITS, render
from studies.textured import main, move_camera, picture_path, render_textured
from studies.textures import read_textures
from tests.helpers.runs import ROOT, finish, start
from tests.helpers.small_models import only_error
from tests.helpers.videos import NEEDS_REAL_VIDEOS, SHARED_VIDEOS, write_video

SCRIPT = str(ROOT / "studies" / "textured.py")
FEW = ("--train", "26", "--val", "3", "--test", "3", "--size", "32", "--classes", "12")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three texture videos of different sizes, and files that are not videos."""
    folder = tmp_path_factory.mktemp("textures")
    (folder / "below").mkdir()
    write_video(folder / "wide.mp4", 30, size=(64, 200))
    write_video(folder / "below" / "high.mp4", 41, size=(96, 64))
    write_video(folder / "below" / "short.avi", 2, size=(64, 64), codec="mpeg4")
    (folder / "below" / "broken.mp4").write_bytes(b"no video")
    (folder / "README.md").write_text("no video either")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_same_seed_same_bytes_for_any_number_of_processes(folder, tmp_path):
    for name, processes in (("one", "1"), ("two", "2"), ("other", "2")):
        seed = "6" if name == "other" else "5"
        arguments = ["--textures", str(folder), "--seed", seed, "--jobs", processes]
        code, _, stderr = finish(start(tmp_path / name, *FEW, *arguments, program=(SCRIPT,)))
        assert code == 0, stderr
    one = contents(tmp_path / "one")
    assert one == contents(tmp_path / "two")
    other = contents(tmp_path / "other")
    assert one.keys() == other.keys()
    videos = [name for name in one if name.endswith(".mp4")]
    assert len(videos) == 32 and all(one[name] != other[name] for name in videos)
    labels = Counter(line.split()[1] for line in one["train.csv"].decode().splitlines())
    assert len(labels) == 12 and max(labels.values()) - min(labels.values()) <= 1
    assert {len(track) for track in json.loads(one["tracks.json"]).values()} == {16}


def test_plain_sets_are_unchanged():
    """Means of pixels and tracks as in 0.2.0; any change of the random draws changes them."""
    pixels = [133.8294, 127.6386, 133.367, 137.7505, 120.4181, 114.1185]
    pixels += [134.3682, 134.6424, 126.464, 140.603, 130.1556, 127.4057]
    tracks = [23.1053, 28.9784, 17.4995, 12.5468, 25.2305, 24.6191]
    tracks += [30.3034, 33.3367, 27.0876, 18.4717, 7.8403, 25.5984]
    for number, motion in enumerate(CLASSES.values()):
        video, track = render(np.random.default_rng((5, number)), motion, 16, 48, True)
        assert abs(video.mean() - pixels[number]) < 1e-3
        assert abs(track.mean() - tracks[number]) < 1e-3


def test_few_videos_are_divided_by_time(tmp_path):
    for number in range(3):
        write_video(tmp_path / f"{number}.mp4", 50 + number, size=(48, 64))
    textures = read_textures(str(tmp_path), 16, SPLITS)
    assert {len(videos) for videos in textures.values()} == {3}
    for train, val, test in zip(*textures.values(), strict=True):
        # The helper's frames have a strip that gets brighter with every frame.
        brightness = [frames[:, :4].mean(axis=(1, 2, 3)) for frames in (train, val, test)]
        assert brightness[0].max() < brightness[1].min()
        assert brightness[1].max() < brightness[2].min()
        assert len(train) > 2 * len(test)


def test_many_videos_are_divided_by_file(tmp_path):
    for number in range(20):
        write_video(tmp_path / f"{number:02d}.mp4", 4 + number, size=(16, 24))
    textures = read_textures(str(tmp_path), 16, SPLITS)
    assert [len(textures[split]) for split in SPLITS] == [14, 3, 3]
    everything = [frames for videos in textures.values() for frames in videos]
    assert len({frames.tobytes() for frames in everything}) == 20
    assert {frames.shape[1:] for frames in everything} == {(48, 72, 3)}


def test_memory_limit(folder):
    frames = read_textures(str(folder), 64, SPLITS)["train"]
    assert sum(video.nbytes for video in frames) < 2**28
    # Textures of 3 x 600 pixels a side: few fit, but at least one per split is read.
    with pytest.raises(Exception, match="at least 600x600"):
        read_textures(str(folder), 600, SPLITS)


def fit_background(picture: np.ndarray) -> np.ndarray:
    """Planes [2, 3] through the green and the blue values of all pixels without red."""
    y, x = np.nonzero(picture[..., 0] < 10)
    terms = np.stack([x + 0.5, y + 0.5, np.ones(len(x))], axis=1)
    return np.stack([np.linalg.lstsq(terms, picture[y, x, c], rcond=None)[0] for c in (1, 2)])


def rest(rng: np.random.Generator, time: np.ndarray) -> list[ObjectPath]:
    return [ObjectPath(np.full_like(time, 0.4), np.full_like(time, 0.6), np.full_like(time, 0.12))]


@pytest.mark.parametrize("motion", [rest, *list(CLASSES.values())[:4]])
@pytest.mark.parametrize("frames", [16, 40])
def test_motion_relative_to_the_background(motion, frames):
    """Measured from pixels: the colour of the background encodes the position on it."""
    size = 64
    height, width = 3 * size, 4 * size
    ramp = np.zeros((1, height, width, 3), np.uint8)
    ramp[..., 1] = np.linspace(0, 255, width)
    ramp[..., 2] = np.linspace(0, 255, height)[:, None]
    red = np.zeros((1, height, width, 3), np.uint8)
    red[..., 0] = 255
    panned = 0.0
    for seed in range(12):
        # render_textured draws the path first.
        time = np.arange(frames) / max(frames, 16)
        path = motion(np.random.default_rng(seed), time)[0]
        video, track = render_textured(
            np.random.default_rng(seed), motion, frames, size, False, [ramp, red]
        )
        if (video[..., 0] > 100).mean() > 0.5:  # the ramp is the object, not the background
            continue
        planes = np.stack([fit_background(picture.astype(float)) for picture in video])
        homogeneous = np.concatenate([track, np.ones((frames, 1))], axis=1)
        positions = np.einsum("tck,tk->tc", planes, homogeneous)  # as colours
        positions *= np.array([width - 1, height - 1]) / 255 / size  # in picture sizes
        steps = np.diff(positions, axis=0)
        inside = (np.abs(np.diff(track, axis=0)) < size / 2).all(axis=1)
        expected = np.diff(np.stack([path.x, path.y], axis=1), axis=0)
        assert inside.sum() > frames // 2
        assert np.abs(steps - expected)[inside].max() < 0.02
        panned += np.abs(planes[-1, :, 2] - planes[0, :, 2]).sum()  # colours
        for picture, (x, y) in zip(video, track.astype(int)):
            assert picture[min(y, size - 1), min(x, size - 1), 0] > 200
    assert panned > 30  # the camera has moved


def test_camera_and_single_frames_do_not_reveal_the_class():
    """Means over 400 videos per class: opposite motions agree within four standard errors."""
    time = scene_time(16)
    for pair in np.arange(12).reshape(6, 2):
        statistics = []  # per class: [videos, statistics]
        for label in pair:
            rng = np.random.default_rng((7, label))
            draws = []
            for _ in range(400):
                paths = scene_paths(rng, list(CLASSES.values())[label], time, True)
                camera = move_camera(rng, time, 1.0)
                x, y, radius = picture_path(paths[0], camera)
                pan = (camera.x[-1] - camera.x[0], camera.y[-1] - camera.y[0])
                samples = [*x[[0, 8, 15]], *y[[0, 8, 15]], *radius[[0, 8, 15]]]
                draws.append([*pan, *np.abs(pan), camera.zoom[-1], *samples])
            statistics.append(np.array(draws))
        spread = np.sqrt(sum(one.var(axis=0) / len(one) for one in statistics))
        difference = np.abs(statistics[0].mean(axis=0) - statistics[1].mean(axis=0))
        assert (difference < 4 * spread).all()


def test_camera_strength(folder):
    textures = read_textures(str(folder), 32, SPLITS)["train"]

    def film(strength):
        return render_textured(np.random.default_rng(3), rest, 16, 32, False, textures, strength)

    (still, track), (_, half), (_, full) = (film(strength) for strength in (0.0, 0.5, 1.0))
    assert (still == still[0]).all() and (track == track[0]).all()
    np.testing.assert_allclose(np.ptp(half, axis=0), np.ptp(full, axis=0) / 2, rtol=0.1)
    assert np.ptp(full, axis=0).max() > 1


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--camera", "1.5"], "must be 0 to 1"),
        (["--camera", "nan"], "must be 0 to 1"),
        (["--size", "33"], "even number"),
    ],
)
def test_invalid_arguments(tmp_path, capsys, arguments, expected):
    assert main([str(tmp_path / "out"), *FEW, "--textures", "x", *arguments]) == 2
    assert expected in only_error(capsys) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "contains no videos"),
        (lambda folder: (folder.mkdir(), (folder / "a.mp4").write_bytes(b"x")), "no usable video"),
        (
            lambda folder: (folder.mkdir(), write_video(folder / "a.mp4", size=(24, 64))),
            "64x24 pixels; must be at least 32",
        ),
    ],
)
def test_folders_without_textures(tmp_path, capsys, make, expected):
    make(tmp_path / "in")
    assert main([str(tmp_path / "out"), *FEW, "--textures", str(tmp_path / "in")]) == 2
    assert expected in only_error(capsys) and not (tmp_path / "out").exists()


@NEEDS_REAL_VIDEOS
def test_textures_of_real_videos():
    textures = read_textures(str(SHARED_VIDEOS), 64, SPLITS)["test"]
    motion = CLASSES["approaching"]
    video, _ = render_textured(np.random.default_rng(1), motion, 16, 64, True, textures)
    assert video.std(axis=(1, 2)).mean() > 10  # not a uniform colour
