"""Which videos are meant, and where the output of each goes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from slowfast_lara.data.sources import IMAGE_SUFFIXES
from slowfast_lara.errors import InputError


def find_videos(words: Sequence[str], *, frames_in_folders: bool) -> list[str]:
    """The given files, and every file below the given folders, sorted.

    A folder that does not exist stays in the list: it is a video that fails. With
    `frames_in_folders` a folder of images is itself a video.
    """
    videos: list[str] = []
    for word in words:
        if not os.path.isdir(word):
            videos.append(word)
            continue
        found = list(_below(word, frames_in_folders))
        if not found:
            raise InputError(f"{word}: no files in this folder")
        videos += found
    return videos


def _below(folder: str, frames_in_folders: bool) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        if frames_in_folders and any(name.lower().endswith(IMAGE_SUFFIXES) for name in names):
            folders.clear()
            yield root
            continue
        # Hidden files are never meant: .DS_Store and the like.
        yield from (os.path.join(root, name) for name in sorted(names) if name[0] != ".")


def output_paths(target: str | None, videos: Sequence[str], suffix: str) -> list[str | None]:
    """Where each video's output goes: `target` itself if it has the suffix, else in that folder."""
    if target is None:
        return [None] * len(videos)
    if target.lower().endswith(suffix):
        if len(videos) > 1:
            raise InputError(
                f"{target} is one file and there are {len(videos)} videos; give a folder"
            )
        paths = [target]
    else:
        paths = []
        for video in videos:
            stem = os.path.splitext(os.path.basename(video.rstrip("/")))[0]
            path, number = os.path.join(target, stem + suffix), 2
            while path in paths:  # the same name in two folders
                path, number = os.path.join(target, f"{stem}_{number}{suffix}"), number + 1
            paths.append(path)
    for video, path in zip(videos, paths):
        if os.path.exists(path) and os.path.exists(video) and os.path.samefile(path, video):
            raise InputError(f"{path} is the video itself; give another place for the output")
    return list(paths)
