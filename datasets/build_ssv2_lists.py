"""Makes lists for Something-Something-v2 from the official annotations and a folder.

    python datasets/build_ssv2_lists.py ANNOTATIONS FOLDER OUT

ANNOTATIONS holds something-something-v2-{labels,train,validation}.json. FOLDER
holds the distributed ID.webm files, or a folder ID of extracted frames for each
video. OUT gets train.csv and val.csv (for frames in PySlowFast's form, with the
JSON files beside them; for videos as `path label`), and missing_train.txt and
missing_val.txt with the videos that were not found.

Where no video is missing, no lists are needed for .webm files: DATA.PATH_TO_DATA_DIR
ANNOTATIONS and DATA.PATH_PREFIX FOLDER do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from slowfast_lara.data.errors import DataError, DecodeError
from slowfast_lara.data.images import list_images
from slowfast_lara.data.lists import write_text
from slowfast_lara.data.ssv2 import HEADER, PREFIX, read_annotations

SPLITS = {"train": "train", "val": "validation"}


def frame_lines(folder: str, name: str, number: int) -> list[str] | None:
    """The rows of a video's frames, or None."""
    try:
        images = list_images(os.path.join(folder, name))
    except DecodeError:
        return None
    return [f'{name} {number} {frame} {image} ""\n' for frame, image in enumerate(images)]


def video_lines(folder: str, name: str, label: int) -> list[str] | None:
    path = os.path.join(folder, f"{name}.webm")
    return [f"{path} {label}\n"] if os.path.isfile(path) else None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("annotations", help="the folder with the JSON files")
    parser.add_argument("folder", help="the folder with the videos or frames")
    parser.add_argument("out", help="the folder for the lists: DATA.PATH_TO_DATA_DIR")
    parser.add_argument("--classes", type=int, default=174)
    args = parser.parse_args(argv)
    folder = os.path.abspath(args.folder)
    if not os.path.isdir(folder):
        raise DataError(f"{args.folder}: an existing folder is expected")
    with os.scandir(folder) as entries:
        has_videos = any(entry.name.endswith(".webm") for entry in entries)
    os.makedirs(args.out, exist_ok=True)
    same_folder = os.path.samefile(args.annotations, args.out)
    if has_videos and same_folder:
        raise DataError("OUT is ANNOTATIONS; lists of videos need a folder without the JSON files")
    for split, official in SPLITS.items():
        labels = read_annotations(args.annotations, official, args.classes)
        found, missing = [] if has_videos else [HEADER + "\n"], []
        for number, (name, label) in enumerate(labels.items()):
            lines = (
                video_lines(folder, name, label)
                if has_videos
                else frame_lines(folder, name, number)
            )
            if lines is None:
                missing.append(f"{name}\n")
            else:
                found += lines
        write_text(os.path.join(args.out, f"{split}.csv"), "".join(found))
        write_text(os.path.join(args.out, f"missing_{split}.txt"), "".join(missing))
        print(
            f"{split}: {len(labels) - len(missing)} of {len(labels)} videos found, "
            f"{len(missing)} missing"
        )
    if not has_videos and not same_folder:
        for name in ("labels", *SPLITS.values()):
            file = f"{PREFIX}{name}.json"
            shutil.copyfile(os.path.join(args.annotations, file), os.path.join(args.out, file))


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
