"""AdamW without weight decay for parameters that the model names, optionally also 1-D ones."""

import torch


def construct_optimizer(model, cfg):
    spared_names = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    decayed, spared = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            flat = cfg.SOLVER.ZERO_WD_1D_PARAM and parameter.ndim == 1
            (spared if flat or name in spared_names else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": cfg.SOLVER.WEIGHT_DECAY},
        {"params": spared, "weight_decay": 0.0},
    ]
    assert cfg.SOLVER.OPTIMIZING_METHOD == "adamw"
    return torch.optim.AdamW(groups, lr=cfg.SOLVER.BASE_LR)
