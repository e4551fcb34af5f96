"""AdamW: weight decay and learning rate by parameter group."""

import torch


def layer_of(name, depth):
    """0 for embeddings, 1 to depth for blocks, depth + 1 for everything else."""
    if name == "cls_token" or name.startswith(("pos_embed", "patch_embed")):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("blocks") else depth + 1


def construct_optimizer(model, cfg):
    """A group for each weight decay and, with SOLVER.LAYER_DECAY, for each layer of MVIT.DEPTH."""
    spared_names = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    depth, layer_decay = cfg.MVIT.DEPTH, cfg.SOLVER.LAYER_DECAY
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            flat = cfg.SOLVER.ZERO_WD_1D_PARAM and parameter.ndim == 1
            spared = flat or any(part in name for part in spared_names)
            decay = 0.0 if spared else cfg.SOLVER.WEIGHT_DECAY
            scale = layer_decay ** (depth + 1 - layer_of(name, depth))
            new = {"params": [], "weight_decay": decay, "layer_decay": scale}
            groups.setdefault((decay, scale), new)["params"].append(parameter)
    assert cfg.SOLVER.OPTIMIZING_METHOD == "adamw"
    lr, betas = cfg.SOLVER.BASE_LR, tuple(cfg.SOLVER.BETAS)
    ordered = sorted(groups.values(), key=lambda group: -group["weight_decay"])
    return torch.optim.AdamW(ordered, lr=lr, betas=betas)


def set_lr(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate * group["layer_decay"]
