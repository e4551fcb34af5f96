"""Videos given on a command line, and the output path for each video."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from slowfast_lara.data.lists import VIDEO_SUFFIXES
from slowfast_lara.data.sources import IMAGE_SUFFIXES
from slowfast_lara.errors import InputError


def find_videos(paths: Sequence[str], *, frames_in_folders: bool) -> list[str]:
    """Replace each folder in `paths` by the video files below it, sorted.

    A path that does not exist stays in the list; reading it fails later. If
    `frames_in_folders` is set, a folder with images and without videos is one video.
    """
    videos: list[str] = []
    for path in paths:
        found = list(_walk(path, frames_in_folders)) if os.path.isdir(path) else [path]
        if not found:
            raise InputError(f"{path}: no videos ({', '.join(VIDEO_SUFFIXES)}) in this folder")
        videos += found
    return videos


def _walk(folder: str, frames_in_folders: bool) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        names = sorted(name for name in names if name[0] != ".")
        videos = [name for name in names if name.lower().endswith(VIDEO_SUFFIXES)]
        has_images = any(name.lower().endswith(IMAGE_SUFFIXES) for name in names)
        if frames_in_folders and has_images and not videos:
            folders.clear()
            yield root
        yield from (os.path.join(root, name) for name in videos)


def output_paths(target: str | None, videos: Sequence[str], suffix: str) -> list[str | None]:
    """Output path per video: `target` if it ends in `suffix`, else a file in folder `target`."""
    if target is None:
        return [None] * len(videos)
    if not target.lower().endswith(suffix):
        paths: list[str] = []
        for video in videos:
            stem = os.path.splitext(os.path.basename(video.rstrip("/")))[0]
            path, number = os.path.join(target, stem + suffix), 2
            while path in paths:  # two videos have the same file name
                path, number = os.path.join(target, f"{stem}_{number}{suffix}"), number + 1
            paths.append(path)
    elif len(videos) == 1:
        paths = [target]
    else:
        raise InputError(f"{target} is one file, but there are {len(videos)} videos; give a folder")
    inputs = {_file_id(video) for video in videos if os.path.exists(video)}
    for path in paths:
        if os.path.exists(path) and _file_id(path) in inputs:
            raise InputError(f"{path} is one of the input videos; choose another output path")
    return list(paths)


def _file_id(path: str) -> tuple[int, int]:
    """Device and inode of a file, as os.path.samefile compares them."""
    status = os.stat(path)
    return status.st_dev, status.st_ino
