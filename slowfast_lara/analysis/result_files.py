"""What all experiments write alike: tables for programs and people, and plots over sizes."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from slowfast_lara.analysis.measure import environment
from slowfast_lara.drawing import lines_or_bars


def measured_on() -> str:
    """Hardware, versions and date, as one line."""
    return ", ".join(f"{key} {value}" for key, value in environment().items())


def csv_text(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Rows as CSV, after lines that begin with #."""
    file = io.StringIO()
    file.writelines(f"# {line}\n" for line in head)
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def aligned_table(rows: Sequence[Sequence[str]], names: int = 0) -> str:
    """Rows for a terminal: cells to the right, but those of the column of names."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            f"{cell:{'<' if place == names else '>'}{width}}"
            for place, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"| {' | '.join(['---'] * len(rows[0]))} |", *lines[1:]])


def mean_and_spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation where there are several."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def plot_over_sizes(
    axis: Axes,
    size_name: str,
    sizes: Sequence[int],
    value_name: str,
    values: Mapping[str, Sequence[float]],
) -> None:
    """Lines on logarithmic axes; of a single size, bars."""
    lines_or_bars(axis, sizes, values, "o-")
    if len(sizes) == 1:
        axis.set_xlabel(f"{value_name} ({size_name}: {sizes[0]})")
        return
    axis.set(xscale="log", yscale="log", xlabel=size_name, ylabel=value_name)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_xticks([], minor=True)
    axis.legend(fontsize=8)
