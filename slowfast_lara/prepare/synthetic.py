"""Synthetic labelled videos whose classes differ only in motion.

Classes form groups, e.g. the four directions of drifting. Within a group, single frames have the
same distribution, so that only motion distinguishes the classes. An object that leaves the frame
reappears on the other side.

OUT/{train,val,test}.csv list the videos (`path label`, relative to OUT), OUT/classes.json the class
names, and OUT/tracks.json the centre (x, y) of the moving object in every frame. With `form`
"frames", OUT has the layout of Something-Something-v2 with extracted frames. Paths in its lists
are also relative to OUT, so DATA.PATH_PREFIX may stay empty.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import av
import cv2
import numpy as np

from slowfast_lara.errors import InputError, counted, printable
from slowfast_lara.files import write_json, write_text
from slowfast_lara.prepare.motions import (
    CLASSES,
    SHAPES,
    TWO_OBJECTS,
    Motion,
    fill,
    outline,
    scene_paths,
    scene_time,
    wrapped_centres,
)
from slowfast_lara.prepare.workers import process_context
from slowfast_lara.progress import Bar

FPS = 30
SPLITS = ("train", "val", "test")

# (generator, motion, frames, size, two_objects) -> video [T, H, W, 3], track [T, 2].
Renderer = Callable[[np.random.Generator, Motion, int, int, bool], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Settings:
    """Contents of a synthetic dataset."""

    out: str
    classes: int
    videos: Mapping[str, int]  # number of videos per split
    size: int = 80
    frames: int = 16
    seed: int = 0
    form: Literal["mp4", "frames"] = "mp4"

    def __post_init__(self) -> None:
        if not 1 <= self.classes <= len(CLASSES):
            raise InputError(f"--classes is {self.classes}; must be 1 to {len(CLASSES)}")
        if self.size < 16 or self.size % 2:
            raise InputError(f"--size is {self.size}; must be an even number of at least 16")
        if self.frames < 1:
            raise InputError(f"--frames is {self.frames}; must be at least 1")
        for flag, value in {**self.videos, "seed": self.seed}.items():
            if value < 0:
                raise InputError(f"--{flag} is {value}; must be at least 0")


def render(
    rng: np.random.Generator, motion: Motion, frames: int, size: int, two_objects: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Draw plain shapes over a smooth background: video [T, H, W, 3] and track [T, 2]."""
    paths = scene_paths(rng, motion, scene_time(frames), two_objects)
    bright = rng.integers(2)
    shapes = rng.permutation(SHAPES)
    video = np.repeat(_background(rng, size)[None], frames, axis=0)
    for number in reversed(range(len(paths))):  # the moving object is drawn last, on top
        low, high = (200, 255) if (number + bright) % 2 else (0, 55)
        color = [int(value) for value in rng.integers(low, high, size=3)]
        shape = outline(str(shapes[number]), rng)
        for frame, x, y, radius in zip(video, *paths[number]):
            corners = shape * radius * size
            extent = np.abs(corners).max() + 1
            for centre in wrapped_centres(x % 1 * size, y % 1 * size, extent, size):
                fill(frame, corners + centre, color)
    return video, np.stack([paths[0].x % 1, paths[0].y % 1], axis=1) * size


def _background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Smooth random texture of medium brightness."""
    cells = int(rng.integers(5, 12))
    noise = rng.uniform(-22, 22, size=(cells, cells, 3)).astype(np.float32)
    texture = cv2.resize(noise, (size, size), interpolation=cv2.INTER_CUBIC)
    return (texture + rng.uniform(105, 150, size=3)).clip(0, 255).astype(np.uint8)


def _write_video(path: str, video: np.ndarray) -> None:
    _remove(path)
    with av.open(path, "w", format="mp4") as container:
        options = {"preset": "ultrafast", "crf": "18", "g": "12"}
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.height, stream.width = video.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for image in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def _remove(path: str) -> None:
    """Remove the file of an earlier run; writing through a symbolic link would alter its target."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _write_frames(folder: str, video: np.ndarray) -> None:
    """Write FOLDER/NAME_000001.jpg, ...; NAME is the last component of FOLDER."""
    os.makedirs(folder, exist_ok=True)
    name = os.path.basename(folder)
    for number, image in enumerate(video, start=1):
        path = os.path.join(folder, f"{name}_{number:06d}.jpg")
        _remove(path)
        if not cv2.imwrite(path, image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95]):
            raise OSError(f"cannot write {path}")


class _Job(NamedTuple):
    split: str
    number: int  # index of the video within its split
    label: int
    path: str  # path of the video relative to OUT


