"""One epoch of training; losses and logits are saved next to the checkpoint."""

import os

import numpy as np
import slowfast.models.optimizer as optim
import slowfast.utils.checkpoint as cu
import torch
from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis
from slowfast.datasets import loader
from slowfast.models import build_model
from slowfast.utils import meters  # noqa: F401  # needed by all of its training

LOSSES = {
    "cross_entropy": torch.nn.CrossEntropyLoss(),
    "soft_cross_entropy": lambda x, y: -(y * x.float().log_softmax(-1)).sum(-1).mean(),
}


def mix(cfg, clips, labels):
    """Mixup of each clip with the batch in reverse order; the weight is drawn from Beta."""
    share = float(np.random.beta(cfg.MIXUP.ALPHA, cfg.MIXUP.ALPHA))
    off = cfg.MIXUP.LABEL_SMOOTH_VALUE / cfg.MODEL.NUM_CLASSES
    soft = torch.nn.functional.one_hot(labels, cfg.MODEL.NUM_CLASSES).float()
    soft = soft * (1 - cfg.MIXUP.LABEL_SMOOTH_VALUE) + off
    return clips * share + clips.flip(0) * (1 - share), soft * share + soft.flip(0) * (1 - share)


def seed(cfg):
    np.random.seed(cfg.RNG_SEED)
    torch.manual_seed(cfg.RNG_SEED)


def log_model_info(model, cfg):
    """Count the FLOPs and activations of one clip, as a checkout does at the start."""
    size = cfg.DATA.TRAIN_CROP_SIZE
    inputs = loader.pathways(cfg, torch.rand(1, 3, cfg.DATA.NUM_FRAMES, size, size))
    model.eval()
    for count in (FlopCountAnalysis, ActivationCountAnalysis):
        print(count.__name__, count(model, (inputs,)).unsupported_ops_warnings(False).total())
    model.train()


def train(cfg):
    seed(cfg)
    model = build_model(cfg)
    if cfg.LOG_MODEL_INFO:
        log_model_info(model, cfg)
    optimizer = optim.construct_optimizer(model, cfg)
    scaler = torch.amp.GradScaler("cpu", enabled=cfg.TRAIN.MIXED_PRECISION)
    if cfg.TRAIN.CHECKPOINT_FILE_PATH:
        reset = cfg.TRAIN.CHECKPOINT_EPOCH_RESET
        cu.load_checkpoint(cfg.TRAIN.CHECKPOINT_FILE_PATH, model, optimizer, epoch_reset=reset)
    seed(cfg)
    saved = {"losses": [], "logits": []}
    for inputs, labels, _indices, _times, _meta in loader.construct_loader(cfg, "train"):
        optim.set_lr(optimizer, cfg.SOLVER.BASE_LR)
        if cfg.MIXUP.ENABLE:
            inputs[0], labels = mix(cfg, inputs[0], labels)
        with torch.autocast("cpu", enabled=cfg.TRAIN.MIXED_PRECISION):
            optimizer.zero_grad()
            if cfg.MASK.ENABLE:
                logits, labels = model(inputs)
            else:
                logits = model(inputs)
            loss = LOSSES[cfg.MODEL.LOSS_FUNC](logits, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if cfg.SOLVER.CLIP_GRAD_L2NORM:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.SOLVER.CLIP_GRAD_L2NORM)
        scaler.step(optimizer)
        scaler.update()
        saved["losses"].append(loss.item())
        saved["logits"].append(logits.detach().float().numpy())
    np.savez(os.path.join(cfg.OUTPUT_DIR, "training.npz"), **saved)
    cu.save_checkpoint(cfg, model, optimizer, scaler)
