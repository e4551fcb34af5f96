"""The arithmetic of a run in a process that has its own: settings, which any machine has."""

from __future__ import annotations

import pytest
import torch

from slowfast_lara.config import load_config
from slowfast_lara.inference.scoring import view_outputs
from slowfast_lara.models.numerics import gpu_arithmetic


class Asks(torch.nn.Linear):
    """A model that notes the settings it runs with."""

    def forward(self, views):
        self.seen = settings()
        return super().forward(views[0])


def settings() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return cudnn.benchmark, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("tf32", [False, True])
def test_scores_are_computed_as_the_config_says(tf32):
    cfg = load_config("quick/lara", ["ALLOW_TF32", tf32, "CUDNN_BENCHMARK", tf32])
    before, model = settings(), Asks(3, 2)
    view_outputs(model, torch.zeros(2, 3), cfg)
    assert model.seen == (tf32,) * 3 and settings() == before


def test_what_was_chosen_by_newer_names_stays():
    cfg, matmul = load_config("quick/lara"), torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("PyTorch has no newer names")
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with gpu_arithmetic(cfg):
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
