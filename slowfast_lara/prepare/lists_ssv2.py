"""Lists for Something-Something-v2, from the official annotations and a folder.

The folder holds the distributed ID.webm files (ID.mp4 if prepared), or a folder ID of
extracted frames for each video. Lists of frames have PySlowFast's form, with the JSON
files beside them.
"""

from __future__ import annotations

import os
import shutil

from slowfast_lara.data.frame_lists import HEADER
from slowfast_lara.data.sources import list_images
from slowfast_lara.data.ssv2 import PREFIX, read_annotations, video_suffix
from slowfast_lara.errors import DataError, DecodeError
from slowfast_lara.files import write_text

SPLITS = {"train": "train", "val": "validation"}


def frame_lines(folder: str, name: str, number: int) -> list[str] | None:
    """The rows of a video's frames, or None."""
    try:
        images = list_images(os.path.join(folder, name))
    except DecodeError:
        return None
    return [f'{name} {number} {frame} {image} ""\n' for frame, image in enumerate(images)]


def video_lines(folder: str, name: str, label: int) -> list[str] | None:
    path = os.path.join(folder, f"{name}{video_suffix(folder, [name])}")
    return [f"{path} {label}\n"] if os.path.isfile(path) else None


def write_lists(annotations: str, folder: str, out: str, classes: int) -> None:
    """OUT/{train,val}.csv and missing_*.txt from the JSON files and the videos or frames."""
    folder = os.path.abspath(folder)
    if not os.path.isdir(folder):
        raise DataError(f"{folder}: an existing folder is expected")
    with os.scandir(folder) as entries:
        has_videos = any(entry.name.endswith((".webm", ".mp4")) for entry in entries)
    os.makedirs(out, exist_ok=True)
    same_folder = os.path.samefile(annotations, out)
    if has_videos and same_folder:
        raise DataError("OUT is ANNOTATIONS; lists of videos need a folder without the JSON files")
    for split, official in SPLITS.items():
        labels = read_annotations(annotations, official, classes)
        _write_split(split, labels, folder, out, has_videos)
    if not has_videos and not same_folder:
        for name in ("labels", *SPLITS.values()):
            file = f"{PREFIX}{name}.json"
            shutil.copyfile(os.path.join(annotations, file), os.path.join(out, file))


def _write_split(
    split: str, labels: dict[str, int], folder: str, out: str, has_videos: bool
) -> None:
    found, missing = [] if has_videos else [HEADER + "\n"], []
    for number, (name, label) in enumerate(labels.items()):
        lines = (
            video_lines(folder, name, label) if has_videos else frame_lines(folder, name, number)
        )
        if lines is None:
            missing.append(f"{name}\n")
        else:
            found += lines
    write_text(os.path.join(out, f"{split}.csv"), "".join(found))
    write_text(os.path.join(out, f"missing_{split}.txt"), "".join(missing))
    print(
        f"{split}: {len(labels) - len(missing)} of {len(labels)} videos found, "
        f"{len(missing)} missing"
    )
