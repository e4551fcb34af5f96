"""Optimiser, parameter groups and learning-rate schedule.

As usual for vision transformers, weight decay excludes one-dimensional parameters (biases, norms)
and the parameters that the model's `no_weight_decay()` returns (class token, positional
embeddings). PySlowFast 1.0 applies weight decay to these parameters, too, and has no AdamW.
SOLVER.LAYER_DECAY (Clark et al. 2020, "ELECTRA") is a factor on the learning rate of a parameter,
applied once for each layer between the parameter and the classifier.

PyTorch's fused optimisers can skip a step on the device if a gradient is not finite, so that the
host need not wait for the gradient (see `step_if_finite`).
"""

from __future__ import annotations

from typing import Any

import torch
from fvcore.common.config import CfgNode
from slowfast.utils import lr_policy
from torch import Tensor, nn

from slowfast_lara.errors import ConfigError
from slowfast_lara.models.build import device_of
from slowfast_lara.models.numerics import autocast_dtype

_SGD_STATE = {"momentum_buffer"}
_ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}


def build_optimizer(model: nn.Module, cfg: CfgNode) -> torch.optim.Optimizer:
    """Build the optimiser SOLVER.OPTIMIZING_METHOD for a model without DDP wrapper."""
    solver = cfg.SOLVER
    groups = _parameter_groups(model, solver.WEIGHT_DECAY, solver.LAYER_DECAY)
    # If the loss scaler skips the first step, fused SGD leaves its momentum buffer uninitialised.
    # On mps, fused optimisers ignore `found_inf` (pytorch/pytorch#186360).
    fused = cfg.DEVICE != "mps" and (solver.OPTIMIZING_METHOD != "sgd" or not scales_loss(cfg))
    common: dict[str, Any] = {"lr": solver.BASE_LR, "fused": fused}
    try:
        if solver.OPTIMIZING_METHOD == "sgd":
            momentum = {"momentum": solver.MOMENTUM, "dampening": solver.DAMPENING}
            return torch.optim.SGD(groups, **momentum, nesterov=solver.NESTEROV, **common)
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[solver.OPTIMIZING_METHOD]
        return kind(groups, betas=(0.9, 0.999), **common)
    except ValueError as error:
        raise ConfigError(f"invalid SOLVER settings: {error}") from None


def scales_loss(cfg: CfgNode) -> bool:
    """Whether the loss is scaled, so that small gradients do not underflow in float16."""
    mixed = cfg.SOLVER.USE_MIXED_PRECISION
    return mixed and autocast_dtype(cfg, device_of(cfg)) == torch.float16


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the per-parameter state of a saved optimiser, but not its hyperparameters.

    Raise ValueError if an entry or a shape does not fit: PyTorch checks only the number of
    parameters, and the first step would fail.
    """
    expected = _SGD_STATE if isinstance(optimizer, torch.optim.SGD) else _ADAM_STATE
    saved, own = state["param_groups"], optimizer.param_groups
    parameters = [parameter for group in own for parameter in group["params"]]
    indices = [index for group in saved for index in group["params"]]
    for index, parameter in zip(indices, parameters):
        _check_parameter_state(state["state"].get(index, {}), parameter, expected)
    groups = [{**group, "params": other["params"]} for group, other in zip(own, saved)]
    optimizer.load_state_dict({**state, "param_groups": groups + saved[len(own) :]})


def _check_parameter_state(state: dict[str, Any], parameter: Tensor, expected: set[str]) -> None:
    if state and state.keys() != expected:
        raise ValueError(f"expected {sorted(expected)}, got {sorted(map(str, state))}")
    for name, value in state.items():
        # SGD without momentum saves None; old PyTorch versions saved `step` as a number.
        if value is None and name == "momentum_buffer":
            continue
        if isinstance(value, (int, float)) and name == "step":
            continue
        shape = parameter.shape if name != "step" else torch.Size()
        if not isinstance(value, Tensor) or value.shape != shape:
            raise ValueError(f"{name} of a parameter is not a tensor of shape {list(shape)}")


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Run an optimiser step, but skip it if the gradient norm is not finite.

    A fused optimiser reads its attribute `found_inf` on the device; PyTorch's GradScaler also uses
    this attribute. For other optimisers, the host waits for the norm and decides.
    """
    if optimizer.defaults["fused"]:
        found_inf = (~norm.isfinite()).float()
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()
    elif norm.isfinite():
        optimizer.step()


def _parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Group parameters by weight decay and by `lr_scale`, a factor on the learning rate."""
    no_weight_decay: Any = getattr(model, "no_weight_decay", set)
    layers_after: Any = (lambda name: 0) if layer_decay == 1 else model.layers_after
    no_decay_names = no_weight_decay()
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            no_decay = parameter.ndim <= 1 or name in no_decay_names
            groups.setdefault((layers_after(name), no_decay), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if no_decay else weight_decay,
            "lr_scale": layer_decay**layers,
        }
        for (layers, no_decay), parameters in sorted(groups.items())
    ]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each parameter group to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def batch_lr_factor(cfg: CfgNode, step_batch: int) -> float:
    """Return the factor on the learning rate for `step_batch` clips per optimiser step.

    It is step_batch / SOLVER.REFERENCE_BATCH; 1 if SOLVER.REFERENCE_BATCH is 0.
    """
    reference = cfg.SOLVER.REFERENCE_BATCH
    return step_batch / reference if reference else 1.0


def lr_at(cfg: CfgNode, epoch: float) -> float:
    """Return the learning rate after `epoch` epochs, which may be fractional."""
    solver = cfg.SOLVER
    if epoch >= solver.WARMUP_EPOCHS:
        return _policy_lr(cfg, epoch)
    after = _policy_lr(cfg, solver.WARMUP_EPOCHS)
    start = solver.WARMUP_START_LR
    return start + (after - start) * epoch / solver.WARMUP_EPOCHS


def _policy_lr(cfg: CfgNode, epoch: float) -> float:
    lr = lr_policy.get_lr_func(cfg.SOLVER.LR_POLICY)(cfg, epoch)
    if cfg.SOLVER.LR_POLICY == "cosine":  # PySlowFast's cosine schedule always ends at 0
        end = cfg.SOLVER.COSINE_END_LR
        lr = end + lr * (1.0 - end / cfg.SOLVER.BASE_LR)
    return lr
