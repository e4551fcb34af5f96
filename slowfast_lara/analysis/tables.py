"""Result tables as text and CSV, with a head: title, hardware, versions, date."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slowfast_lara.analysis.measure import environment
from slowfast_lara.files import write_text

Cells = Sequence[Sequence[object]]


@dataclass
class ResultTable:
    """A table of results with a title and notes; subclasses implement at least `cells`."""

    title: str
    notes: list[str] = field(default_factory=list, kw_only=True)

    def head(self) -> list[str]:
        return [self.title, environment_line(), *self.notes]

    def cells(self) -> Cells:
        """The header and the rows, formatted for the terminal."""
        raise NotImplementedError

    def csv_cells(self) -> Cells:
        """The header and the rows of the CSV file."""
        return self.cells()

    def footer(self) -> list[str]:
        """Lines that are printed below the table."""
        return []

    def plot(self, path: str) -> None:
        """Write a plot as a PNG file; the base class writes nothing."""

    def text(self) -> str:
        return "\n".join([*self.head(), aligned_table(self.cells()), *self.footer()])

    def csv(self) -> str:
        return csv_text(self.csv_cells(), self.head())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write PATH.csv, and PATH.png if there is a plot."""
        write_text(f"{path}.csv", self.csv())
        self.plot(f"{path}.png")


def environment_line() -> str:
    """Hardware, versions and date as one line of text."""
    return ", ".join(f"{key} {value}" for key, value in environment().items())


def csv_text(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """CSV text: the lines of `head` as # comments, then the rows."""
    file = io.StringIO()
    file.writelines(f"# {line}\n" for line in head)
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def aligned_table(rows: Cells) -> str:
    """Rows as text, with columns of numbers right-aligned and others left-aligned."""
    columns = [[str(cell) for cell in column] for column in zip(*rows)]
    widths = [max(map(len, column)) for column in columns]
    signs = [">" if any(_starts_number(cell) for cell in c[1:]) else "<" for c in columns]
    return "\n".join(
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths)).rstrip()
        for row in zip(*columns)
    )


def _starts_number(cell: str) -> bool:
    return cell[:1].isdigit() or (cell[:1] in "+-" and cell[1:2].isdigit())
