"""Result table for the estimates of `python -m benchmarks roofline`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.tables import plot_over_sizes
from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.drawing import saved_figure


class PassCost(NamedTuple):
    """Launches, bytes, FLOPs and estimated seconds of a forward or a backward pass."""

    launches: int
    bytes: int
    flops: int
    seconds: float


@dataclass
class RooflineTable(ResultTable):
    # (crop, frames, part of a block) -> costs of the forward and of the backward pass.
    costs: dict[tuple[int, int, str], tuple[PassCost, PassCost]] = field(default_factory=dict)

    def head(self) -> list[str]:
        # Omits the hardware of this machine, which does not affect the estimates.
        return [self.title, *self.notes]

    def both(self, crop: int, frames: int, part: str) -> float:
        """Estimated seconds of the forward and backward pass together."""
        return sum(cost.seconds for cost in self.costs[crop, frames, part])

    def cells(self) -> Cells:
        titles = ["crop", "frames", "part", "kernels", "GB", "GFLOP", "forward", "backward"]
        rows: list[list[object]] = [[*titles, "both", "of exact"]]
        for (crop, frames, part), passes in self.costs.items():
            launches, moved, flops, _ = (sum(pair) for pair in zip(*passes))
            both = self.both(crop, frames, part)
            rows.append(
                [
                    *(crop, frames, part, launches, f"{moved / 1e9:.2f}", f"{flops / 1e9:.0f}"),
                    *(f"{cost.seconds * 1e3:.2f} ms" for cost in passes),
                    *(f"{both * 1e3:.2f} ms", f"{both / self.both(crop, frames, 'exact'):.2f}"),
                ]
            )
        return rows

    def csv_cells(self) -> Cells:
        titles = ["crop", "frames", "part", "pass", "kernels", "bytes", "flops", "estimated_ms"]
        rows: list[list[object]] = [list(titles)]
        for key, passes in self.costs.items():
            for direction, cost in zip(("forward", "backward"), passes):
                rows.append([*key, direction, *cost[:3], f"{cost.seconds * 1e3:.4f}"])
        return rows

    def plot(self, path: str) -> None:
        """Plot time and traffic against the crop size, or the frames if there is only one crop."""
        crops, frames, parts = (list(dict.fromkeys(column)) for column in zip(*self.costs))
        over_crops = len(crops) > 1
        sizes = crops if over_crops else frames
        keys = [(s, frames[0]) if over_crops else (crops[0], s) for s in sizes]
        with saved_figure(path, (13, 5), columns=2) as (figure, axes):
            for axis, (unit, index, scale) in zip(axes, (("ms", 3, 1e3), ("GB", 1, 1e-9))):
                values = {
                    part: [
                        sum(cost[index] for cost in self.costs[*key, part]) * scale
                        if (*key, part) in self.costs
                        else math.nan  # the kernels do not support this size
                        for key in keys
                    ]
                    for part in parts
                }
                label = f"forward + backward, {unit}"
                plot_over_sizes(axis, "crop" if over_crops else "frames", sizes, label, values)
            fixed = f"{frames[0]} frames" if over_crops else f"{crops[0]} pixels"
            figure.suptitle(f"{self.title}; {fixed}", fontsize=9)
