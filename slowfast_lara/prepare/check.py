"""Decoding every video once, to know the bad ones before training.

Bad is what gives no frame, and what has packets that do not decode. What was checked
is kept in OUT.progress: a run that was stopped goes on from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from tqdm import tqdm

from slowfast_lara.data.lists import (
    find_prefix,
    fits_in_a_list,
    read_lines,
    split_line,
    videos_below,
)
from slowfast_lara.data.video import count_frames
from slowfast_lara.errors import DataError, DecodeError, printable
from slowfast_lara.files import parse_json, write_text


def check(path: str) -> tuple[str, str]:
    """The path, and what is wrong with the video ("": nothing)."""
    try:
        frames, damaged = count_frames(path)
    except DecodeError as error:
        return path, str(error).removeprefix(f"{path}: ")
    return path, f"{damaged} packets do not decode, {frames} frames do" if damaged else ""


def videos_of(source: str, separator: str, prefix: str) -> Iterator[str]:
    """The videos of a list, below a folder, or the video itself."""
    if os.path.isdir(source):
        yield from videos_below(source)
    elif source.endswith((".csv", ".txt")):
        for position, (number, line) in enumerate(read_lines(source)):
            path, _ = split_line(line, separator, f"{source}, line {number}")
            if position == 0:
                prefix = find_prefix(prefix, path, source)
            yield os.path.join(prefix, path)
    else:
        yield source


def read_progress(path: str) -> dict[str, str]:
    """What an earlier run found: path and reason. A line that was cut short does not count."""
    done: dict[str, str] = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    continue
                try:
                    video, reason = parse_json(line)
                    done[str(video)] = str(reason)
                except (TypeError, ValueError):
                    raise DataError(
                        f"{path}, line {number}: [video, reason] is expected, not {line!r:.80}; "
                        "without this file, all videos are checked anew"
                    ) from None
    return done


def check_videos(
    out: str, sources: Sequence[str], *, separator: str, prefix: str, jobs: int
) -> int:
    """Write the bad videos of lists, folders and files to OUT; how many there are."""
    videos = list(
        dict.fromkeys(path for source in sources for path in videos_of(source, separator, prefix))
    )
    if not videos:
        raise DataError(f"no videos in {', '.join(sources)}")
    progress = f"{out}.progress"
    done = read_progress(progress)
    # Written anew, so that a line cut short does not spoil the next one.
    write_text(progress, "".join(json.dumps(item) + "\n" for item in done.items()))
    left = [path for path in videos if path not in done]
    with ProcessPoolExecutor(jobs) as pool, open(progress, "a", encoding="utf-8") as log:
        results = pool.map(check, left, chunksize=4)
        known = len(videos) - len(left)
        for path, reason in tqdm(results, total=len(videos), initial=known, disable=None):
            done[path] = reason
            log.write(json.dumps([path, reason]) + "\n")
            log.flush()
    bad = [path for path in videos if done[path]]
    lines = [f"{path if fits_in_a_list(path) else printable(path)}\t{done[path]}\n" for path in bad]
    write_text(out, "".join(lines))
    print(f"{len(videos)} videos, {len(bad)} bad: {printable(out)}")
    return len(bad)
