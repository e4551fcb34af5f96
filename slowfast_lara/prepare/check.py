"""Search for bad videos before training: without any frame, or with undecodable packets.

OUT.progress records the checked videos; an interrupted check resumes from this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from tqdm import tqdm

from slowfast_lara.data.lists import fits_in_a_list, read_entries, videos_below
from slowfast_lara.data.video import count_frames
from slowfast_lara.errors import DataError, DecodeError, printable
from slowfast_lara.files import write_text
from slowfast_lara.prepare.progress_log import ProgressLog


def check_video(path: str) -> tuple[str, str]:
    """Decode a video; return its path and why it is bad ("" if it is good)."""
    try:
        frames, damaged = count_frames(path)
    except DecodeError as error:
        return path, str(error).removeprefix(f"{path}: ")
    return path, f"{damaged} packets do not decode, {frames} frames do" if damaged else ""


def _find_videos(source: str, separator: str, prefix: str) -> Iterator[str]:
    """Yield the videos of `source`: a folder, a list (.csv, .txt) or a single video."""
    if os.path.isdir(source):
        yield from videos_below(source)
    elif source.endswith((".csv", ".txt")):
        yield from (path for _, path, _ in read_entries(source, separator, prefix))
    else:
        yield source


def check_videos(
    out: str, sources: Sequence[str], *, separator: str, prefix: str, jobs: int
) -> int:
    """Check lists, folders and files; write the bad videos to OUT and return their number."""
    videos = list(
        dict.fromkeys(
            path for source in sources for path in _find_videos(source, separator, prefix)
        )
    )
    if not videos:
        raise DataError(f"no videos in {', '.join(sources)}")
    log = ProgressLog(f"{out}.progress")
    reasons = {path: str(values[0]) for path, values in log.entries.items() if len(values) == 1}
    todo = [path for path in videos if path not in reasons]
    with ProcessPoolExecutor(jobs) as pool, log.appending():
        results = pool.map(check_video, todo, chunksize=4)
        finished = len(videos) - len(todo)
        for path, reason in tqdm(results, total=len(videos), initial=finished, disable=None):
            reasons[path] = reason
            log.add(path, reason)
    bad = [path for path in videos if reasons[path]]
    lines = [
        f"{path if fits_in_a_list(path) else printable(path)}\t{reasons[path]}\n" for path in bad
    ]
    write_text(out, "".join(lines))
    print(f"{len(videos)} videos, {len(bad)} bad: {printable(out)}")
    return len(bad)
