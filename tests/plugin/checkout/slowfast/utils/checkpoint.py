"""Checkpoints: epoch, weights, optimiser, config as YAML, scaler in mixed precision."""

import os

import torch


def checkpoint_path(cfg, epoch=1):
    return os.path.join(cfg.OUTPUT_DIR, "checkpoints", f"checkpoint_epoch_{epoch:05d}.pyth")


def save_checkpoint(cfg, model, optimizer, scaler, epoch=0):
    path = checkpoint_path(cfg, epoch + 1)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    content = {
        "epoch": epoch,
        "model_state": model.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "cfg": cfg.dump(),
    }
    if cfg.TRAIN.MIXED_PRECISION:
        content["scaler_state"] = scaler.state_dict()
    torch.save(content, path)


def load_checkpoint(path, model, optimizer=None, epoch_reset=False):
    """Load the weights that fit and, unless the epoch is reset, the optimiser."""
    content = torch.load(path, map_location="cpu")
    own = model.state_dict()
    fitting = {
        name: tensor
        for name, tensor in content["model_state"].items()
        if name in own and tensor.shape == own[name].shape
    }
    missing = [name for name in own if name not in fitting]
    print("not loaded:", missing)
    model.load_state_dict(fitting, strict=False)
    if optimizer is not None and not epoch_reset:
        optimizer.load_state_dict(content["optimizer_state"])
