"""Transcoding of all videos below a folder for fast reading (see reencode.py).

OUT/prepared.jsonl records the source, options and result of every finished video. The same command
resumes from this file, and transcodes a video again if its source or the options have changed.
OUT/failures.csv lists videos that failed, and prepared videos whose source is damaged.
"""

from __future__ import annotations

import contextlib
import csv
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from slowfast_lara.data.lists import VIDEO_SUFFIXES, videos_below
from slowfast_lara.data.timestamps import FileVersion, file_version
from slowfast_lara.errors import (
    DataError,
    DecodeError,
    InputError,
    RunError,
    counted,
    first_line,
    printable,
)
from slowfast_lara.files import atomic_text, csv_cell, remove_unfinished
from slowfast_lara.locks import exclusive_lock
from slowfast_lara.prepare.lists_prepared import (
    canonical_path,
    copy_class_files,
    read_lists,
    write_lists,
)
from slowfast_lara.prepare.progress_log import ProgressLog
from slowfast_lara.prepare.reencode import Options, PreparedVideo, prepare_video
from slowfast_lara.prepare.workers import ItemFailure, in_processes
from slowfast_lara.progress import Bar

RECORD, FAILURES = "prepared.jsonl", "failures.csv"
_SHOWN_FAILURES = 30
SAMPLE = 20  # maximum number of videos that a dry run prepares


class Task(NamedTuple):
    """One video to prepare."""

    source: str
    result: str
    version: FileVersion | None  # version of the source; None if the source cannot be read


def find_tasks(videos: str, out: str) -> list[Task]:
    """Find the videos below a folder, and name their results below OUT."""
    if not os.path.isdir(videos):
        raise InputError(f"{videos}: not a folder")
    real, real_out = os.path.realpath(videos), os.path.realpath(out)
    if os.path.commonpath([real, real_out]) in (real, real_out):
        raise InputError(f"{videos} and {out}: neither may be inside the other")
    # Skip results of earlier runs, which a symbolic link below `videos` may point to.
    found = [path for path in videos_below(videos) if not _is_below(real_out, path)]
    names = [os.path.relpath(path, videos) for path in found]
    if not names:
        raise DataError(f"{videos}: no videos ({', '.join(VIDEO_SUFFIXES)}) below it")
    return [
        Task(source, os.path.join(out, result), file_version(source))
        for name, result in result_names(names).items()
        for source in [os.path.join(videos, name)]
    ]


def _is_below(real_folder: str, path: str) -> bool:
    return os.path.realpath(path).startswith(os.path.join(real_folder, ""))


def result_names(names: list[str]) -> dict[str, str]:
    """Map each NAME.SUFFIX to NAME.mp4, or to NAME.SUFFIX.mp4 if several videos have this NAME.

    A file NAME.mp4 always keeps its name.
    """
    stems = Counter(os.path.splitext(name)[0] for name in names)
    results: dict[str, str] = {}
    for name in names:
        stem, suffix = os.path.splitext(name)
        is_unique = stems[stem] == 1 or suffix == ".mp4"
        results[name] = f"{stem if is_unique else name}.mp4"
    for result, count in Counter(results.values()).items():
        if count > 1:
            same = [name for name in names if results[name] == result]
            raise DataError(f"{' and '.join(same)} would both become {result}; rename one")
    return results


def prepare_set(
    videos: str, out: str, options: Options, *, jobs: int, time_limit: float, separator: str
) -> int:
    """Prepare the videos and lists of a folder; return the number of videos that failed."""
    tasks = find_tasks(videos, out)
    lists = read_lists(videos, separator)
    with exclusive_lock(out, "OUT"):
        record = Record(out, options)
        record.check_not_replaced(tasks, videos)
        try:
            done, failed = _prepare(tasks, out, record, options, jobs, time_limit)
            results = {canonical_path(task.source): task.result for task in done}
            write_lists(lists, results, out, separator)
            copy_class_files(videos, out)
            _report(len(tasks), done, failed, out)
        except BrokenPipeError:  # from `print` to a closed pipe: not a disk error
            raise
        except OSError as error:
            raise RunError(
                f"{error.filename or out}: {error.strerror}; finished videos are kept, "
                "and the same command resumes"
            ) from None
    return len(failed)


def _prepare(
    tasks: list[Task], out: str, record: Record, options: Options, jobs: int, time_limit: float
) -> tuple[dict[Task, PreparedVideo], dict[Task, str]]:
    """Prepare unfinished videos; return all results (also of earlier runs), and failure reasons."""
    reason = "the path contains line breaks, which lists do not allow"
    failed = {task: reason for task in tasks if len(task.source.splitlines()) > 1}
    done = {task: earlier for task in tasks if (earlier := record.find(task)) is not None}
    todo = [task for task in tasks if task not in done and task not in failed]
    with contextlib.ExitStack() as stack:
        for folder in {os.path.dirname(task.result) for task in tasks} | {out}:
            remove_unfinished(folder)  # removes temporary files of earlier runs
            stack.callback(remove_unfinished, folder)
        stack.enter_context(record.log.appending())
        bar = Bar(total=len(tasks), initial=len(tasks) - len(todo), unit="video", disable=None)
        results = in_processes(partial(prepare_one, options), todo, jobs, time_limit)
        with bar, contextlib.closing(results):
            for task, result in results:
                if isinstance(result, OSError):
                    raise result
                if isinstance(result, PreparedVideo):
                    record.add(task, result)
                    done[task] = result
                else:
                    failed[task] = result.reason
                    bar.set_postfix(failed=len(failed))
                bar.update()
    return done, failed


