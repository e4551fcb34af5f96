"""All videos below a folder, made quick to read (see reencode.py) by all cores.

OUT/prepared.jsonl says what each result was made of and how: a run that was stopped
goes on from there, and a video is done again if it, or an option, has changed.
OUT/failures.csv names what could not be prepared, and what only in part.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from tqdm import tqdm

from slowfast_lara.data.lists import VIDEO_SUFFIXES, videos_below
from slowfast_lara.errors import DataError, DecodeError, InputError, RunError, first_line, printable
from slowfast_lara.files import atomic_text, parse_json, remove_unfinished, write_text
from slowfast_lara.locks import exclusive_lock
from slowfast_lara.prepare.lists_prepared import copy_class_files, place_of, read_lists, write_lists
from slowfast_lara.prepare.reencode import Options, Outcome, prepare_video
from slowfast_lara.prepare.workers import in_processes

RECORD, FAILURES = "prepared.jsonl", "failures.csv"
_SHOWN_FAILURES = 30


class Video(NamedTuple):
    """A video of the set."""

    source: str
    result: str
    # Size and time of the last change; None if there is no such file.
    version: tuple[int, int] | None


class Failed(NamedTuple):
    """Why there is no result."""

    reason: str


class CannotWrite(NamedTuple):
    """Why there will be no more results: the disk is full, or OUT is not ours."""

    errno: int
    reason: str
    path: str


def find_set(videos: str, out: str) -> list[Video]:
    """The videos below a folder, and the results they are to have."""
    if not os.path.isdir(videos):
        raise InputError(f"{videos}: a folder with videos is expected")
    real, real_out = os.path.realpath(videos), os.path.realpath(out)
    if os.path.commonpath([real, real_out]) in (real, real_out):
        raise InputError(f"{videos} and {out}: neither may be within the other")
    # A link among the videos may lead to earlier results.
    found = [path for path in videos_below(videos) if not _is_below(real_out, path)]
    names = [os.path.relpath(path, videos) for path in found]
    if not names:
        raise DataError(f"{videos}: no videos ({', '.join(VIDEO_SUFFIXES)}) below it")
    return [
        Video(os.path.join(videos, name), os.path.join(out, result), _version(videos, name))
        for name, result in result_names(names).items()
    ]


def _is_below(real_folder: str, path: str) -> bool:
    return os.path.realpath(path).startswith(os.path.join(real_folder, ""))


def result_names(names: list[str]) -> dict[str, str]:
    """NAME.mp4 for each video NAME.*; where several would have that, the suffix stays."""
    stems = Counter(os.path.splitext(name)[0] for name in names)
    results: dict[str, str] = {}
    for name in names:
        stem, suffix = os.path.splitext(name)
        alone = stems[stem] == 1 or suffix == ".mp4"
        results[name] = f"{stem if alone else name}.mp4"
    for result, count in Counter(results.values()).items():
        if count > 1:
            both = [name for name in names if results[name] == result]
            raise DataError(f"{' and '.join(both)} would both become {result}; rename one")
    return results


def _version(folder: str, name: str) -> tuple[int, int] | None:
    try:
        status = os.stat(os.path.join(folder, name))
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def prepare_set(
    videos: str, out: str, options: Options, *, jobs: int, time_limit: float, separator: str
) -> int:
    """Prepare all videos below a folder; how many failed."""
    found = find_set(videos, out)
    lists = read_lists(videos, separator)
    with exclusive_lock(out, "OUT"):
        done, failed = _prepare(found, videos, out, options, jobs, time_limit)
        with _stopping(out):
            results_of = {place_of(video.source): video.result for video in done}
            write_lists(lists, results_of, out, separator)
            copy_class_files(videos, out)
            _tell(found, done, failed, out)
    return len(failed)


def _prepare(
    found: list[Video], videos: str, out: str, options: Options, jobs: int, time_limit: float
) -> tuple[dict[Video, Outcome], dict[Video, str]]:
    """What is done, and why the rest is not."""
    record = Record(out, options)
    record.check_replaced(found, videos)
    failed = {
        video: "a path with line breaks fits in no list"
        for video in found
        if len(video.source.splitlines()) > 1
    }
    done = {video: earlier for video in found if (earlier := record.find(video)) is not None}
    folders = {os.path.dirname(video.result) for video in found} | {out}
    with _stopping(out), record.opened(), _tidied(folders):
        todo = [video for video in found if video not in done and video not in failed]
        bar = tqdm(total=len(found), initial=len(found) - len(todo), unit="video", mininterval=1)
        results = in_processes(partial(prepare_one, options), todo, jobs, time_limit)
        with bar, contextlib.closing(results):
            for video, outcome in results:
                if isinstance(outcome, CannotWrite):
                    raise OSError(*outcome)
                if isinstance(outcome, Outcome):
                    record.add(video, outcome)
                    done[video] = outcome
                else:
                    failed[video] = outcome.reason
                    bar.set_postfix(failed=len(failed))
                bar.update()
    return done, failed


def prepare_one(options: Options, video: Video) -> Outcome | Failed | CannotWrite:
    try:
        return prepare_video(video.source, video.result, options)
    except DecodeError as error:
        return Failed(str(error).removeprefix(f"{video.source}: "))
    except OSError as error:  # of reading, it would be a DecodeError
        return CannotWrite(error.errno or 0, error.strerror or first_line(error), video.result)
    except Exception as error:  # whatever it is, the other videos go on
        return Failed(f"{type(error).__name__}: {first_line(error)}")


@contextlib.contextmanager
def _stopping(out: str) -> Iterator[None]:
    """What cannot be written ends the run, since the next video could not be either."""
    try:
        yield
    except BrokenPipeError:  # of what is printed
        raise
    except OSError as error:
        raise RunError(
            f"{error.filename or out}: {error.strerror}; what is done is kept, "
            "and the same command goes on from there"
        ) from None


@contextlib.contextmanager
def _tidied(folders: set[str]) -> Iterator[None]:
    """Without what a killed process was writing: of earlier runs, and of this one."""
    for folder in folders:
        remove_unfinished(folder)
    try:
        yield
    finally:
        for folder in folders:
            remove_unfinished(folder)


class Record:
    """OUT/prepared.jsonl: the version of each source, the options, and the outcome."""

    def __init__(self, out: str, options: Options) -> None:
        self._out, self._path = out, os.path.join(out, RECORD)
        self._options = list(options)
        self._entries: dict[str, list] = {}
        if os.path.exists(self._path):
            with open(self._path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    # A line that was cut short does not count.
                    with contextlib.suppress(ValueError, TypeError, IndexError):
                        name, *entry = parse_json(line)
                        self._entries[name] = entry

    def check_replaced(self, found: list[Video], videos: str) -> None:
        """A DataError if a result would take the place of that of a video elsewhere."""
        # Records of earlier versions do not name the result.
        sources = {str(entry[3]): str(name) for name, entry in self._entries.items() if entry[3:]}
        for video in found:
            other = sources.get(self._result(video))
            if (
                other is not None
                and not _is_below(os.path.realpath(videos), other)
                and os.path.lexists(video.result)
            ):
                raise DataError(
                    f"{video.result} was made of {other}, and {video.source} would replace it: "
                    f"give each its own OUT, or remove {self._path} if that one was moved here"
                )

    def find(self, video: Video) -> Outcome | None:
        """The outcome of an earlier run, if nothing has changed since."""
        try:
            version, options, outcome, *_ = self._entries[self._name(video)]
            known = Outcome(*outcome)
            is_same = version == list(video.version or ()) and options == self._options
            return known if is_same and os.path.getsize(video.result) == known.size else None
        except (KeyError, ValueError, TypeError, OSError):
            return None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Ready for `add`. Written anew, so that a line cut short spoils no other."""
        lines = [json.dumps([name, *entry]) + "\n" for name, entry in self._entries.items()]
        write_text(self._path, "".join(lines))
        with open(self._path, "a", encoding="utf-8") as self._file:
            yield

    def add(self, video: Video, outcome: Outcome) -> None:
        line = [self._name(video), video.version, self._options, outcome, self._result(video)]
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _name(self, video: Video) -> str:
        """The source is told by its path: two folders may be prepared into one."""
        return os.path.abspath(video.source)

    def _result(self, video: Video) -> str:
        return os.path.relpath(video.result, self._out)


