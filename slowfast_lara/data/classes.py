"""Names of classes: a JSON list, a JSON object of names and numbers, or lines of text."""

from __future__ import annotations

import os
from typing import Any

from slowfast_lara.errors import DataError
from slowfast_lara.files import parse_json

# What datasets/ writes beside the lists.
DEFAULT_NAME = "classes.json"
# The names of 20,000 classes have a tenth of this.
MOST_CHARACTERS = 10_000_000


def class_names(path: str | None, count: int, data_dir: str) -> list[str]:
    """`count` names: of the file, or of the one in `data_dir`; numbers where there is none."""
    if path is None:
        return names_in(data_dir, count) or numbered(count)
    return _names_of(path, count)


def numbered(count: int) -> list[str]:
    return [f"class {number}" for number in range(count)]


def names_in(data_dir: str, count: int) -> list[str] | None:
    """The `count` names beside the lists of a dataset, if they are there."""
    path = os.path.join(data_dir, DEFAULT_NAME)
    # Without a data_dir, the file would be that of whatever folder one is in.
    return _names_of(path, count) if data_dir and os.path.isfile(path) else None


def _names_of(path: str, count: int) -> list[str]:
    names = read_names(path)
    wrong = [number for number in names if not 0 <= number < count]
    if wrong or len(names) != count:
        raise DataError(
            f"{path} names {len(names)} classes, numbers {min(names, default=0)} to "
            f"{max(names, default=0)}; the model has {count} (MODEL.NUM_CLASSES)"
        )
    return [names[number] for number in range(count)]


def read_names(path: str) -> dict[int, str]:
    """Names by number."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise DataError(f"cannot read the class names {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: class names are expected as UTF-8 text or JSON") from None
    if len(text) > MOST_CHARACTERS:
        raise DataError(f"{path}: class names in at most {MOST_CHARACTERS} characters are expected")
    if text.lstrip()[:1] not in ("[", "{"):
        return dict(enumerate(line.strip() for line in text.splitlines() if line.strip()))
    try:
        content = parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    return (
        dict(enumerate(map(_name, content))) if isinstance(content, list) else _by_id(content, path)
    )


def _by_id(content: dict[str, Any], path: str) -> dict[int, str]:
    """PySlowFast's form, name to number; Something-Something has the numbers as text."""
    names: dict[int, str] = {}
    for name, value in content.items():
        try:
            number = int(str(value))
        except ValueError:
            raise DataError(
                f"{path}: {name!r:.60} has number {value!r:.40}; "
                "a JSON object is expected to map names to class numbers"
            ) from None
        if number in names:
            raise DataError(
                f"{path}: {names[number]!r:.60} and {name!r:.60} both have number {number}"
            )
        names[number] = _name(name)
    return names


def _name(value: Any) -> str:
    name = str(value).strip()
    # PySlowFast's file of Kinetics has quotes around the names, inside the JSON's own.
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] == '"' else name