def prepare_one(options: Options, task: Task) -> PreparedVideo | ItemFailure | OSError:
    """Prepare a video; return (not raise) the OSError if the result cannot be written."""
    try:
        return prepare_video(task.source, task.result, options)
    except DecodeError as error:
        return ItemFailure(str(error).removeprefix(f"{task.source}: "))
    except OSError as error:  # a write error: read errors are DecodeErrors
        return OSError(error.errno or 0, error.strerror or first_line(error), task.result)
    except Exception as error:  # an error in one video must not stop the others
        return ItemFailure(f"{type(error).__name__}: {first_line(error)}")


class Record:
    """OUT/prepared.jsonl; a line has source, file version, options, result and result path."""

    def __init__(self, out: str, options: Options) -> None:
        self._out, self._options = out, list(options)
        self._path = os.path.join(out, RECORD)
        self.log = ProgressLog(self._path)

    def check_not_replaced(self, tasks: list[Task], videos: str) -> None:
        """Raise DataError if a result would overwrite the result of a video from another folder."""
        # Entries written by version 0.1 lack the path of the result.
        sources = {str(entry[3]): source for source, entry in self.log.entries.items() if entry[3:]}
        for task in tasks:
            other = sources.get(os.path.relpath(task.result, self._out))
            if (
                other is not None
                and os.path.realpath(other) != os.path.realpath(task.source)
                and not _is_below(os.path.realpath(videos), other)
                and os.path.lexists(task.result)
            ):
                raise DataError(
                    f"{task.result} was made from {other}, and {task.source} would replace it: "
                    f"use another OUT, or remove {self._path} if the videos were moved"
                )

    def find(self, task: Task) -> PreparedVideo | None:
        """Recorded result; None if there is none, or if source, options or result file changed."""
        try:
            version, options, values, *_ = self.log.entries[os.path.abspath(task.source)]
            known = PreparedVideo(*values)
            is_same = version == list(task.version or ()) and options == self._options
            return known if is_same and os.path.getsize(task.result) == known.size else None
        except (KeyError, ValueError, TypeError, OSError):
            return None

    def add(self, task: Task, result: PreparedVideo) -> None:
        # The source path is absolute, because several folders may be prepared into one OUT.
        source, relative = os.path.abspath(task.source), os.path.relpath(task.result, self._out)
        self.log.add(source, task.version, self._options, result, relative)


def _format_hours(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else counted(max(1, round(60 * hours)), "minute")


def _format_bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size > 1e9 else f"{size / 1e6:.1f} MB"


def _report(total: int, done: dict[Task, PreparedVideo], failed: dict[Task, str], out: str) -> None:
    """Print a summary and write OUT/failures.csv."""
    before = _total_bytes(done)
    after = sum(result.disk_space for result in done.values())
    methods = Counter(result.method for result in done.values())
    parts = ", ".join(f"{count} {method}" for method, count in sorted(methods.items())) or "none"
    print(
        f"{len(done)} of {total} videos are in {out} ({parts}): "
        f"{_format_bytes(before)} became {_format_bytes(after)}"
    )
    rows = [(task.source, "no", reason) for task, reason in failed.items()]
    rows += [(task.source, "yes", done[task].damage) for task in done if done[task].damage]
    rows.sort()
    with atomic_text(os.path.join(out, FAILURES), errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("video", "prepared", "reason"))
        writer.writerows(map(csv_cell, row) for row in rows)
    if rows:
        print(f"{len(failed)} failed, {len(rows) - len(failed)} are damaged; see {out}/{FAILURES}")
    for source, prepared, reason in rows[:_SHOWN_FAILURES]:
        print(f"  {printable(source)}  {'failed' if prepared == 'no' else 'damaged'}  {reason}")
    if len(rows) > _SHOWN_FAILURES:
        print(f"  and {len(rows) - _SHOWN_FAILURES} more")


def estimate_set(videos: str, out: str, options: Options, *, jobs: int, time_limit: float) -> int:
    """Prepare SAMPLE videos (or all, if fewer), print an estimate, return the failure count."""
    tasks = find_tasks(videos, out)
    step = max(len(tasks) / SAMPLE, 1)
    chosen = [tasks[int(number * step)] for number in range(min(SAMPLE, len(tasks)))]
    done: list[PreparedVideo] = []
    with tempfile.TemporaryDirectory() as folder:
        sample = [
            task._replace(result=os.path.join(folder, f"{number}.mp4"))
            for number, task in enumerate(chosen)
        ]
        for task, result in in_processes(partial(prepare_one, options), sample, jobs, time_limit):
            if isinstance(result, OSError):
                raise RunError(f"{result.filename}: {result.strerror}")
            if isinstance(result, PreparedVideo):
                done.append(result)
            else:
                print(f"{printable(task.source)}: {result.reason}")
    print(f"prepared {len(done)} of {len(sample)} videos as a trial; the set has {len(tasks)}")
    if done:
        # Time and disk space are assumed to be proportional to the size of the sources.
        scale = _total_bytes(tasks) / max(_total_bytes(sample), 1)
        hours = sum(result.seconds for result in done) * scale / jobs / 3600
        size = sum(result.disk_space for result in done) * scale
        print(
            f"the whole set: about {_format_hours(hours)} with {counted(jobs, 'process')}, "
            f"{_format_bytes(_total_bytes(tasks))} become about {_format_bytes(size)}"
        )
    return len(sample) - len(done)


def _total_bytes(tasks: Iterable[Task]) -> int:
    return sum(task.version[0] for task in tasks if task.version)