def in_bytes(size: float) -> str:
    """A size for people."""
    return f"{size / 1e9:.1f} GB" if size > 1e9 else f"{size / 1e6:.1f} MB"


def _tell(
    found: list[Video], done: dict[Video, Outcome], failed: dict[Video, str], out: str
) -> None:
    """What became of the set; OUT/failures.csv."""
    before = sum(video.version[0] for video in done if video.version)
    after = sum(outcome.disk_space for outcome in done.values())
    ways = Counter(outcome.how for outcome in done.values())
    parts = ", ".join(f"{count} {how}" for how, count in sorted(ways.items())) or "none"
    print(
        f"{len(done)} of {len(found)} videos are in {out} ({parts}): "
        f"{in_bytes(before)} became {in_bytes(after)}"
    )
    rows = [(video.source, "no", reason) for video, reason in failed.items()]
    rows += [(video.source, "yes", done[video].damage) for video in done if done[video].damage]
    rows.sort()
    with atomic_text(os.path.join(out, FAILURES), errors="surrogateescape") as file:
        csv.writer(file, lineterminator="\n").writerows([("video", "prepared", "reason"), *rows])
    if not rows:
        return
    print(f"{len(failed)} failed, {len(rows) - len(failed)} are damaged: {out}/{FAILURES}")
    shown = [(printable(source), *rest) for source, *rest in rows[:_SHOWN_FAILURES]]
    width = max(len(source) for source, *_ in shown)
    for source, prepared, reason in shown:
        outcome = "failed" if prepared == "no" else "damaged"
        print(f"  {source:<{width}}  {outcome:<7}  {reason}")
    if len(rows) > _SHOWN_FAILURES:
        print(f"  and {len(rows) - _SHOWN_FAILURES} more")
