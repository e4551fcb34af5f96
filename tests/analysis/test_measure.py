"""Measurements (memory, MACs), tables, and the commands that print them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.profiling import count_flops, peak_memory
from benchmarks.tables import MarkdownTable, markdown_table, plot_over_sizes
from benchmarks.textbook import TextbookTrajectoryAttention
from slowfast_lara.analysis.measure import count_macs, environment
from slowfast_lara.analysis.tables import aligned_table, csv_text, environment_line
from slowfast_lara.attention import ESTIMATORS, build_estimator
from slowfast_lara.drawing import saved_figure
from slowfast_lara.models.attention_config import display_name
from slowfast_lara.models.space_time import TrajectoryAttention
from tests.helpers.runs import finish, start

ROOT = Path(__file__).parents[2]


def test_peak_memory_of_a_known_job():
    megabyte = 2**18  # float32 numbers

    def job():
        first = torch.ones(3 * megabyte)
        second = first * 2  # 6 MB are held
        del first
        return second.sum()  # 3 MB

    assert peak_memory(job) == pytest.approx(6 * 2**20, rel=1e-3)


class Layer(nn.Module):
    """A layer with a fixed number of frames: the counter passes tensors only."""

    def __init__(self, layer, num_frames):
        super().__init__()
        self.layer, self.num_frames = layer, num_frames

    def forward(self, x):
        return self.layer(x, self.num_frames)


@pytest.mark.parametrize("project_values", [False, True])
def test_flops_of_the_layers_by_hand(project_values):
    F, P, h, d = 3, 4, 2, 8
    N, D = F * P, h * d
    layer = TrajectoryAttention(
        D, h, build_estimator("softmax", head_dim=d), True, 0.0, project_values=project_values
    )
    x = torch.randn(1, 1 + N, D)
    shared = (1 + N) * D * 4 * D + N * D * D  # qkv and proj of all, proj_q of the patches
    attention = 2 * N * N * D + 2 * (1 + N) * D  # patches, and CLS over all tokens
    textbook = shared + attention + N * F * 2 * D * D + 2 * N * F * D
    plain = Layer(TextbookTrajectoryAttention(layer), F)
    assert count_flops(plain, x) == textbook
    values = N * h * F * D + N * D * D if project_values else N * F * D
    fast = shared + attention + N * D * D + N * h * F * D + values
    assert count_flops(Layer(layer, F), x, projected_values=project_values) == fast


class InFrames(nn.Module):
    """An estimator with four frames, as a module of q, k and v alone."""

    def __init__(self, estimator):
        super().__init__()
        self.estimator = estimator

    def forward(self, q, k, v):
        return self.estimator(q, k, v, num_frames=4)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_both_counters_agree_on_every_estimator(name):
    """fvcore counts operators of a trace, PyTorch those that run."""
    estimator = build_estimator(name, head_dim=8, num_heads=2, num_landmarks=7).eval()
    q, k, v = torch.randn(3, 1, 2, 64, 8)
    ran = count_macs(lambda: estimator(q, k, v, num_frames=4))
    assert count_flops(InFrames(estimator), q, k, v) == ran > 0


def test_lara_in_training_needs_less_memory_than_queries_times_frames_times_landmarks():
    N, F, C = 1024, 16, 64
    estimator = build_estimator("lara", head_dim=8, num_landmarks=C)
    q, k, v = (torch.randn(1, 1, N, 8, requires_grad=True) for _ in range(3))
    peak = peak_memory(lambda: estimator(q, k, v, num_frames=F).sum().backward())
    assert peak < 4 * N * F * C


@pytest.mark.parametrize("name", ["lara", "performer", "nystrom", "orthoformer"])
def test_memory_grows_with_the_length_not_its_square(name):
    def peak(length):
        estimator = build_estimator(name, head_dim=16, num_landmarks=16)
        q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
        return peak_memory(lambda: estimator(q, k, v).sum().backward())

    assert peak(4096) < 4.4 * peak(1024)


class SmallTable(MarkdownTable):
    def cells(self):
        return [["attention", "ms"], ["exact", "1.5"]]


def test_result_table_has_one_head_in_all_formats(tmp_path):
    table = SmallTable("title", notes=["a note"])
    head = ["title", environment_line(), "a note"]
    assert table.text().splitlines()[:3] == head
    assert table.csv().splitlines() == [
        *(f"# {line}" for line in head),
        "attention,ms",
        "exact,1.5",
    ]
    markdown = table.markdown().splitlines()
    assert markdown[0] == "# title" and "- a note" in markdown and "| exact | 1.5 |" in markdown
    table.write(tmp_path / "small")
    assert {path.name for path in tmp_path.iterdir()} == {"small.csv", "small.md"}


def test_markdown_lines_are_short_except_commands():
    command, words = f"`python {'-' * 120}`", "word " * 99
    lines = SmallTable("title", notes=[command, words]).markdown().splitlines()
    assert [line for line in lines if len(line) > 100] == [f"- {command}"]
    assert sum(line.count("word") for line in lines) == 99


def test_tables_as_text():
    rows = [["crop", "attention", "ms"], ["224", "exact", "1.5"], ["1000", "lara", "12"]]
    assert aligned_table(rows) == (
        "crop  attention   ms\n 224  exact      1.5\n1000  lara        12"
    )
    assert markdown_table(rows[:2]) == (
        "| crop | attention | ms |\n| --- | --- | --- |\n| 224 | exact | 1.5 |"
    )
    assert csv_text([["a", "b, c"], [1, 2.5]], ["head"]) == '# head\na,"b, c"\n1,2.5\n'


@pytest.mark.parametrize("sizes", [[8], [8, 16]])
def test_plot_of_a_single_size_has_bars(tmp_path, sizes):
    values = {name: [float(size) for size in sizes] for name in ("exact", "_lara $x$")}
    with saved_figure(tmp_path / "plot.png", (4, 3)) as (_, (axis,)):
        plot_over_sizes(axis, "crop", sizes, "time, ms", values)
        bars, lines = len(axis.patches), [line.get_label() for line in axis.lines]
    assert (bars, lines) == ((2, []) if len(sizes) == 1 else (0, ["exact", r" _lara \$x\$"]))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, sizes",
    [(("crop", "--crops", 64), ["64"]), (("length", "--lengths", 64, 128), ["64", "128"])],
)
def test_benchmark_command(tmp_path, arguments, sizes):
    flags = ("--repeats", 1, "--out", tmp_path / "sub" / "result")
    process = start(*arguments, *flags, program=("-m", "benchmarks"), folder=ROOT)
    code, stdout, stderr = finish(process, 300)
    assert code == 0 and "warning" not in stderr.lower()
    assert all(f"\n{size} exact: forward" in stderr for size in sizes)  # progress
    text = (tmp_path / "sub" / "result.csv").read_text()
    for value in environment().values():
        assert value in text
    for size in sizes:
        for name in ("textbook", *map(display_name, ESTIMATORS)):
            assert f"\n{size},{name}," in text
            assert f"  {name} " in stdout
    assert (tmp_path / "sub" / "result.png").read_bytes().startswith(b"\x89PNG")
