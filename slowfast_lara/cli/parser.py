"""Argument parser with subcommands, argument types, and flags that several subcommands share."""

from __future__ import annotations

import argparse
import difflib
import inspect
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from slowfast_lara.errors import BAD_INPUT, InputError, print_error

Handler = Callable[[argparse.Namespace], int | None]
ModelFiles = tuple[str, str | None]  # arguments of `slowfast_lara.load`

_DOTTED_KEY = re.compile(r"[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)+")
_KEY_VALUE = re.compile(r"([A-Z][A-Z0-9_.]*)=(.*)")


class CommandParser(argparse.ArgumentParser):
    """An argument parser with subcommands and one-line error messages.

    A parser without subcommands has a handler, which returns the exit code (None means 0). With
    `bare_overrides`, arguments that are not flags are KEY VALUE pairs; they are stored as `opts`.
    """

    def __init__(
        self, *, handler: Handler | None = None, bare_overrides: bool = False, **options: Any
    ) -> None:
        form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
        super().__init__(**{"formatter_class": form, "allow_abbrev": False, **options})
        self.handler, self.bare_overrides = handler, bare_overrides
        self.subcommands: dict[str, CommandParser] = {}
        self._group: Any = None

    def add_command(
        self, name: str, handler: Handler | None = None, description: str = "", **options: Any
    ) -> CommandParser:
        """Add a subcommand; its description defaults to the docstring of the handler."""
        description = inspect.cleandoc(description or (handler and handler.__doc__) or "")
        summary = description.split("\n")[0].rstrip(".")
        if self._group is None:
            self._group = self.add_subparsers(metavar="SUBCOMMAND")
        self.subcommands[name] = self._group.add_parser(
            name,
            handler=handler,
            description=description,
            help=summary[:1].lower() + summary[1:],
            **options,
        )
        if handler is not None:
            code = "import attentions and datasets of your own; may be repeated"
            options = {"action": "append", "default": [], "metavar": "FILE.py|MODULE"}
            self.subcommands[name].add_flag("--import", code, dest="imports", **options)
        return self.subcommands[name]

    def add_flag(self, name: str, meaning: str, **options: Any) -> None:
        """Add a flag; the default value, if any, is appended to its help text."""
        default = options.get("default")
        if default:
            words = default if isinstance(default, list) else [default]
            meaning += f" (default: {' '.join(map(str, words))})"
        self.add_argument(name, help=meaning, **options)

    def parse_arguments(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse flags and positional arguments in any order."""
        self._check_flags(words)
        if not self.bare_overrides:
            return self.parse_intermixed_args(list(self._with_lists_ended(words)))
        # No positional arguments: argparse would take a value such as -1e-4 for a flag.
        args, opts = self.parse_known_args(words)
        for key in opts[::2]:
            if key.startswith("-"):
                self.error(f"unknown flag {key}; see --help")
        return argparse.Namespace(**{**vars(args), "opts": opts})

    def _check_flags(self, words: Sequence[str]) -> None:
        """Report an unknown flag before argparse reports that another argument is missing."""
        for word in itertools.takewhile(lambda word: word != "--", words):
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                known = [name.strip("-") for name in self._option_string_actions]
                similar = difflib.get_close_matches(flag.strip("-"), known, n=1)
                hint = f"did you mean --{similar[0]}?" if similar else "see --help"
                self.error(f"unknown flag {flag}; {hint}")

    def _with_lists_ended(self, words: Sequence[str]) -> Iterator[str]:
        """Insert --opts before a config key that follows the values of a flag such as --landmarks.

        Otherwise argparse would take the key as one more value of the flag.
        """
        in_list = False
        for word in words:
            flag = self._option_string_actions.get(word)
            if flag is not None:
                in_list = flag.nargs == "+" and "--opts" in self._option_string_actions
            elif in_list and word.partition("=")[0].isupper():
                # This word is a config key: the values of --attentions are in lower case.
                in_list = False
                yield "--opts"
            yield word

    def error(self, message: str) -> NoReturn:
        print_error(message)
        raise SystemExit(BAD_INPUT)


def positive_int(text: str) -> int:
    """Argument type: an integer of at least 1."""
    number = int(text) if text.strip().isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return number


def positive_float(text: str) -> float:
    """Argument type: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def regular_expression(text: str) -> str:
    """Argument type: a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"invalid regular expression {text!r}: {error}") from None
    return text


def crop_size(text: str) -> int:
    """Argument type: pixels, a multiple of the patch size 16."""
    size = positive_int(text)
    if size % 16:
        raise argparse.ArgumentTypeError(f"expected a multiple of 16, got {text!r}")
    return size


def add_size_flags(parser: CommandParser, clips: tuple[str, int] = ("batch size", 8)) -> None:
    crops = [224, 336, 448]
    sizes = {"type": crop_size, "nargs": "+", "default": crops, "metavar": "PIXELS"}
    parser.add_flag("--crops", "crop sizes", **sizes)
    parser.add_flag("--clips", clips[0], type=positive_int, default=clips[1])


def add_jobs_flag(parser: CommandParser, meaning: str = "parallel processes") -> None:
    parser.add_argument(
        "--jobs", type=positive_int, default=os.cpu_count(), help=f"{meaning} (default: all cores)"
    )


def add_table_flag(parser: CommandParser, endings: str = "PATH.csv and PATH.png") -> None:
    parser.add_flag("--out", f"also write {endings}", metavar="PATH")


def add_classes_flag(parser: CommandParser) -> None:
    parser.add_flag(
        "--classes",
        "class names: a JSON list, a JSON object of names and indices, or text with one name per "
        "line (default: the names in the checkpoint, or else in classes.json of "
        "DATA.PATH_TO_DATA_DIR, or else indices)",
        metavar="FILE",
    )


def add_model_arguments(parser: CommandParser, metavar: str, positional: str) -> None:
    """Add the flags that select a model, and the positional arguments: run, files, overrides."""
    weights = "load this checkpoint (RUN/checkpoints/*.pyth) instead of RUN"
    parser.add_flag("--checkpoint", weights, metavar="FILE")
    config = "with --checkpoint: use this config instead of the config in the checkpoint"
    parser.add_flag("--cfg", config, metavar="FILE_OR_NAME")
    add_opts_marker(parser)
    meaning = f"{positional}; also KEY VALUE pairs that override the config"
    parser.add_argument("words", nargs="*", metavar=metavar, help=meaning)


def add_opts_marker(parser: CommandParser) -> None:
    meaning = "optional word before the KEY VALUE pairs, without effect"
    parser.add_flag("--opts", meaning, action="store_true")


def model_and_files(args: argparse.Namespace) -> tuple[ModelFiles, list[str], list[str]]:
    """Split the positional arguments into the model, other files and config overrides."""
    words, overrides = split_overrides(args.words)
    if args.checkpoint:
        files = (args.cfg, args.checkpoint) if args.cfg else (args.checkpoint, None)
        return files, words, overrides
    if args.cfg:
        raise InputError("--cfg needs --checkpoint: the weights of the model")
    if not words:
        raise InputError("no run given; see --help")
    return (words[0], None), words[1:], overrides


def only_model(args: argparse.Namespace) -> tuple[ModelFiles, list[str]]:
    """The model and the config overrides of a command that takes no other files."""
    model_files, rest, overrides = model_and_files(args)
    if rest:
        raise InputError(f"{rest[0]!r} is neither a run nor a config key; see --help")
    return model_files, overrides


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into files and config overrides (KEY VALUE KEY VALUE ...).

    A word is a key if it has the form of a config key and no file has this name.
    """
    from slowfast_lara.config import get_cfg  # imports PyTorch

    top_level = set(get_cfg())
    files: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        match = _KEY_VALUE.fullmatch(word)
        if match and not os.path.exists(word):
            raise InputError(f"{word!r}: write {match[1]} {match[2] or 'VALUE'}, without '='")
        is_key = _DOTTED_KEY.fullmatch(word) or word in top_level
        if is_key and not os.path.exists(word):
            overrides += [word, *([value] if (value := next(rest, None)) is not None else [])]
        else:
            files.append(word)
    return files, overrides


def print_table(table: Any, path: str | None) -> None:
    """Print a result table, and also write it to files if a path is given."""
    print(table.text())
    if path:
        table.write(path)
