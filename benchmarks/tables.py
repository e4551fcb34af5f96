"""Markdown output of result tables, and plots of values against a size."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.drawing import attention_styles, lines_or_bars
from slowfast_lara.files import write_text


@dataclass
class MarkdownTable(ResultTable):
    """A result table that is also written as a Markdown file."""

    def markdown(self) -> str:
        items = "\n".join(map(_list_item, self.head()[1:]))
        parts = [f"# {self.title}", items, markdown_table(self.cells()), *self.footer()]
        return "\n\n".join(parts) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write PATH.csv and PATH.md, and PATH.png if there is a plot."""
        super().write(path)
        write_text(f"{path}.md", self.markdown())


def _list_item(line: str) -> str:
    """A Markdown list item, wrapped at 100 characters unless it is a command."""
    if line.startswith("`"):
        return f"- {line}"
    return textwrap.fill(f"- {line}", 100, subsequent_indent="  ", break_on_hyphens=False)


def markdown_table(rows: Cells) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([lines[0], f"| {' | '.join(['---'] * len(rows[0]))} |", *lines[1:]])


def plot_over_sizes(
    axis: Axes,
    size_name: str,
    sizes: Sequence[int],
    value_name: str,
    values: Mapping[str, Sequence[float]],
) -> None:
    """Draw lines on logarithmic axes, or bars if there is only one size."""
    lines_or_bars(axis, sizes, values, attention_styles([*values]))
    if len(sizes) == 1:
        axis.set_xlabel(f"{value_name} ({size_name}: {sizes[0]})")
        return
    axis.set(xscale="log", yscale="log", xlabel=size_name, ylabel=value_name)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_xticks([], minor=True)
    axis.legend(fontsize=8)
