"""Result table for time and memory of attentions, relative to a baseline."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.tables import plot_over_sizes
from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.drawing import saved_figure

MEGABYTE = 2**20


@dataclass(frozen=True)
class Cost:
    """Seconds of one attention at one size (forward; forward + backward), and peak bytes."""

    size: int
    name: str
    forward: float
    both: float
    memory: float


@dataclass
class SpeedTable(ResultTable):
    """Costs of attentions, each with its ratio to the baseline of the same size."""

    size_name: str
    baseline: str
    costs: list[Cost] = field(default_factory=list)

    def figures(self, cost: Cost) -> tuple[float, float, float, float, float, float]:
        """Forward ms, speed-up, forward + backward ms, speed-up, peak MB, ratio to baseline MB."""
        base = next(c for c in self.costs if (c.size, c.name) == (cost.size, self.baseline))
        return (
            cost.forward * 1e3,
            base.forward / cost.forward,
            cost.both * 1e3,
            base.both / cost.both,
            cost.memory / MEGABYTE,
            cost.memory / base.memory,
        )

    def cells(self) -> Cells:
        rows = [[self.size_name, "attention", "forward", "forward+backward", "peak memory"]]
        for cost in self.costs:
            forward, forward_ratio, both, both_ratio, memory, share = self.figures(cost)
            rows.append(
                [
                    str(cost.size),
                    cost.name,
                    f"{forward:.0f} ms ({forward_ratio:>4.1f}x)",
                    f"{both:.0f} ms ({both_ratio:>4.1f}x)",
                    f"{memory:.0f} MB ({share:>4.0%})",
                ]
            )
        return rows

    def csv_cells(self) -> Cells:
        figures = "forward_ms forward_speedup both_ms both_speedup peak_memory_mb memory_share"
        rows = [[c.size, c.name, *(f"{x:.3f}" for x in self.figures(c))] for c in self.costs]
        return [[self.size_name, "attention", *figures.split()], *rows]

    def plot(self, path: str) -> None:
        sizes = list(dict.fromkeys(cost.size for cost in self.costs))
        quantities = {0: "forward, ms", 2: "forward + backward, ms", 4: "peak memory, MB"}
        with saved_figure(path, (13, 4), columns=3) as (figure, axes):
            for axis, (index, value_name) in zip(axes, quantities.items()):
                values: dict[str, list[float]] = {}
                for cost in self.costs:
                    values.setdefault(cost.name, []).append(self.figures(cost)[index])
                plot_over_sizes(axis, self.size_name, sizes, value_name, values)
            figure.suptitle(self.title)
