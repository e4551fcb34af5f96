"""Number of CPU threads: one for a narrow model; OMP_NUM_THREADS has precedence."""

from __future__ import annotations

import pytest
import torch

from slowfast_lara.config import get_cfg
from slowfast_lara.models.numerics import NARROW, choose_threads


@pytest.mark.parametrize(
    "width, gpus, variable, expected",
    [
        (NARROW - 1, 0, None, 1),
        (NARROW, 0, None, 3),
        (NARROW - 1, 0, "3", 3),
        (NARROW - 1, 1, None, 3),
    ],
)
def test_threads(monkeypatch, width, gpus, variable, expected):
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    else:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cfg = get_cfg()
    cfg.NUM_GPUS, cfg.VIT.EMBED_DIM = gpus, width
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # as PyTorch does by default or from the variable
    try:
        message = choose_threads(cfg)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
    assert message.startswith(f"{expected} (")
