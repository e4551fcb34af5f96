"""A synthetic set of real pixels: textures, splits, and objects that move over the background."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from slowfast_lara.prepare.motions import CLASSES, scene_paths, scene_time
from slowfast_lara.prepare.motions import Path as Way
from slowfast_lara.prepare.synthetic import SPLITS, render
from studies.textured import as_seen, move_camera, render_textured
from studies.textures import read_textures
from tests.data.conftest import make_synthetic
from tests.helpers.commands import data
from tests.helpers.runs import MAKE_SYNTHETIC, finish, start
from tests.helpers.small_models import only_error
from tests.helpers.videos import NEEDS_REAL_VIDEOS, SHARED_VIDEOS, write_video

FEW = ("--train", "26", "--val", "3", "--test", "3", "--size", "32", "--classes", "12")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three texture videos of different sizes, and files that are none."""
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


def test_same_seed_same_bytes_whatever_the_number_of_processes(folder, tmp_path):
    for name, more in (("one", "1"), ("two", "2"), ("other", "2")):
        seed = "6" if name == "other" else "5"
        arguments = ["--textures", str(folder), "--seed", seed, "--jobs", more]
        make_synthetic(tmp_path / name, *FEW, *arguments)
    one = contents(tmp_path / "one")
    assert one == contents(tmp_path / "two")
    other = contents(tmp_path / "other")
    assert one.keys() == other.keys()
    videos = [name for name in one if name.endswith(".mp4")]
    assert len(videos) == 32 and all(one[name] != other[name] for name in videos)
    labels = Counter(line.split()[1] for line in one["train.csv"].decode().splitlines())
    assert len(labels) == 12 and max(labels.values()) - min(labels.values()) <= 1
    assert {len(track) for track in json.loads(one["tracks.json"]).values()} == {16}


def test_without_textures_nothing_has_changed():
    """Means of the pixels and tracks of 0.2.0, which any other draw would change."""
    pixels = [133.8294, 127.6386, 133.367, 137.7505, 120.4181, 114.1185]
    pixels += [134.3682, 134.6424, 126.464, 140.603, 130.1556, 127.4057]
    tracks = [23.1053, 28.9784, 17.4995, 12.5468, 25.2305, 24.6191]
    tracks += [30.3034, 33.3367, 27.0876, 18.4717, 7.8403, 25.5984]
    for number, motion in enumerate(CLASSES.values()):
        video, track = render(np.random.default_rng((5, number)), motion, 16, 48, True)
        assert abs(video.mean() - pixels[number]) < 1e-3
        assert abs(track.mean() - tracks[number]) < 1e-3


def test_of_few_videos_the_splits_have_different_frames(tmp_path):
    for number in range(3):
        write_video(tmp_path / f"{number}.mp4", 50 + number, size=(48, 64))
    textures = read_textures(str(tmp_path), 16, SPLITS)
    assert {len(videos) for videos in textures.values()} == {3}
    for train, val, test in zip(*textures.values(), strict=True):
        # The helper's frames have a strip that grows brighter from frame to frame.
        moments = [frames[:, :4].mean(axis=(1, 2, 3)) for frames in (train, val, test)]
        assert moments[0].max() < moments[1].min() and moments[1].max() < moments[2].min()
        assert len(train) > 2 * len(test)


def test_of_many_videos_the_splits_have_different_ones(tmp_path):
    for number in range(20):
        write_video(tmp_path / f"{number:02d}.mp4", 4 + number, size=(16, 24))
    textures = read_textures(str(tmp_path), 16, SPLITS)
    assert [len(textures[split]) for split in SPLITS] == [14, 3, 3]
    everything = [frames for videos in textures.values() for frames in videos]
    assert len({frames.tobytes() for frames in everything}) == 20
    assert {frames.shape[1:] for frames in everything} == {(48, 72, 3)}


def test_memory_is_bounded(folder):
    frames = read_textures(str(folder), 64, SPLITS)["train"]
    assert sum(video.nbytes for video in frames) < 2**28
    # 3 x 600 pixels a side: room for few frames, and not for fewer than one a split.
    with pytest.raises(Exception, match="at least 600 each way"):
        read_textures(str(folder), 600, SPLITS)


def place_on_background(picture: np.ndarray) -> np.ndarray:
    """[2, 3]: the plane through the green and through the blue of all pixels without red."""
    y, x = np.nonzero(picture[..., 0] < 10)
    terms = np.stack([x + 0.5, y + 0.5, np.ones(len(x))], axis=1)
    return np.stack([np.linalg.lstsq(terms, picture[y, x, c], rcond=None)[0] for c in (1, 2)])


def rest(rng: np.random.Generator, time: np.ndarray) -> list[Way]:
    return [Way(np.full_like(time, 0.4), np.full_like(time, 0.6), np.full_like(time, 0.12))]


