"""`path label` lists for training, from annotations or from folders of videos."""

from __future__ import annotations

import csv
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from typing import NamedTuple

from slowfast_lara.data.classes import DEFAULT_NAME
from slowfast_lara.data.lists import VIDEO_SUFFIXES, listed_videos_below
from slowfast_lara.data.sources import list_images
from slowfast_lara.data.text_files import open_text
from slowfast_lara.errors import DataError, DecodeError, InputError, counted
from slowfast_lara.files import write_json, write_text

KINETICS_COLUMNS = ("label", "youtube_id", "time_start", "time_end")
# Splits of Something-Something-v2: name in this package -> official name.
SSV2_SPLITS = {"train": "train", "val": "validation"}


class Split(NamedTuple):
    """How the videos of a class are divided into training, validation and test."""

    val_share: float = 0.1
    test_share: float = 0.1
    seed: int = 0
    group: str = ""  # regular expression; videos with the same match go into the same set


def write_folder_lists(folder: str, out: str, split: Split) -> None:
    """Write OUT/{train,val,test}.csv and classes.json from a folder with one folder per class.

    The split depends only on the file names and `split`.
    """
    if not (split.val_share > 0 and split.test_share > 0 and sum(split[:2]) < 1):
        raise InputError(
            f"the shares of validation and test are {split.val_share:g} and {split.test_share:g}; "
            "must be above 0, with a sum below 1"
        )
    videos = classes_of(folder)
    chosen = _choose_splits(folder, videos, split)
    lines: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for label, (name, paths) in enumerate(videos.items()):
        counts = Counter(chosen[path] for path in paths)
        if min(counts[part] for part in lines) == 0:
            groups = counted(len({group_of(path, folder, split) for path in paths}), "group")
            raise DataError(
                f"{os.path.join(folder, name)}: its {len(paths)} videos are in {groups}; too few "
                "for training, validation and test"
            )
        for path in paths:
            lines[chosen[path]].append(f"{os.path.abspath(path)} {label}\n")
    for part, content in lines.items():
        write_text(os.path.join(out, f"{part}.csv"), "".join(content))
        print(f"{part}: {counted(len(content), 'video')}")
    _write_classes(out, list(videos))


def _choose_splits(folder: str, videos: dict[str, list[str]], split: Split) -> dict[str, str]:
    """Choose "train", "val" or "test" for each video.

    In each class, whole groups go to the test set and then to the validation set, until each of
    these two sets has its share of the class's videos (at least one). A group with videos of
    several classes is in one set only. The last group of a class stays in the training set.
    """
    groups = {path: group_of(path, folder, split) for paths in videos.values() for path in paths}
    set_of: dict[str, str] = {}
    left = {name: {groups[path] for path in paths} for name, paths in videos.items()}
    for paths in videos.values():
        shuffled = random.Random(split.seed).sample(paths, len(paths))
        for part, share in (("test", split.test_share), ("val", split.val_share)):
            missing = max(1, round(len(paths) * share))
            missing -= sum(set_of.get(groups[path]) == part for path in paths)
            for group in dict.fromkeys(groups[path] for path in shuffled):
                if missing <= 0:
                    break
                is_last = any(others == {group} for others in left.values())
                if group not in set_of and not is_last:
                    set_of[group] = part
                    missing -= sum(groups[path] == group for path in paths)
                    for others in left.values():
                        others.discard(group)
    return {path: set_of.get(group, "train") for path, group in groups.items()}


def group_of(path: str, folder: str, split: Split) -> str:
    """The text that `split.group` matches in a video's path below its class folder.

    If `split.group` has capture groups, the result is the text of the first one. If `split.group`
    is empty, each video is a group of its own.
    """
    name = os.path.relpath(path, folder).replace(os.sep, "/")
    if not split.group:
        return name
    found = re.search(split.group, name.partition("/")[2])
    if found is None:
        raise DataError(f"{path}: the regular expression {split.group!r} does not match this path")
    return found[1] if found.re.groups else found[0]


def classes_of(folder: str) -> dict[str, list[str]]:
    """Find the videos of each class; class names are in alphabetical order."""
    try:
        names = sorted(
            entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."
        )
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}") from None
    if not names:
        raise DataError(f"{folder}: must contain one folder per class")
    videos = {name: list(listed_videos_below(os.path.join(folder, name))) for name in names}
    found: dict[str, tuple[str, str]] = {}
    for name, paths in videos.items():
        if len(paths) < 3:
            raise DataError(
                f"{os.path.join(folder, name)}: {counted(len(paths), 'video')} "
                f"({', '.join(VIDEO_SUFFIXES)}) below it; expected at least 3, "
                "for training, validation and test"
            )
        for path in paths:  # with symbolic links, a file may be in two classes
            other, first_path = found.setdefault(os.path.realpath(path), (name, path))
            if other != name:
                raise DataError(f"{first_path} and {path} are the same file in two classes")
    return videos


