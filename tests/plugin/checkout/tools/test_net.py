"""Multi-view test: the sum of the scores of all views of a video."""

import os

import numpy as np
import slowfast.utils.checkpoint as cu
import torch
from slowfast.datasets import loader
from slowfast.models import build_model
from slowfast.utils.meters import TestMeter


@torch.no_grad()
def test(cfg):
    torch.manual_seed(cfg.RNG_SEED)
    model = build_model(cfg)
    cu.load_checkpoint(cfg.TEST.CHECKPOINT_FILE_PATH or cu.checkpoint_path(cfg), model)
    model.eval()
    meter = TestMeter(cfg.TEST.NUM_ENSEMBLE_VIEWS * cfg.TEST.NUM_SPATIAL_CROPS)
    for inputs, _labels, indices, _times, _meta in loader.construct_loader(cfg, "test"):
        meter.update_stats(model(inputs), indices)
    np.save(os.path.join(cfg.OUTPUT_DIR, "scores.npy"), meter.sums().numpy())
