"""Reading of the user's text and JSON files; every error is a DataError with the path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from slowfast_lara.errors import DataError
from slowfast_lara.files import check_regular_file, parse_json


@contextmanager
def open_text(path: str, **options: Any) -> Iterator[IO[Any]]:
    """Open a UTF-8 file, with or without a BOM; `options` are those of `open`."""
    try:
        check_regular_file(path)
        with open(path, **{"encoding": "utf-8-sig", **options}) as file:
            yield file
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: must be UTF-8 text ({error.reason})") from None


def load_json(text: str, path: str) -> Any:
    """Parse the text of the JSON file at `path`."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None