def write_kinetics_lists(
    folder: str, out: str, annotations: dict[str, str], separator: str
) -> None:
    """Write OUT/SPLIT.csv and OUT/missing_SPLIT.txt per annotation file, and classes.json.

    `annotations` is {split: annotation file}. Their classes are numbered in alphabetical order.
    """
    written = {os.path.realpath(os.path.join(out, f"{split}.csv")) for split in annotations}
    for path in annotations.values():
        if os.path.realpath(path) in written:
            raise InputError(f"a list would replace the annotation file {path}; use another OUT")
    rows = {split: _read_kinetics(path) for split, path in annotations.items()}
    videos: dict[str, str] = {}
    for path in listed_videos_below(folder):
        videos.setdefault(os.path.splitext(os.path.basename(path))[0], os.path.abspath(path))
    if not videos:
        raise DataError(f"{folder}: no videos ({', '.join(VIDEO_SUFFIXES)}) below it")
    classes = sorted({row["label"] for split in rows for row in rows[split]})
    labels = {name: label for label, name in enumerate(classes)}
    results: dict[str, tuple[list[str], list[str]]] = {}
    for split, entries in rows.items():
        results[split] = found, missing = [], []
        for line, row in enumerate(entries, start=2):
            name = _clip_name(row, f"{annotations[split]}, line {line}")
            if path := videos.get(name) or videos.get(row["youtube_id"], ""):
                found.append(f"{path}{separator}{labels[row['label']]}\n")
            else:
                missing.append(name)
    _check_any_found(folder, {split: missing for split, (_, missing) in results.items()}, rows)
    for split, (found, missing) in results.items():
        _write_split(out, split, found, missing, len(rows[split]))
    _write_classes(out, classes)


def _check_any_found(
    folder: str, missing: Mapping[str, Sequence[str]], annotated: Mapping[str, Sized]
) -> None:
    """Raise a DataError if no annotated video is in `folder`: it is probably another folder."""
    total = sum(map(len, annotated.values()))
    if total and sum(map(len, missing.values())) == total:
        first = next(name for names in missing.values() for name in names)
        raise DataError(
            f"{folder}: has none of the {counted(total, 'annotated video')}; the first is {first}"
        )


def _read_kinetics(path: str) -> list[dict[str, str]]:
    with open_text(path, newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in KINETICS_COLUMNS if name not in (reader.fieldnames or [])]
        if missing:
            raise DataError(
                f"{path}, line 1: expected columns {', '.join(KINETICS_COLUMNS)}; "
                f"{', '.join(missing)} not found"
            )
        return list(reader)


def _clip_name(row: dict[str, str], where: str) -> str:
    """Name of a clip in the official downloads: ID_START_END."""
    start, end = row["time_start"], row["time_end"]
    try:
        return f"{row['youtube_id']}_{round(float(start)):06d}_{round(float(end)):06d}"
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"{where}: expected numbers as time_start and time_end, got {start!r} and {end!r}"
        ) from None


def write_ssv2_lists(annotations: str, folder: str, out: str, classes: int) -> None:
    """Write OUT/{train,val}.csv and OUT/missing_{train,val}.txt from the official JSON files.

    `folder` contains video files ID.webm (ID.mp4 if prepared), or for each video a folder ID with
    its extracted frames. For video files, OUT/classes.json has the class names. For extracted
    frames, the lists have PySlowFast's format, one line per frame, and the JSON files are copied to
    OUT.
    """
    # Imported here because these modules import PyTorch, which would slow down other commands.
    from slowfast_lara.data.frame_lists import HEADER
    from slowfast_lara.data.ssv2 import PREFIX, read_annotations, video_suffix

    folder = os.path.abspath(folder)
    if not os.path.isdir(folder):
        raise DataError(f"{folder}: not a folder")
    has_videos = any(name.endswith((".webm", ".mp4")) for name in os.listdir(folder))
    os.makedirs(out, exist_ok=True)
    same_folder = os.path.samefile(annotations, out)
    if has_videos and same_folder:
        raise DataError(
            "OUT is ANNOTATIONS; lists of video files must be in a folder without the JSON files"
        )
    annotated: dict[str, dict[str, int]] = {}
    results: dict[str, tuple[list[str], list[str]]] = {}
    for split, official in SSV2_SPLITS.items():
        annotated[split] = labels = read_annotations(annotations, official, classes)
        results[split] = found, missing = [] if has_videos else [HEADER + "\n"], []
        for number, (name, label) in enumerate(labels.items()):
            if has_videos:
                path = os.path.join(folder, f"{name}{video_suffix(folder, [name])}")
                lines = [f"{path} {label}\n"] if os.path.isfile(path) else []
            else:
                lines = _frame_lines(folder, name, number)
            found += lines
            missing += [] if lines else [name]
    _check_any_found(folder, {split: missing for split, (_, missing) in results.items()}, annotated)
    for split, (found, missing) in results.items():
        _write_split(out, split, found, missing, len(annotated[split]))
    names = [f"{PREFIX}{name}.json" for name in ("labels", *SSV2_SPLITS.values())]
    # With the official files in OUT, the dataset would accept only lists of frames.
    copies = {names[0]: DEFAULT_NAME} if has_videos else {name: name for name in names}
    if not same_folder:
        for name, copy in copies.items():
            shutil.copyfile(os.path.join(annotations, name), os.path.join(out, copy))


def _frame_lines(folder: str, name: str, number: int) -> list[str]:
    try:
        images = list_images(os.path.join(folder, name))
    except DecodeError:
        return []
    return [f'{name} {number} {frame} {image} ""\n' for frame, image in enumerate(images)]


def _write_split(
    out: str, split: str, lines: Sequence[str], missing: Sequence[str], total: int
) -> None:
    write_text(os.path.join(out, f"{split}.csv"), "".join(lines))
    write_text(os.path.join(out, f"missing_{split}.txt"), "".join(f"{name}\n" for name in missing))
    found = total - len(missing)
    print(f"{split}: {found} of {counted(total, 'video')} found, {len(missing)} missing")


def _write_classes(out: str, names: list[str]) -> None:
    write_json(os.path.join(out, DEFAULT_NAME), names)
    print(f"{counted(len(names), 'class')} (set MODEL.NUM_CLASSES to this number)")
