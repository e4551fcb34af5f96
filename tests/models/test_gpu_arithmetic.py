"""TF32 and cuDNN settings of a config, in a process with other settings; needs no GPU."""

from __future__ import annotations

import pytest
import torch

from slowfast_lara.config import load_config
from slowfast_lara.inference.scoring import view_outputs
from slowfast_lara.models.numerics import gpu_arithmetic


class RecordingModel(torch.nn.Linear):
    """Records the settings during its forward pass."""

    def forward(self, views):
        self.settings = settings()
        return super().forward(views[0])


def settings() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return cudnn.benchmark, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("tf32", [False, True])
def test_scoring_uses_the_settings_of_the_config(tf32):
    cfg = load_config("quick/lara", ["ALLOW_TF32", tf32, "CUDNN_BENCHMARK", tf32])
    before, model = settings(), RecordingModel(3, 2)
    view_outputs(model, torch.zeros(2, 3), cfg)
    assert model.settings == (tf32,) * 3 and settings() == before


def test_fp32_precision_is_not_changed():
    cfg, matmul = load_config("quick/lara"), torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("PyTorch has no fp32_precision")
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with gpu_arithmetic(cfg):
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
