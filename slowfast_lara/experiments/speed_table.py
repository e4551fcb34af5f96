"""Results of a benchmark as a table, a CSV file and a plot."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field

from slowfast_lara.files import write_text, written_aside


@dataclass
class Row:
    """One attention at one size: seconds, seconds and bytes."""

    size: int
    name: str
    forward: float
    both: float
    memory: float


@dataclass
class Report:
    """Measurements, each beside the baseline's of the same size."""

    title: str
    size_name: str
    baseline: str
    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, size: int, name: str, forward: float, both: float, memory: float) -> None:
        self.rows.append(Row(size, name, forward, both, memory))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def baseline_of(self, row: Row) -> Row:
        return next(r for r in self.rows if r.size == row.size and r.name == self.baseline)

    def head(self) -> list[str]:
        facts = ", ".join(f"{key} {value}" for key, value in self.environment.items())
        return [self.title, facts, *self.notes]

    def table(self) -> str:
        lines = [
            *self.head(),
            f"{self.size_name:>7}  {'attention':<14} {'forward':>17} {'forward+backward':>19} "
            f"{'peak memory':>17}",
        ]
        for row in self.rows:
            base = self.baseline_of(row)
            lines.append(
                f"{row.size:>7}  {row.name:<14} "
                f"{row.forward * 1e3:>7.0f} ms ({base.forward / row.forward:>4.1f}x) "
                f"{row.both * 1e3:>9.0f} ms ({base.both / row.both:>4.1f}x) "
                f"{row.memory / 2**20:>7.0f} MB ({row.memory / base.memory:>4.0%})"
            )
        return "\n".join(lines)

    def csv(self) -> str:
        file = io.StringIO()
        for line in self.head():
            file.write(f"# {line}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                self.size_name,
                "attention",
                "forward_ms",
                "forward_speedup",
                "both_ms",
                "both_speedup",
                "peak_memory_mb",
                "memory_share",
            ]
        )
        for row in self.rows:
            base = self.baseline_of(row)
            figures = (
                row.forward * 1e3,
                base.forward / row.forward,
                row.both * 1e3,
                base.both / row.both,
                row.memory / 2**20,
                row.memory / base.memory,
            )
            writer.writerow([row.size, row.name, *(f"{figure:.3f}" for figure in figures)])
        return file.getvalue()

    def plot(self, path: str) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
        quantities = {
            "forward, ms": lambda row: row.forward * 1e3,
            "forward + backward, ms": lambda row: row.both * 1e3,
            "peak memory, MB": lambda row: row.memory / 2**20,
        }
        names = list(dict.fromkeys(row.name for row in self.rows))
        for axis, (label, value) in zip(axes, quantities.items()):
            for name in names:
                rows = [row for row in self.rows if row.name == name]
                style = "k--" if name == self.baseline else "o-"
                axis.plot([r.size for r in rows], [value(r) for r in rows], style, label=name)
            axis.set(xlabel=self.size_name, title=label, yscale="log")
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)
        figure.suptitle(f"{self.title} ({self.environment['date']}, {self.environment['cpu']})")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)

    def publish(self, path: str | None) -> None:
        """Print the table; with a path, write PATH.csv and PATH.png, aside and renamed."""
        print(self.table())
        if path is None:
            return
        write_text(f"{path}.csv", self.csv())
        with written_aside(f"{path}.png") as aside:
            self.plot(aside)
