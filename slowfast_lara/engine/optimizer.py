"""The optimiser and its learning rate.

As is usual for vision transformers, weight decay spares what is one-dimensional
(biases, norms) and what the model's `no_weight_decay()` names (the class token
and the positions). PySlowFast 1.0 decays all of these, and has no AdamW. With
SOLVER.LAYER_DECAY (Clark et al. 2020, "ELECTRA") a parameter's rate is the less the
more layers there are between it and the classifier.

The optimisers are PyTorch's fused ones: told on the device that a gradient is not
finite, they leave their step out, and the host need not wait to decide it.
"""

from __future__ import annotations

from typing import Any

import torch
from fvcore.common.config import CfgNode
from slowfast.utils import lr_policy
from torch import Tensor, nn

from slowfast_lara.errors import ConfigError

__all__ = [
    "build_optimizer",
    "load_optimizer",
    "lr_at",
    "lr_scale",
    "scales_loss",
    "set_lr",
    "step_if_finite",
]
_OF_ADAM = {"step", "exp_avg", "exp_avg_sq"}


def build_optimizer(model: nn.Module, cfg: CfgNode) -> torch.optim.Optimizer:
    """The optimiser of SOLVER.OPTIMIZING_METHOD for a bare model."""
    solver = cfg.SOLVER
    groups = _parameter_groups(model, solver.WEIGHT_DECAY, solver.LAYER_DECAY)
    # Fused SGD that leaves out its very first step has no momentum to go on with, and a
    # loss scaler often begins so. On mps, what a fused optimiser is told is not heeded
    # (pytorch pull request 186360).
    fused = cfg.DEVICE != "mps" and (solver.OPTIMIZING_METHOD != "sgd" or not scales_loss(cfg))
    try:
        if solver.OPTIMIZING_METHOD == "sgd":
            return torch.optim.SGD(
                groups,
                lr=solver.BASE_LR,
                momentum=solver.MOMENTUM,
                dampening=solver.DAMPENING,
                nesterov=solver.NESTEROV,
                fused=fused,
            )
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[solver.OPTIMIZING_METHOD]
        return kind(groups, lr=solver.BASE_LR, betas=(0.9, 0.999), fused=fused)
    except ValueError as error:
        raise ConfigError(f"SOLVER cannot be used: {error}") from None


def scales_loss(cfg: CfgNode) -> bool:
    """Whether the loss is scaled up, so that small gradients outlast float16."""
    return cfg.SOLVER.USE_MIXED_PRECISION and cfg.SOLVER.PRECISION == "float16"


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take over what a saved optimiser has gathered, but none of its settings.

    PyTorch looks at the number of parameters only, and would fail at the first step.
    """
    expected = {"momentum_buffer"} if isinstance(optimizer, torch.optim.SGD) else _OF_ADAM
    gathered = {name for of_parameter in state["state"].values() for name in of_parameter}
    if not gathered <= expected:
        raise ValueError(f"it has {', '.join(sorted(map(str, gathered)))} of another method")
    saved, own = state["param_groups"], optimizer.param_groups
    parameters = [parameter for group in own for parameter in group["params"]]
    indices = [index for group in saved for index in group["params"]]
    for index, parameter in zip(indices, parameters):
        _check_gathered(state["state"].get(index, {}), parameter, expected)
    groups = [{**mine, "params": theirs["params"]} for mine, theirs in zip(own, saved)]
    optimizer.load_state_dict({**state, "param_groups": groups + saved[len(own) :]})


def _check_gathered(of_parameter: dict[str, Any], parameter: Tensor, expected: set[str]) -> None:
    if of_parameter and of_parameter.keys() != expected:
        raise ValueError(f"a parameter has no {', '.join(expected - of_parameter.keys())}")
    for name, value in of_parameter.items():
        if value is None and name == "momentum_buffer":  # of SGD without momentum
            continue
        if isinstance(value, (int, float)) and name == "step":  # of earlier versions of PyTorch
            continue
        shape = parameter.shape if name != "step" else torch.Size()
        if not isinstance(value, Tensor) or value.shape != shape:
            raise ValueError(f"its {name} of a parameter is not {list(shape)} numbers")


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Step, or touch nothing if the norm of the gradient is not finite.

    Fused optimisers read `found_inf` on the device; PyTorch's GradScaler tells them so too. For
    others the host waits to decide it.
    """
    if optimizer.defaults["fused"]:
        found_inf = (~norm.isfinite()).float()
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # set by users
        optimizer.step()
    elif norm.isfinite():
        optimizer.step()


def _parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Parameters by weight decay and learning rate; `lr_scale` is a group's share of the rate."""
    no_weight_decay: Any = getattr(model, "no_weight_decay", set)
    layers_after: Any = (lambda name: 0) if layer_decay == 1 else model.layers_after
    spared_names = no_weight_decay()
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spare = parameter.ndim <= 1 or name in spared_names
            groups.setdefault((layers_after(name), spare), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if spare else weight_decay,
            "lr_scale": layer_decay**layers,
        }
        for (layers, spare), parameters in sorted(groups.items())
    ]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate; groups of lower layers have their share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def lr_scale(cfg: CfgNode, total_batch: int) -> float:
    """How many times BASE_LR's reference batch the clips of one step are."""
    reference = cfg.SOLVER.REFERENCE_BATCH
    return total_batch / reference if reference else 1.0


def lr_at(cfg: CfgNode, epoch: float) -> float:
    """The learning rate at a point of training, in epochs."""
    solver = cfg.SOLVER
    if epoch >= solver.WARMUP_EPOCHS:
        return _lr_of_policy(cfg, epoch)
    after = _lr_of_policy(cfg, solver.WARMUP_EPOCHS)
    start = solver.WARMUP_START_LR
    return start + (after - start) * epoch / solver.WARMUP_EPOCHS


def _lr_of_policy(cfg: CfgNode, epoch: float) -> float:
    lr = lr_policy.get_lr_func(cfg.SOLVER.LR_POLICY)(cfg, epoch)
    if cfg.SOLVER.LR_POLICY == "cosine":  # PySlowFast's always ends at 0
        end = cfg.SOLVER.COSINE_END_LR
        lr = end + lr * (1.0 - end / cfg.SOLVER.BASE_LR)
    return lr
