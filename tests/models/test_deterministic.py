"""DETERMINISTIC: PyTorch's settings; a training that repeats to the last bit."""

from __future__ import annotations

import os

import pytest
import torch

from slowfast_lara.config import load_config
from slowfast_lara.errors import ConfigError
from slowfast_lara.models.numerics import choose_gpu_arithmetic, gpu_arithmetic
from tests.helpers.runs import load_checkpoint, run_ok, same_tensors, write_config


def settings() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic


@pytest.fixture()
def restored(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with gpu_arithmetic(load_config("quick/lara")):
        yield


def test_settings(restored, monkeypatch):
    cfg = load_config("quick/lara", ["DETERMINISTIC", True])
    choose_gpu_arithmetic(load_config("quick/lara"))
    assert settings() == (False, False) and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with gpu_arithmetic(cfg):
        assert settings() == (True, True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert settings() == (False, False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    choose_gpu_arithmetic(cfg)
    assert settings() == (True, True) and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("deterministic, warn_only", [(False, False), (True, True)])
def test_settings_of_the_caller_are_restored(restored, deterministic, warn_only):
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    with gpu_arithmetic(load_config("quick/lara")):
        assert settings() == (False, False)
    assert settings() == (deterministic, True)
    assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only


def test_benchmarking_is_refused():
    with pytest.raises(ConfigError, match="CUDNN_BENCHMARK.*must be False with DETERMINISTIC"):
        load_config("quick/lara", ["DETERMINISTIC", True, "CUDNN_BENCHMARK", True])


def test_training_on_a_cpu_is_unchanged(tmp_path, video_set):
    results = []
    for name, deterministic in (("plain", False), ("deterministic", True)):
        changes = {"DETERMINISTIC": deterministic, "TEST__ENABLE": False, "SOLVER__MAX_EPOCH": 1}
        config = write_config(tmp_path / f"{name}.yaml", video_set, tmp_path / name, **changes)
        run_ok("--cfg", config)
        results.append(load_checkpoint(tmp_path / name, "checkpoint_epoch_00001.pyth"))
    assert same_tensors(*(x["model_state"] for x in results))