class _Worker:
    """Settings and renderers of a worker process, which are too large to send with every job."""

    settings: Settings
    renderers: Mapping[str, Renderer]


def _start_worker(settings: Settings, renderers: Mapping[str, Renderer]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C: the parent ends this process
    _Worker.settings, _Worker.renderers = settings, renderers


def _make_video(job: _Job) -> list[list[float]]:
    """Render and write a video; return its track [T, 2]."""
    settings = _Worker.settings
    rng = np.random.default_rng((settings.seed, SPLITS.index(job.split), job.number))
    motion, two_objects = list(CLASSES.values())[job.label], settings.classes >= TWO_OBJECTS
    renderer = _Worker.renderers[job.split]
    video, track = renderer(rng, motion, settings.frames, settings.size, two_objects)
    write = _write_frames if settings.form == "frames" else _write_video
    write(os.path.join(settings.out, job.path), video)
    return track.round(2).tolist()


def _plan(settings: Settings) -> list[_Job]:
    """Plan all videos; in a split, class sizes differ by at most 1, and the order is random."""
    jobs: list[_Job] = []
    for number, split in enumerate(SPLITS):
        rng = np.random.default_rng((settings.seed, len(SPLITS) + number))
        labels = rng.permutation(np.arange(settings.videos[split]) % settings.classes)
        for index, label in enumerate(labels):
            video = f"videos/{split}_{index:06d}.mp4"
            path = f"frames/{len(jobs) + 1}" if settings.form == "frames" else video
            jobs.append(_Job(split, index, int(label), path))
    return jobs


def _write_lists(settings: Settings, jobs: list[_Job]) -> None:
    for split in SPLITS:
        chosen = [job for job in jobs if job.split == split]
        if settings.form == "frames":
            lines = ["original_vido_id video_id frame_id path labels\n"]
            for number, job in enumerate(chosen):
                name = os.path.basename(job.path)
                lines += [
                    f'{name} {number} {frame} {job.path}/{name}_{frame + 1:06d}.jpg ""\n'
                    for frame in range(settings.frames)
                ]
        else:
            lines = [f"{job.path} {job.label}\n" for job in chosen]
        write_text(os.path.join(settings.out, f"{split}.csv"), "".join(lines))


def _write_ssv2_annotations(out: str, jobs: list[_Job], names: list[str]) -> None:
    """Write the three JSON files of Something-Something-v2."""
    prefix = os.path.join(out, "something-something-v2-")
    labels = {f"something {name}": str(label) for label, name in enumerate(names)}
    write_json(f"{prefix}labels.json", labels, indent=None)
    # Something-Something-v2 has no test labels, so the validation file lists the test videos too.
    for file, splits in (("train", ("train",)), ("validation", ("val", "test"))):
        entries = [
            {
                "id": os.path.basename(job.path),
                "label": f"an object {names[job.label]}",
                "template": f"[something] {names[job.label]}",
                "placeholders": ["an object"],
            }
            for job in jobs
            if job.split in splits
        ]
        write_json(f"{prefix}{file}.json", entries, indent=None)


def make_set(
    settings: Settings, processes: int, renderers: Mapping[str, Renderer] | None = None
) -> None:
    """Write the videos, then the lists.

    Args:
        settings: the contents of the set.
        processes: number of worker processes.
        renderers: {split: render function}; default: `render` for all splits.
    """
    out, names, jobs = settings.out, list(CLASSES)[: settings.classes], _plan(settings)
    renderers = renderers or dict.fromkeys(SPLITS, render)
    lists = (os.path.join(out, f"{split}.csv") for split in SPLITS)
    if not os.path.lexists(os.path.join(out, "tracks.json")):  # it is written before the lists
        for path in filter(os.path.lexists, lists):
            raise InputError(f"{path} is not of a synthetic set; choose another folder than {out}")
    folder = "frames" if settings.form == "frames" else "videos"
    os.makedirs(os.path.join(out, folder), exist_ok=True)
    context = process_context(__name__)
    with context.Pool(processes, _start_worker, (settings, renderers)) as pool:
        made = pool.imap(_make_video, jobs, chunksize=8)
        bar = Bar(made, total=len(jobs), unit="video", leave=False, disable=None)
        tracks = dict(zip((job.path for job in jobs), bar, strict=True))
    write_json(os.path.join(out, "classes.json"), names)
    write_json(os.path.join(out, "tracks.json"), tracks, indent=None)
    if settings.form == "frames":
        _write_ssv2_annotations(out, jobs, names)
    _write_lists(settings, jobs)
    classes = counted(settings.classes, "class")
    print(f"{counted(len(jobs), 'video')} of {classes} in {printable(out)}")
