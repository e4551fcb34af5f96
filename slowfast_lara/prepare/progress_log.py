"""JSON Lines file of finished items, from which an interrupted command resumes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from slowfast_lara.files import open_in_place, parse_json, write_text


class ProgressLog:
    """File with one line `[name, *values]` per finished item; invalid lines are ignored."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.entries: dict[str, list[Any]] = {}
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    with contextlib.suppress(ValueError, TypeError):
                        name, *values = parse_json(line)
                        self.entries[str(name)] = values

    @contextlib.contextmanager
    def appending(self) -> Iterator[None]:
        """Rewrite the file without invalid lines, and keep it open for `add`."""
        lines = [json.dumps([name, *values]) + "\n" for name, values in self.entries.items()]
        write_text(self._path, "".join(lines))
        with open(self._path, "a", encoding="utf-8", opener=open_in_place) as self._file:
            yield

    def add(self, name: str, *values: Any) -> None:
        self.entries[name] = list(values)
        self._file.write(json.dumps([name, *values]) + "\n")
        self._file.flush()
