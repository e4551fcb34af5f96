"""A labelled video set that needs no download.

Only motion tells the classes apart. Shape, colour, size, speed, place and
background are drawn alike for all of them, and whatever leaves the frame comes
in on the other side, so that a single frame says nothing about the class.

OUT/{train,val,test}.csv list the videos (`path label`, paths as seen from OUT),
OUT/classes.json names the classes, and OUT/tracks.json holds the centre (x, y)
of the moving object in every frame of every video. With a folder of real videos as
textures, the set has real pixels and a moving camera (textured.py). With the form "frames" the set
has the files of Something-Something-v2 with extracted frames; the paths in its
lists are as seen from OUT too, so that DATA.PATH_PREFIX may stay empty.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import av
import cv2
import numpy as np
from tqdm import tqdm

from slowfast_lara.errors import InputError, printable
from slowfast_lara.files import write_json, write_text
from slowfast_lara.prepare.motions import (
    CLASSES,
    SHAPES,
    TWO_OBJECTS,
    Path,
    draw,
    outline,
    scene_paths,
    scene_time,
)
from studies.textured import render_textured
from studies.textures import Textures, read_textures

FPS = 30
DEFAULT_VIDEOS = {"train": 512, "val": 64, "test": 64}
SPLITS = tuple(DEFAULT_VIDEOS)


@dataclass(frozen=True)
class Settings:
    """What the set is to be."""

    out: str
    classes: int = 4
    # Number of videos by split.
    videos: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_VIDEOS))
    size: int = 80
    frames: int = 16
    seed: int = 0
    form: Literal["mp4", "frames"] = "mp4"
    # A folder of real videos: real pixels and a moving camera.
    textures: str | None = None
    # With textures: how much the camera moves, from 0 to 1; None is 1.
    camera: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.classes <= len(CLASSES):
            raise InputError(f"--classes is {self.classes}; 1 to {len(CLASSES)} are allowed")
        if self.size < 16 or self.size % 2:
            raise InputError(f"--size is {self.size}; an even number from 16 on is expected")
        if self.frames < 1 or min(self.seed, *self.videos.values()) < 0:
            raise InputError("--frames starts at 1, numbers of videos and --seed start at 0")
        if self.camera is not None and not 0 <= self.camera <= 1:
            raise InputError(f"--camera is {self.camera}; 0 to 1 is allowed")
        if self.camera is not None and self.textures is None:
            raise InputError("--camera is for --textures FOLDER: without, no camera moves")


def background(rng: np.random.Generator, size: int) -> np.ndarray:
    """A smooth texture of middling brightness."""
    cells = int(rng.integers(5, 12))
    noise = rng.uniform(-22, 22, size=(cells, cells, 3)).astype(np.float32)
    texture = cv2.resize(noise, (size, size), interpolation=cv2.INTER_CUBIC)
    return (texture + rng.uniform(105, 150, size=3)).clip(0, 255).astype(np.uint8)


def render(
    rng: np.random.Generator,
    motion: Callable[..., list[Path]],
    frames: int,
    size: int,
    two_objects: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Video [T, H, W, 3] and track [T, 2] of a random object that moves so."""
    paths = scene_paths(rng, motion, scene_time(frames), two_objects)
    bright = rng.integers(2)
    shapes = rng.permutation(SHAPES)
    video = np.repeat(background(rng, size)[None], frames, axis=0)
    for number in reversed(range(len(paths))):  # the mover is drawn over the other
        low, high = (200, 255) if (number + bright) % 2 else (0, 55)
        color = [int(value) for value in rng.integers(low, high, size=3)]
        corners = outline(str(shapes[number]), rng)
        for frame, x, y, radius in zip(video, *paths[number]):
            draw(frame, corners * radius * size, x % 1 * size, y % 1 * size, color)
    return video, np.stack([paths[0].x % 1, paths[0].y % 1], axis=1) * size


