"""Class names from JSON (a list or {name: number}), lines of text, or EPIC-KITCHENS' CSV files."""

from __future__ import annotations

import csv
import os
from typing import Any

from slowfast_lara.data.text_files import load_json, open_text
from slowfast_lara.errors import DataError

# The dataset tools write classes.json next to the lists.
DEFAULT_NAME = "classes.json"
_SSV2_NAME = "something-something-v2-labels.json"


def class_names(path: str | None, count: int, data_dir: str) -> list[str]:
    """Read `count` names from `path`.

    If `path` is None, use `names_in(data_dir)`; if that finds no file, return `numbered` names.
    """
    if path is None:
        return names_in(data_dir, count) or numbered(count)
    return _checked_names(path, count)


def numbered(count: int) -> list[str]:
    """Placeholder names: class 0, class 1, ..."""
    return [f"class {number}" for number in range(count)]


def names_in(data_dir: str, count: int) -> list[str] | None:
    """Read `count` names from the first known file in `data_dir`; None if there is no such file.

    The known files are, in this order: classes.json, the labels of Something-Something-v2, and the
    verbs and nouns of EPIC-KITCHENS.
    """
    if not data_dir:  # an empty path would mean the working directory
        return None
    for name in (DEFAULT_NAME, _SSV2_NAME):
        path = os.path.join(data_dir, name)
        if os.path.isfile(path):
            return _checked_names(path, count)
    parts = [os.path.join(data_dir, f"EPIC_100_{part}_classes.csv") for part in ("verb", "noun")]
    if not all(map(os.path.isfile, parts)):
        return None
    verbs, nouns = map(_kitchen_names, parts)
    if len(verbs) + len(nouns) != count:
        files = " and ".join(parts)
        raise DataError(
            f"{files} name {len(verbs)} verbs and {len(nouns)} nouns; the model has {count} "
            "classes (MODEL.NUM_CLASSES verbs and EPICKITCHENS.NUM_NOUNS nouns)"
        )
    return verbs + nouns


def _kitchen_names(path: str) -> list[str]:
    """Read the names in column `key` of a CSV file, in the order of the numbers in column `id`."""
    with open_text(path, newline="") as file:
        try:
            names = {int(row["id"]): row["key"] for row in csv.DictReader(file)}
        except (csv.Error, KeyError, TypeError, ValueError):
            raise DataError(
                f"{path}: expected a CSV file with the columns id (integers) and key"
            ) from None
    if sorted(names) != list(range(len(names))):
        raise DataError(f"{path}: the ids must be 0 to {len(names) - 1}")
    return [names[number] for number in range(len(names))]


def _checked_names(path: str, count: int) -> list[str]:
    names = read_names(path)
    if sorted(names) != list(range(count)):
        raise DataError(
            f"{path} names {len(names)} classes, with numbers {min(names, default=0)} to "
            f"{max(names, default=0)}; the model has {count} classes, 0 to {count - 1} "
            "(MODEL.NUM_CLASSES; with Epickitchens, plus EPICKITCHENS.NUM_NOUNS)"
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
