"""The benchmark's instruments tell the truth, and its commands run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from slowfast_lara.attention import ESTIMATORS, build_estimator
from slowfast_lara.experiments.approximation_error import measure, smooth_inputs, variants
from slowfast_lara.experiments.measure import count_flops, environment, peak_memory
from slowfast_lara.experiments.textbook import TextbookTrajectoryAttention
from slowfast_lara.models.space_time import TrajectoryAttention

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
    errors = measure(inputs, "test", [8, 32], seeds=2)
    assert set(errors.rows) == {v.label for v in variants()}
    assert {v.name for v in variants()} == set(ESTIMATORS) - {"softmax"}
    assert errors.rows["ra"][1] < errors.rows["ra"][0]
    assert all(error > 0 for row in errors.rows.values() for error in row)


def tool(name, *arguments):
    command = [sys.executable, ROOT / "tools" / f"{name}.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    "arguments, sizes",
    [(("crop", "--crops", 64), ["64"]), (("length", "--lengths", 64, 128), ["64", "128"])],
)
def test_benchmark_command(tmp_path, arguments, sizes):
    done = tool("benchmark", *arguments, "--repeats", 1, "--out", tmp_path / "sub" / "result")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    text = (tmp_path / "sub" / "result.csv").read_text()
    for value in environment().values():
        assert value in text
    for size in sizes:
        for name in ESTIMATORS:
            assert f"\n{size},{name}," in text
            assert f"  {name} " in done.stdout
    assert (tmp_path / "sub" / "result.png").read_bytes().startswith(b"\x89PNG")


def test_approximation_error_command(tmp_path):
    out = tmp_path / "errors"
    done = tool("approximation_error", "--samples", 8, 16, "--seeds", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    lines = out.with_suffix(".csv").read_text().splitlines()
    assert lines[2] == "estimator,8,16"
    assert len(lines) == 3 + len(variants())
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_approximation_error_needs_model_and_video_together():
    done = tool("approximation_error", "--cfg", "x.yaml")
    assert done.returncode == 2
    assert done.stderr == "error: --cfg, --checkpoint and --video belong together\n"