def write_video(path: str, video: np.ndarray) -> None:
    """An H.264 mp4."""
    with av.open(path, "w", format="mp4") as container:
        options = {"preset": "ultrafast", "crf": "18", "g": "12"}
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.height, stream.width = video.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for image in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def write_frames(folder: str, video: np.ndarray) -> None:
    """JPEG files NAME/NAME_000001.jpg and so on."""
    os.makedirs(folder, exist_ok=True)
    name = os.path.basename(folder)
    for number, image in enumerate(video, start=1):
        path = os.path.join(folder, f"{name}_{number:06d}.jpg")
        if not cv2.imwrite(path, image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95]):
            raise OSError(f"cannot write {path}")


class Job(NamedTuple):
    """One video to make."""

    split: str
    number: int  # within the split
    label: int
    path: str  # as seen from OUT


# Of this process, by split; set once for each, as they are too large to go with every job.
_textures: Mapping[str, Textures] = {}


def _keep_textures(textures: Mapping[str, Textures]) -> None:
    global _textures
    _textures = textures


def make_video(settings: Settings, job: Job) -> list[list[float]]:
    """Writes the video; its track."""
    rng = np.random.default_rng((settings.seed, SPLITS.index(job.split), job.number))
    motion = list(CLASSES.values())[job.label]
    two_objects = settings.classes >= TWO_OBJECTS
    look = (settings.frames, settings.size, two_objects)
    if settings.textures is None:
        video, track = render(rng, motion, *look)
    else:
        strength = 1.0 if settings.camera is None else settings.camera
        video, track = render_textured(rng, motion, *look, _textures[job.split], strength)
    write = write_frames if settings.form == "frames" else write_video
    write(os.path.join(settings.out, job.path), video)
    return track.round(2).tolist()


def plan(settings: Settings) -> list[Job]:
    """Every video with its label; each class as often as the others, in random order."""
    jobs: list[Job] = []
    for number, split in enumerate(SPLITS):
        rng = np.random.default_rng((settings.seed, len(SPLITS) + number))
        labels = rng.permutation(np.arange(settings.videos[split]) % settings.classes)
        for index, label in enumerate(labels):
            video = f"videos/{split}_{index:06d}.mp4"
            path = f"frames/{len(jobs) + 1}" if settings.form == "frames" else video
            jobs.append(Job(split, index, int(label), path))
    return jobs


def write_lists(settings: Settings, jobs: list[Job]) -> None:
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


def write_ssv2_annotations(settings: Settings, jobs: list[Job], names: list[str]) -> None:
    """The three JSON files, in the form of the official ones."""
    prefix = os.path.join(settings.out, "something-something-v2-")
    labels = {f"something {name}": str(label) for label, name in enumerate(names)}
    write_json(f"{prefix}labels.json", labels, indent=None)
    # The test split has no labels in the original: as there, it is part of validation.
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


def make_set(settings: Settings, jobs: int) -> None:
    """Make the videos by `jobs` processes, then the lists."""
    out, names = settings.out, list(CLASSES)[: settings.classes]
    todo = plan(settings)
    textures: dict[str, Textures] = {}
    if settings.textures is not None:
        textures = read_textures(settings.textures, settings.size, SPLITS)
    folder = "frames" if settings.form == "frames" else "videos"
    os.makedirs(os.path.join(out, folder), exist_ok=True)
    with multiprocessing.Pool(jobs, _keep_textures, (textures,)) as pool:
        made = pool.imap(functools.partial(make_video, settings), todo, chunksize=8)
        bar = tqdm(made, total=len(todo), unit="video", leave=False, disable=None)
        tracks = dict(zip((job.path for job in todo), bar, strict=True))
    write_json(os.path.join(out, "classes.json"), names)
    write_json(os.path.join(out, "tracks.json"), tracks, indent=None)
    if settings.form == "frames":
        write_ssv2_annotations(settings, todo, names)
    write_lists(settings, todo)
    print(f"{len(todo)} videos of {settings.classes} classes in {printable(out)}")
