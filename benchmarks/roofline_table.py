"""The estimates of `benchmark roofline` as a table, a CSV file and a plot."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from slowfast_lara.analysis.result_files import aligned_table, csv_text, plot_over_sizes
from slowfast_lara.drawing import saved_figure
from slowfast_lara.files import write_text


class Row(NamedTuple):
    """A pass, forward or backward."""

    launches: int
    bytes: int
    flops: int
    seconds: float


@dataclass
class RooflineTable:
    device: str
    clips: int
    landmarks: int
    rows: dict[tuple[int, int, str], tuple[Row, Row]] = field(default_factory=dict)

    def add(self, crop: int, frames: int, name: str, forward: Row, backward: Row) -> None:
        self.rows[crop, frames, name] = forward, backward

    def both(self, crop: int, frames: int, name: str) -> float:
        """Seconds, forward and backward."""
        return sum(row.seconds for row in self.rows[crop, frames, name])

    def head(self) -> list[str]:
        return [
            f"estimated for one layer of ViT-B on an {self.device}: {self.clips} clips, bfloat16, "
            f"{self.landmarks} landmarks or samples; counted, not measured"
        ]

    def text(self) -> str:
        titles = ["crop", "frames", "part", "kernels", "GB", "GFLOP", "forward", "backward"]
        rows = [[*titles, "both", "of exact"]]
        for (crop, frames, name), passes in self.rows.items():
            launches, moved, flops, _ = (sum(pair) for pair in zip(*passes))
            both = self.both(crop, frames, name)
            rows.append(
                [
                    *(str(crop), str(frames), name, str(launches)),
                    *(f"{moved / 1e9:.2f}", f"{flops / 1e9:.0f}"),
                    *(f"{row.seconds * 1e3:.2f} ms" for row in passes),
                    *(f"{both * 1e3:.2f} ms", f"{both / self.both(crop, frames, 'exact'):.2f}"),
                ]
            )
        return "\n".join([*self.head(), aligned_table(rows, names=2)])

    def csv(self) -> str:
        rows: list[list[object]] = [
            ["crop", "frames", "part", "pass", "kernels", "bytes", "flops", "estimated_ms"]
        ]
        for (crop, frames, name), passes in self.rows.items():
            for direction, row in zip(("forward", "backward"), passes):
                milliseconds = f"{row.seconds * 1e3:.4f}"
                rows.append([crop, frames, name, direction, *row[:3], milliseconds])
        return csv_text(rows, self.head())

    def write(self, path: str) -> None:
        """PATH.csv and PATH.png: over the crops, or over the frames if there is one crop."""
        write_text(f"{path}.csv", self.csv())
        crops, numbers, names = (list(dict.fromkeys(column)) for column in zip(*self.rows))
        over_crops = len(crops) > 1
        sizes = crops if over_crops else numbers
        with saved_figure(f"{path}.png", (13, 5), columns=2) as (figure, axes):
            for axis, (title, place) in zip(axes, (("ms", 3), ("GB", 1))):
                values = {
                    name: [
                        sum(row[place] for row in self.rows[key]) * (1e3 if place == 3 else 1e-9)
                        if key in self.rows
                        else math.nan  # no kernel has this size
                        for key in (
                            (s, numbers[0], name) if over_crops else (crops[0], s, name)
                            for s in sizes
                        )
                    ]
                    for name in names
                }
                label = f"forward + backward, {title}"
                plot_over_sizes(axis, "crop" if over_crops else "frames", sizes, label, values)
            at = f"{numbers[0]} frames" if over_crops else f"{crops[0]} pixels"
            figure.suptitle(f"{self.head()[0]}; {at}", fontsize=9)
