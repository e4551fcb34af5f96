"""What the command lines share: the parser, and flags that several of them have."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from slowfast_lara.errors import (
    BAD_INPUT,
    STOPPED,
    InputError,
    Interrupted,
    print_error,
    run_with_exit_code,
)

_KEY_WITH_NODE = re.compile(r"[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)+")


class OneLineParser(argparse.ArgumentParser):
    """No abbreviated flags; help as it is written; errors in one line, without the usage."""

    def __init__(self, **options: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": form, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        print_error(message)
        raise SystemExit(BAD_INPUT)


def positive_int(text: str) -> int:
    """The type of a flag: a whole number from 1 on."""
    number = int(text) if text.strip().isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; a whole number of at least 1 is expected")
    return number


def existing_file(text: str) -> str:
    """The type of a flag: a file to read."""
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text!r}; an existing file is expected")
    return text


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="instead of RUN: the model's weights (RUN/checkpoints/*.pyth)",
    )
    parser.add_argument(
        "--cfg",
        metavar="FILE_OR_NAME",
        help="with --checkpoint: the model's config, if the checkpoint's own is not wanted",
    )
    parser.add_argument(
        "--opts", action="store_true", help="may stand before KEY VALUE pairs; not needed"
    )


def split_model(
    args: argparse.Namespace, words: Sequence[str]
) -> tuple[tuple[str, str | None], list[str]]:
    """What `load` is to be given by the flags or by the first word, and the words left."""
    if args.checkpoint:
        return (args.cfg, args.checkpoint) if args.cfg else (args.checkpoint, None), [*words]
    if args.cfg:
        raise InputError("--cfg comes with --checkpoint: the weights of the model")
    if not words:
        raise InputError("no run given; see --help")
    return (words[0], None), [*words[1:]]


def add_classes_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--classes",
        metavar="FILE",
        help="names of the classes: a JSON list, a JSON object of names and numbers, or text with "
        "a name a line (default: those in the checkpoint, else classes.json in the config's "
        "DATA.PATH_TO_DATA_DIR, else numbers)",
    )


def add_jobs_argument(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--jobs", type=positive_int, default=os.cpu_count(), help=f"{what} (default: the cores)"
    )


def add_study_arguments(
    parser: argparse.ArgumentParser, work: str, seeds: int | None = 5, seeds_by_default: str = "5"
) -> None:
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows")
    parser.add_argument(
        "--seeds",
        type=positive_int,
        default=seeds,
        help=f"how many, from 0 (default {seeds_by_default})",
    )
    add_jobs_argument(parser, "runs at a time, each with one thread")
    parser.add_argument("--work", default=work, help="where the runs and videos are kept")
    parser.add_argument("--out", default="results", help="where the result is written")
    parser.add_argument(
        "--opts",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="KEY VALUE",
        help="config keys for all runs; last on the line",
    )


def run_study(study: Callable[[], str]) -> int:
    """Do a study and print its tables; the exit code."""
    # So that running runs are stopped, and save themselves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))

    def command() -> None:
        try:
            print(study(), end="")
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command goes on from there") from None

    return run_with_exit_code(command)


def add_table_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="PATH", help="also write PATH.csv and PATH.png")


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files, and config overrides (KEY VALUE KEY VALUE ...) among them.

    A word is a key if it looks like one and no file has that name.
    """
    from slowfast_lara.config import get_cfg

    top_level = set(get_cfg())
    files: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        looks_like_key = _KEY_WITH_NODE.fullmatch(word) or word in top_level
        if looks_like_key and not os.path.exists(word):
            overrides += [word, *([value] if (value := next(rest, None)) is not None else [])]
        else:
            files.append(word)
    return files, overrides
