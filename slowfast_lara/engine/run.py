"""One process of a run: check, then train, then test, as the config says."""

from __future__ import annotations

import logging
from typing import Any

import torch
from fvcore.common.config import CfgNode
from slowfast.utils.checkpoint import get_checkpoint_dir

from slowfast_lara.config import check_machine
from slowfast_lara.data.loader import test_loader, train_loader, val_loader
from slowfast_lara.engine import checkpoint
from slowfast_lara.engine.distributed import from_first, per_process, rank, without_ddp, world_size
from slowfast_lara.engine.evaluate import run_test
from slowfast_lara.engine.record import set_up_logging, write_records
from slowfast_lara.engine.run_folder import CONFIG, ENVIRONMENT
from slowfast_lara.engine.signals import StopRequest, shield_workers
from slowfast_lara.engine.threads import choose_threads
from slowfast_lara.engine.train import train
from slowfast_lara.errors import CheckpointError
from slowfast_lara.files import remove_unfinished
from slowfast_lara.models import build_model

logger = logging.getLogger(__name__)


def run(cfg: CfgNode, stop: StopRequest) -> None:
    """All of a run, in one of its processes."""
    check_machine(cfg)
    threads = choose_threads(cfg)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
    torch.backends.cuda.matmul.allow_tf32 = cfg.ALLOW_TF32
    torch.backends.cudnn.allow_tf32 = cfg.ALLOW_TF32
    # All lists are read before any training: their errors come first.
    loaders = _build_loaders(cfg)
    set_up_logging(cfg.OUTPUT_DIR)
    if rank() == 0:
        remove_unfinished(get_checkpoint_dir(cfg.OUTPUT_DIR))
        write_records(cfg)
        logger.info("Config and versions: %s, %s in %s", CONFIG, ENVIRONMENT, cfg.OUTPUT_DIR)
        logger.info("Threads of PyTorch: %s", threads)
    if cfg.TRAIN.ENABLE:
        train(cfg, loaders["train"], loaders["val"], stop)
    if cfg.TEST.ENABLE:
        path, states = from_first(lambda: _weights_to_test(cfg))
        torch.manual_seed(cfg.RNG_SEED)
        model = build_model(cfg)
        checkpoint.load_weights(without_ddp(model), states, path)
        run_test(model, loaders["test"], cfg, path, stop)


def _build_loaders(cfg: CfgNode) -> dict[str, Any]:
    place = {"rank": rank(), "world_size": world_size()}
    loaders = {}
    if cfg.TRAIN.ENABLE:
        batch_size = per_process(cfg, "TRAIN.BATCH_SIZE")
        loaders["train"] = train_loader(cfg, batch_size=batch_size, **place)
        loaders["val"] = val_loader(cfg, batch_size=batch_size, **place)
    if cfg.TEST.ENABLE:
        loaders["test"] = test_loader(cfg, **place)
    for loader in loaders.values():
        shield_workers(loader)
    return loaders


def _weights_to_test(cfg: CfgNode) -> tuple[str, dict[str, torch.Tensor]]:
    path = cfg.TEST.CHECKPOINT_FILE_PATH
    if path:
        return path, checkpoint.load(path)["model_state"]
    found = checkpoint.newest(cfg.OUTPUT_DIR)
    if found is None:
        raise CheckpointError(
            f"there is nothing to test: no readable checkpoint in "
            f"{cfg.OUTPUT_DIR}/checkpoints, and no TEST.CHECKPOINT_FILE_PATH"
        )
    return found[0], found[1]["model_state"]
