"""Small sets with other labels than one class: EPIC-KITCHENS' actions, Charades' frame lists.

The brightness of a video's frames tells its (first) class, so that a small model can learn it.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import cv2
import numpy as np

VERBS, NOUNS = 3, 4
CLASSES = 5
COLUMNS = [
    "narration_id",
    "participant_id",
    "video_id",
    "narration_timestamp",
    "start_timestamp",
    "stop_timestamp",
    "start_frame",
    "stop_frame",
    "narration",
    "verb",
    "verb_class",
    "noun",
    "noun_class",
    "all_nouns",
    "all_noun_classes",
]


def write_frame(path: Path, brightness: int, seed: int, size: int = 40) -> None:
    noise = np.random.default_rng(seed).integers(0, 20, (size, size, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), (brightness + noise).astype(np.uint8))


def timestamp(frame: int, fps: int) -> str:
    seconds = frame / fps
    return f"00:{int(seconds // 60):02d}:{seconds % 60:05.2f}"


def action_row(video: str, number: int, start: int, stop: int, verb: int, noun: int) -> dict:
    fps = 50 if len(video.split("_")[1]) == 3 else 60
    values = (
        *(f"{video}_{number}", video.split("_")[0], video, "00:00:00.00"),
        *(timestamp(start, fps), timestamp(stop, fps), start, stop, "a, b", f"verb {verb}", verb),
        *(f"noun {noun}", noun, f"['noun {noun}', 'other']", f"[{noun}, 0]"),
    )
    return dict(zip(COLUMNS, values))


def write_annotations(path: Path, rows: list[dict[str, Any]], columns: list[str] = COLUMNS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def write_kitchens(folder: Path, *, train: int = 8, val: int = 5, length: int = 12) -> Path:
    """Actions of `length` frames in two videos: one of 50 fps for training, one of 60 fps."""
    lists = (("train", "P01_101", train), ("validation", "P02_03", val))
    for split, video, count in lists:
        rows = []
        for i in range(count):
            verb, noun, start = i % VERBS, i % NOUNS, i * length
            rows.append(action_row(video, i, start, start + length, verb, noun))
            for frame in range(start + 1, start + length + 1):
                name = f"{video[:3]}/rgb_frames/{video}/frame_{frame:010d}.jpg"
                write_frame(folder / name, 60 * verb + 15 * noun, frame)
        write_annotations(folder / f"EPIC_100_{split}.csv", rows)
    for part, count in (("verb", VERBS), ("noun", NOUNS)):
        lines = [f'{i},{part} {i},"[""{part} {i}""]"' for i in range(count)]
        text = "\n".join(["id,key,instances", *lines]) + "\n"
        (folder / f"EPIC_100_{part}_classes.csv").write_text(text)
    return folder


def write_charades(folder: Path, *, train: int = 8, val: int = 5, frames: int = 12) -> Path:
    """Frame lists; the first half of a video has class i, the second classes i and i + 1."""
    for split, count in (("train", train), ("val", val)):
        lines = ["original_vido_id video_id frame_id path labels"]
        for i in range(count):
            first, second = i % CLASSES, (i + 1) % CLASSES
            for frame in range(frames):
                name = f"{split}{i}/{frame + 1:06d}.jpg"
                write_frame(folder / name, 40 * first, 100 * i + frame)
                text = f"{first}" if frame < frames // 2 else f'"{first},{second}"'
                lines.append(f"{split}{i} {i} {frame} {name} {text}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder
