"""Batches of clips, which are read from an array file instead of videos."""

import os

import numpy as np
import torch


def pathways(cfg, clips):
    """The list of pathways of clips [B, 3, T, H, W]."""
    if cfg.MODEL.ARCH in cfg.MODEL.SINGLE_PATHWAY_ARCH:
        return [clips]
    frames = torch.linspace(0, clips.shape[2] - 1, clips.shape[2] // cfg.SLOWFAST.ALPHA).long()
    return [clips[:, :, frames], clips]


def construct_loader(cfg, part):
    """(inputs, labels, indices, times, meta) for each batch."""
    if cfg.DATA.DECODING_BACKEND != "pyav":
        raise RuntimeError("today's torchvision does not decode videos")
    arrays = np.load(os.path.join(cfg.DATA.PATH_TO_DATA_DIR, f"{part}.npz"))
    size = cfg.TRAIN.BATCH_SIZE if part == "train" else cfg.TEST.BATCH_SIZE
    clips, labels = (torch.from_numpy(arrays[name]) for name in ("clips", "labels"))
    for start in range(0, len(clips), size):
        some = slice(start, start + size)
        indices = torch.arange(len(clips))[some]
        yield pathways(cfg, clips[some]), labels[some], indices, torch.zeros(len(indices)), {}
