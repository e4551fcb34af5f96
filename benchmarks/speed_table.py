"""Time and memory of attentions as a table, a CSV file and a plot."""

from __future__ import annotations

from dataclasses import dataclass, field

from slowfast_lara.analysis.result_files import (
    aligned_table,
    csv_text,
    measured_on,
    plot_over_sizes,
)
from slowfast_lara.drawing import saved_figure
from slowfast_lara.files import write_text

MEGABYTE = 2**20


@dataclass(frozen=True)
class Cost:
    """One attention at one size: seconds, seconds and bytes."""

    size: int
    name: str
    forward: float
    both: float
    memory: float


@dataclass
class SpeedTable:
    """Costs, each beside the baseline's of the same size."""

    title: str
    size_name: str
    baseline: str
    costs: list[Cost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def head(self) -> list[str]:
        return [self.title, measured_on(), *self.notes]

    def figures(self, cost: Cost) -> tuple[float, float, float, float, float, float]:
        """Milliseconds, ratio, milliseconds, ratio, megabytes, share."""
        base = next(c for c in self.costs if (c.size, c.name) == (cost.size, self.baseline))
        return (
            cost.forward * 1e3,
            base.forward / cost.forward,
            cost.both * 1e3,
            base.both / cost.both,
            cost.memory / MEGABYTE,
            cost.memory / base.memory,
        )

    def text(self) -> str:
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
        return "\n".join([*self.head(), aligned_table(rows, names=1)])

    def csv(self) -> str:
        figures = "forward_ms forward_speedup both_ms both_speedup peak_memory_mb memory_share"
        rows = [[self.size_name, "attention", *figures.split()]]
        for cost in self.costs:
            rows.append([str(cost.size), cost.name, *(f"{x:.3f}" for x in self.figures(cost))])
        return csv_text(rows, self.head())

    def write(self, path: str) -> None:
        """PATH.csv and PATH.png."""
        write_text(f"{path}.csv", self.csv())
        sizes = list(dict.fromkeys(cost.size for cost in self.costs))
        quantities = {0: "forward, ms", 2: "forward + backward, ms", 4: "peak memory, MB"}
        with saved_figure(f"{path}.png", (13, 4), columns=3) as (figure, axes):
            for axis, (place, value_name) in zip(axes, quantities.items()):
                values: dict[str, list[float]] = {}
                for cost in self.costs:
                    values.setdefault(cost.name, []).append(self.figures(cost)[place])
                plot_over_sizes(axis, self.size_name, sizes, value_name, values)
            figure.suptitle(self.title)
