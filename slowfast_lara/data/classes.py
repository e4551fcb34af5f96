"""Class names from a JSON list, a JSON object {name: number}, or lines of text."""

from __future__ import annotations

import os
from typing import Any

from slowfast_lara.data.text_files import load_json, open_text
from slowfast_lara.errors import DataError

# The dataset tools write this file next to the lists.
DEFAULT_NAME = "classes.json"


def class_names(path: str | None, count: int, data_dir: str) -> list[str]:
    """Read `count` names from `path`.

    If `path` is None, read classes.json in `data_dir`, or return `numbered` names if it is missing.
    """
    if path is None:
        return names_in(data_dir, count) or numbered(count)
    return _checked_names(path, count)


def numbered(count: int) -> list[str]:
    """Placeholder names: class 0, class 1, ..."""
    return [f"class {number}" for number in range(count)]


def names_in(data_dir: str, count: int) -> list[str] | None:
    """Read `count` names from classes.json in `data_dir`; None if there is no such file."""
    path = os.path.join(data_dir, DEFAULT_NAME)
    # An empty data_dir must not mean the working directory.
    return _checked_names(path, count) if data_dir and os.path.isfile(path) else None


def _checked_names(path: str, count: int) -> list[str]:
    names = read_names(path)
    if sorted(names) != list(range(count)):
        raise DataError(
            f"{path} names {len(names)} classes, with numbers {min(names, default=0)} to "
            f"{max(names, default=0)}; the model has {count} classes (MODEL.NUM_CLASSES)"
        )
    return [names[number] for number in range(count)]


def read_names(path: str) -> dict[int, str]:
    """Read a file of class names as {number: name}."""
    with open_text(path) as file:
        text = file.read()
    if text.lstrip()[:1] not in ("[", "{"):
        return dict(enumerate(line.strip() for line in text.splitlines() if line.strip()))
    content = load_json(text, path)
    if isinstance(content, list):
        return dict(enumerate(map(_unquoted, content)))
    return _names_by_number(content, path)


def _names_by_number(content: dict[str, Any], path: str) -> dict[int, str]:
    """Invert PySlowFast's {name: number}; Something-Something stores the numbers as strings."""
    names: dict[int, str] = {}
    for name, value in content.items():
        try:
            number = int(str(value))
        except ValueError:
            raise DataError(f"{path}: {name!r:.60} has number {value!r:.40}, not an int") from None
        if number in names:
            raise DataError(
                f"{path}: {names[number]!r:.60} and {name!r:.60} both have number {number}"
            )
        names[number] = _unquoted(name)
    return names


def _unquoted(value: Any) -> str:
    name = str(value).strip()
    # In PySlowFast's file for Kinetics, the JSON strings contain quotes around the names.
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] == '"' else name
