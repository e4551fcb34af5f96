"""The benchmark's instruments tell the truth, and its commands run."""

from pathlib import Path

import pytest
import torch
from slowfast_lara.analysis.result_files import (
    aligned_table,
    csv_text,
    markdown_table,
    plot_over_sizes,
)
from torch import nn

from benchmarks.textbook import TextbookTrajectoryAttention
from slowfast_lara.analysis.approximation_error import measure, smooth_inputs, variants
from slowfast_lara.analysis.measure import count_flops, environment, peak_memory
from slowfast_lara.attention import ESTIMATORS, build_estimator, softmax_attention
from slowfast_lara.config import get_cfg
from slowfast_lara.drawing import saved_figure
from slowfast_lara.errors import InputError
from slowfast_lara.models.attention_config import shown_name
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
    """A layer with its number of frames, for the counter."""

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


def test_nothing_of_all_queries_frames_and_landmarks_exists_at_once():
    """Memory of LARA in training, against a tensor of shape [N, F, C]."""
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


def test_every_estimator_has_a_row_of_errors():
    inputs = smooth_inputs(frames=2, side=8, d=8)
    errors = measure(inputs, get_cfg(), "test", [8, 32], seeds=2)
    assert set(errors.rows) == {v.label for v in variants()}
    assert {v.name for v in variants()} == set(ESTIMATORS) - {"softmax"}
    assert errors.rows["ra"][1] < errors.rows["ra"][0]
    assert all(error > 0 for row in errors.rows.values() for error in row)
    assert errors.notes == []


def test_sizes_beyond_the_tokens_are_left_out():
    inputs = smooth_inputs(frames=2, side=3, d=8)
    errors = measure(inputs, get_cfg(), "test", [8, 18, 19, 256], seeds=1)
    assert errors.samples == [8, 18]
    assert all(len(row) == 2 for row in errors.rows.values())
    assert errors.notes == ["left out, since the layer has only 18 tokens: 19, 256 samples"]
    assert errors.notes[0] in errors.text()
    with pytest.raises(InputError, match="18 tokens"):
        measure(inputs, get_cfg(), "test", [19], seeds=1)


def test_errors_are_of_the_configs_estimators():
    """Its options, and the learned layers of the model's own estimator."""
    inputs = smooth_inputs(frames=2, side=4, d=8)
    cfg = get_cfg()
    plain = measure(inputs, cfg, "test", [8], seeds=1).rows
    cfg.VIT.LARA.PROPOSAL = "global"
    assert measure(inputs, cfg, "test", [8], seeds=1).rows["lara"] != plain["lara"]
    cfg.VIT.LARA.LEARNED = True
    own = build_estimator(
        "lara", head_dim=8, num_landmarks=8, proposal="global", learned=True
    ).eval()
    inputs = inputs._replace(estimator=own)
    q, k, v, frames, _ = inputs
    with torch.no_grad():
        difference = own(q, k, v, num_frames=frames) - softmax_attention(q, k, v, num_frames=frames)
    rows = measure(inputs, cfg, "test", [8], seeds=1).rows
    assert rows["lara"] == pytest.approx([difference.square().mean().item()])


def test_tables_as_text():
    rows = [["crop", "attention", "ms"], ["224", "exact", "1.5"], ["1000", "lara", "12"]]
    assert aligned_table(rows, names=1) == (
        "crop  attention   ms\n 224  exact      1.5\n1000  lara        12"
    )
    assert markdown_table(rows[:2]) == (
        "| crop | attention | ms |\n| --- | --- | --- |\n| 224 | exact | 1.5 |"
    )
    assert csv_text([["a", "b, c"], [1, 2.5]], ["head"]) == '# head\na,"b, c"\n1,2.5\n'


@pytest.mark.parametrize("sizes", [[8], [8, 16]])
def test_a_single_size_is_drawn_as_bars(tmp_path, sizes):
    values = {name: [float(size) for size in sizes] for name in ("exact", "_lara $x$")}
    with saved_figure(tmp_path / "plot.png", (4, 3)) as (_, (axis,)):
        plot_over_sizes(axis, "crop", sizes, "time, ms", values)
        bars, lines = len(axis.patches), [line.get_label() for line in axis.lines]
    assert (bars, lines) == ((2, []) if len(sizes) == 1 else (0, ["exact", r" _lara \$x\$"]))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


def tool(name, *arguments):
    return finish(start(*arguments, program=(str(ROOT / "tools" / f"{name}.py"),)), 300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, sizes",
    [(("crop", "--crops", 64), ["64"]), (("length", "--lengths", 64, 128), ["64", "128"])],
)
def test_benchmark_command(tmp_path, arguments, sizes):
    flags = ("--repeats", 1, "--out", tmp_path / "sub" / "result")
    code, stdout, stderr = tool("benchmark", *arguments, *flags)
    assert (code, stderr) == (0, "")
    text = (tmp_path / "sub" / "result.csv").read_text()
    for value in environment().values():
        assert value in text
    for size in sizes:
        for name in ("textbook", *map(shown_name, ESTIMATORS)):
            assert f"\n{size},{name}," in text
            assert f"  {name} " in stdout
    assert (tmp_path / "sub" / "result.png").read_bytes().startswith(b"\x89PNG")


def test_approximation_error_command(tmp_path):
    out = tmp_path / "errors"
    code, _, stderr = tool("approximation_error", "--samples", 8, 16, "--seeds", 1, "--out", out)
    assert code == 0, stderr
    lines = out.with_suffix(".csv").read_text().splitlines()
    assert lines[2] == "estimator,8,16"
    assert len(lines) == 3 + len(variants())
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
