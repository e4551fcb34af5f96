"""Checks that find bad videos before training, and removal of these videos from lists.

A video is bad if it cannot be opened, if it has undecodable packets or no frames, or if decoding it
crashes or times out.
OUT.progress records the checked videos. A repeated check decodes only videos that were bad, and
those that were not checked or have changed since.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing

from slowfast_lara.data.lists import fits_in_a_list, read_entries, read_lines, videos_below
from slowfast_lara.data.timestamps import FileVersion, file_version
from slowfast_lara.data.video import count_frames
from slowfast_lara.errors import DataError, DecodeError, InputError, counted, print_error, printable
from slowfast_lara.files import write_text
from slowfast_lara.prepare.progress_log import ProgressLog
from slowfast_lara.prepare.workers import ItemFailure, in_processes
from slowfast_lara.progress import Bar

_TIME_LIMIT = 1800.0  # seconds to decode one video


def check_video(path: str) -> str:
    """Decode a video; return why it is bad ("" if it is good)."""
    try:
        frames, damaged = count_frames(path)
    except DecodeError as error:
        return str(error).removeprefix(f"{path}: ")
    return f"{damaged} packets do not decode; {frames} frames were decoded" if damaged else ""


def _find_videos(source: str, separator: str, prefix: str) -> Iterator[str]:
    """Yield the videos of `source`: a folder, a list (.csv, .txt) or a single video."""
    if os.path.isdir(source):
        yield from videos_below(source)
    elif source.endswith((".csv", ".txt")):
        # Not in the module that reads frame lists: importing it here would import PyTorch.
        if next(read_lines(source), (1, ""))[1].startswith("original_vido_id"):
            raise DataError(f"{source}: lists extracted frames; expected a list of video files")
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
    progress = f"{out}.progress"
    if os.path.lexists(out) and not os.path.exists(progress):
        raise InputError(
            f"{out} was not written by `data check` ({progress} is missing); choose another OUT"
        )
    log = ProgressLog(progress)
    # Versions before decoding: if a video changes meanwhile, the next check decodes it again.
    versions = {path: file_version(path) for path in videos}
    todo = [path for path in videos if not _is_known_good(path, versions[path], log)]
    reasons: dict[str, str] = {}
    results = in_processes(check_video, todo, jobs, _TIME_LIMIT)
    with closing(results), log.appending():
        finished = len(videos) - len(todo)
        for path, result in Bar(results, total=len(videos), initial=finished, disable=None):
            reasons[path] = result.reason if isinstance(result, ItemFailure) else result
            log.add(os.path.abspath(path), reasons[path], versions[path])
    bad = [path for path in todo if reasons[path]]
    lines = [
        f"{path if fits_in_a_list(path) else printable(path)}\t{reasons[path]}\n" for path in bad
    ]
    write_text(out, "".join(lines))
    print(f"{counted(len(videos), 'video')}, {len(bad)} bad (listed in {printable(out)})")
    if len(videos) > 1 and not any(versions.values()):
        print_error(
            f"none of these videos exists; the first is {videos[0]}. Relative paths start at the "
            "working directory or at the folder of the list; see --prefix"
        )
    return len(bad)


def _is_known_good(path: str, version: FileVersion | None, log: ProgressLog) -> bool:
    """Whether this version of a video was good in an earlier check."""
    return version is not None and log.entries.get(os.path.abspath(path)) == ["", list(version)]


def drop_bad(bad_file: str, lists: Sequence[str], *, separator: str, prefix: str) -> None:
    """Remove the videos in `bad_file` (written by `check_videos`) from the lists."""
    # A path may contain tabs; the reason after it contains none.
    lines_of_bad = (line for _, line in read_lines(bad_file))
    bad = {os.path.abspath(line.rpartition("\t")[0] or line) for line in lines_of_bad}
    lines, kept = {}, {}
    for name in lists:  # read and check all lists before writing any of them
        lines[name] = [line for _, line in read_lines(name)]
        paths = [os.path.abspath(path) for _, path, _ in read_entries(name, separator, prefix)]
        kept[name] = [line for line, path in zip(lines[name], paths) if path not in bad]
        if not kept[name]:
            raise DataError(
                f"{name}: all videos are bad, so no line would remain; no list was changed"
            )
    for name in lists:
        if len(kept[name]) < len(lines[name]):
            write_text(name, "".join(f"{line}\n" for line in kept[name]))
        dropped = len(lines[name]) - len(kept[name])
        print(f"{printable(name)}: dropped {dropped} of {counted(len(lines[name]), 'video')}")
