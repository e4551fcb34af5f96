"""Training and testing as in a checkout: --cfg FILE --opts KEY VALUE ...

Clips are read from an array file instead of videos. The model's outputs are saved next to the
checkpoint. With --spawn each job runs in its own process, as with several GPUs.
"""

import argparse
import multiprocessing
import os

import numpy as np
import torch
from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis
from slowfast.config.defaults import get_cfg
from slowfast.models import build_model
from slowfast.models.optimizer import construct_optimizer


def pathways(cfg, clips):
    """The list of pathways that a loader yields for clips [B, 3, T, H, W]."""
    if cfg.MODEL.ARCH in cfg.MODEL.SINGLE_PATHWAY_ARCH:
        return [clips]
    frames = torch.linspace(0, clips.shape[2] - 1, clips.shape[2] // cfg.SLOWFAST.ALPHA).long()
    return [clips[:, :, frames], clips]


def load(cfg, part):
    """(inputs, labels, indices, times, meta) for each batch."""
    arrays = np.load(os.path.join(cfg.DATA.PATH_TO_DATA_DIR, f"{part}.npz"))
    size = cfg.TRAIN.BATCH_SIZE if part == "train" else cfg.TEST.BATCH_SIZE
    clips, labels = (torch.from_numpy(arrays[name]) for name in ("clips", "labels"))
    for start in range(0, len(clips), size):
        some = slice(start, start + size)
        indices = torch.arange(len(clips))[some]
        yield pathways(cfg, clips[some]), labels[some], indices, torch.zeros(len(indices)), {}


def mix(cfg, clips, labels):
    """Mixup of each clip with the batch in reverse order; the weight is drawn from Beta."""
    share = float(np.random.beta(cfg.MIXUP.ALPHA, cfg.MIXUP.ALPHA))
    off = cfg.MIXUP.LABEL_SMOOTH_VALUE / cfg.MODEL.NUM_CLASSES
    soft = torch.nn.functional.one_hot(labels, cfg.MODEL.NUM_CLASSES).float()
    soft = soft * (1 - cfg.MIXUP.LABEL_SMOOTH_VALUE) + off
    return clips * share + clips.flip(0) * (1 - share), soft * share + soft.flip(0) * (1 - share)


LOSSES = {
    "cross_entropy": torch.nn.CrossEntropyLoss(),
    "soft_cross_entropy": lambda x, y: -(y * x.float().log_softmax(-1)).sum(-1).mean(),
}


def seed(cfg):
    np.random.seed(cfg.RNG_SEED)
    torch.manual_seed(cfg.RNG_SEED)


def log_model_info(model, cfg):
    """Count the FLOPs and activations of one clip, as a checkout does at the start."""
    size = cfg.DATA.TRAIN_CROP_SIZE
    inputs = pathways(cfg, torch.rand(1, 3, cfg.DATA.NUM_FRAMES, size, size))
    model.eval()
    for count in (FlopCountAnalysis, ActivationCountAnalysis):
        print(count.__name__, count(model, (inputs,)).unsupported_ops_warnings(False).total())
    model.train()


def train(cfg):
    seed(cfg)
    model = build_model(cfg)
    if cfg.LOG_MODEL_INFO:
        log_model_info(model, cfg)
    optimizer = construct_optimizer(model, cfg)
    scaler = torch.amp.GradScaler("cpu", enabled=cfg.TRAIN.MIXED_PRECISION)
    seed(cfg)
    saved = {"losses": [], "logits": []}
    for inputs, labels, _indices, _times, _meta in load(cfg, "train"):
        if cfg.MIXUP.ENABLE:
            inputs[0], labels = mix(cfg, inputs[0], labels)
        with torch.autocast("cpu", enabled=cfg.TRAIN.MIXED_PRECISION):
            optimizer.zero_grad()
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
    save_checkpoint(cfg, model, optimizer, scaler)


def checkpoint_path(cfg):
    return os.path.join(cfg.OUTPUT_DIR, "checkpoints", "checkpoint_epoch_00001.pyth")


def save_checkpoint(cfg, model, optimizer, scaler):
    os.makedirs(os.path.dirname(checkpoint_path(cfg)), exist_ok=True)
    content = {
        "epoch": 0,
        "model_state": model.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "cfg": cfg.dump(),
        "scaler_state": scaler.state_dict(),
    }
    torch.save(content, checkpoint_path(cfg))


@torch.no_grad()
def test(cfg):
    """The sum of the scores of all views of a video."""
    seed(cfg)
    model = build_model(cfg)
    path = cfg.TEST.CHECKPOINT_FILE_PATH or checkpoint_path(cfg)
    model.load_state_dict(torch.load(path, map_location="cpu")["model_state"])
    model.eval()
    views = cfg.TEST.NUM_ENSEMBLE_VIEWS * cfg.TEST.NUM_SPATIAL_CROPS
    scores = {}
    for inputs, _labels, indices, _times, _meta in load(cfg, "test"):
        for index, score in zip(indices.tolist(), model(inputs)):
            scores[index // views] = scores.get(index // views, 0) + score
    sums = torch.stack([scores[video] for video in sorted(scores)])
    np.save(os.path.join(cfg.OUTPUT_DIR, "scores.npy"), sums.numpy())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg", required=True)
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--opts", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    cfg = get_cfg()
    cfg.merge_from_file(args.cfg)
    cfg.merge_from_list(args.opts)
    for enabled, job in ((cfg.TRAIN.ENABLE, train), (cfg.TEST.ENABLE, test)):
        if enabled and args.spawn:
            process = multiprocessing.get_context("spawn").Process(target=job, args=(cfg,))
            process.start()
            process.join()
            assert process.exitcode == 0
        elif enabled:
            job(cfg)


if __name__ == "__main__":
    main()