@pytest.mark.parametrize("motion", [rest, *list(CLASSES.values())[:4]])
@pytest.mark.parametrize("frames", [16, 40])
def test_objects_move_against_the_background_as_their_class_says(motion, frames):
    """Read from the pixels: the background's colour says where a pixel is on it."""
    size = 64
    height, width = 3 * size, 4 * size
    ramp = np.zeros((1, height, width, 3), np.uint8)
    ramp[..., 1] = np.linspace(0, 255, width)
    ramp[..., 2] = np.linspace(0, 255, height)[:, None]
    red = np.zeros((1, height, width, 3), np.uint8)
    red[..., 0] = 255
    panned = 0.0
    for seed in range(12):
        # The same draws as in render_textured: the path comes first.
        time = np.arange(frames) / max(frames, 16)
        path = motion(np.random.default_rng(seed), time)[0]
        video, track = render_textured(
            np.random.default_rng(seed), motion, frames, size, False, [ramp, red]
        )
        if (video[..., 0] > 100).mean() > 0.5:  # the ramp was taken for the object
            continue
        planes = np.stack([place_on_background(picture.astype(float)) for picture in video])
        homogeneous = np.concatenate([track, np.ones((frames, 1))], axis=1)
        places = np.einsum("tck,tk->tc", planes, homogeneous)  # in colours
        places *= np.array([width - 1, height - 1]) / 255 / size  # in pictures
        steps = np.diff(places, axis=0)
        inside = (np.abs(np.diff(track, axis=0)) < size / 2).all(axis=1)
        expected = np.diff(np.stack([path.x, path.y], axis=1), axis=0)
        assert inside.sum() > frames // 2
        assert np.abs(steps - expected)[inside].max() < 0.02
        panned += np.abs(planes[-1, :, 2] - planes[0, :, 2]).sum()  # colours
        for picture, (x, y) in zip(video, track.astype(int)):
            assert picture[min(y, size - 1), min(x, size - 1), 0] > 200
    assert panned > 30  # the camera moved in all this


def test_neither_camera_nor_single_frames_tell_the_class():
    """Means over 400 videos of each class: opposite motions agree within four standard errors."""
    time = scene_time(16)
    for pair in np.arange(12).reshape(6, 2):
        figures = []  # of each class, [videos, figures]
        for label in pair:
            rng = np.random.default_rng((7, label))
            draws = []
            for _ in range(400):
                paths = scene_paths(rng, list(CLASSES.values())[label], time, True)
                camera = move_camera(rng, time, 1.0)
                x, y, radius = as_seen(paths[0], camera)
                pan = (camera.x[-1] - camera.x[0], camera.y[-1] - camera.y[0])
                moments = [*x[[0, 8, 15]], *y[[0, 8, 15]], *radius[[0, 8, 15]]]
                draws.append([*pan, *np.abs(pan), camera.zoom[-1], *moments])
            figures.append(np.array(draws))
        spread = np.sqrt(sum(one.var(axis=0) / len(one) for one in figures))
        difference = np.abs(figures[0].mean(axis=0) - figures[1].mean(axis=0))
        assert (difference < 4 * spread).all()


def test_a_camera_may_move_less_or_rest(folder):
    textures = read_textures(str(folder), 32, SPLITS)["train"]

    def seen(strength):
        return render_textured(np.random.default_rng(3), rest, 16, 32, False, textures, strength)

    (still, track), (_, half), (_, full) = (seen(strength) for strength in (0.0, 0.5, 1.0))
    assert (still == still[0]).all() and (track == track[0]).all()
    np.testing.assert_allclose(np.ptp(half, axis=0), np.ptp(full, axis=0) / 2, rtol=0.1)
    assert np.ptp(full, axis=0).max() > 1


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--camera", "0.5"], "--camera is for --textures"),
        (["--camera", "1.5", "--textures", "x"], "0 to 1 is allowed"),
        (["--camera", "nan", "--textures", "x"], "0 to 1 is allowed"),
    ],
)
def test_cameras_that_cannot_be(tmp_path, capsys, arguments, expected):
    assert data(["synthetic", str(tmp_path / "out"), *FEW, *arguments]) == 2
    assert expected in only_error(capsys) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "no videos in it"),
        (lambda folder: (folder.mkdir(), (folder / "a.mp4").write_bytes(b"x")), "none of 1 videos"),
        (
            lambda folder: (folder.mkdir(), write_video(folder / "a.mp4", size=(24, 64))),
            "64x24 pixels; at least 32 each way",
        ),
    ],
)
def test_folders_that_give_no_textures(tmp_path, make, expected):
    make(tmp_path / "in")
    arguments = (tmp_path / "out", *FEW, "--textures", tmp_path / "in")
    code, _, stderr = finish(start(*arguments, program=(MAKE_SYNTHETIC,)))
    assert code == 2 and expected in stderr
    assert len(stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


@NEEDS_REAL_VIDEOS
def test_real_videos_are_textures():
    textures = read_textures(str(SHARED_VIDEOS), 64, SPLITS)["test"]
    motion = CLASSES["approaching"]
    video, _ = render_textured(np.random.default_rng(1), motion, 16, 64, True, textures)
    assert video.std(axis=(1, 2)).mean() > 10  # a picture, not a plain colour
