"""What the tools share: flags, a config and a model from them, errors of one line."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence

import torch
from fvcore.common.config import CfgNode
from torch import nn

from slowfast_lara.config import ConfigError, get_cfg, load_config
from slowfast_lara.data import DataError, DecodeError
from slowfast_lara.engine import checkpoint
from slowfast_lara.engine.checkpoint import CheckpointError
from slowfast_lara.engine.failures import BAD_INPUT, INTERRUPTED
from slowfast_lara.models import build_model

_KEY_WITH_NODE = re.compile(r"[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)+")


class InputError(ValueError):
    """Something given on the command line that cannot be used: one line."""


def say_error(message: object) -> None:
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def exit_code_of(run: Callable[[], int]) -> int:
    """Run; bad input and files that cannot be written are one line and code 2."""
    try:
        return run()
    except (InputError, ConfigError, DataError, DecodeError, CheckpointError) as error:
        say_error(error)
        return BAD_INPUT
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BAD_INPUT
    except OSError as error:
        say_error(f"{error.filename}: {error.strerror}" if error.filename else error)
        return BAD_INPUT
    except KeyboardInterrupt:
        say_error("interrupted")
        return INTERRUPTED


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cfg",
        required=True,
        metavar="FILE",
        help="the config (YAML) of the model: that of its training, or RUN/config.yaml",
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FILE",
        help="the model's weights (RUN/checkpoints/*.pyth)",
    )
    parser.add_argument(
        "--opts",
        action="store_true",
        help="not needed: KEY VALUE pairs that change the config are known as such",
    )


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files, and config overrides (KEY VALUE KEY VALUE ...) among them.

    A word is a key if it looks like one and no file has that name.
    """
    top_level = set(get_cfg())
    files: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        looks_like_key = _KEY_WITH_NODE.fullmatch(word) or word in top_level
        if looks_like_key and not os.path.exists(word):
            overrides += [word, *([value] if (value := next(rest, None)) is not None else [])]
        else:
            files.append(word)
    return files, overrides


def read_config(path: str, overrides: Sequence[object]) -> CfgNode:
    """The config for one process, on the GPU if there is one."""
    gpus = torch.cuda.device_count()
    cfg = load_config(path, ["NUM_GPUS", min(1, gpus), "NUM_SHARDS", 1, "SHARD_ID", 0, *overrides])
    if cfg.NUM_GPUS > min(1, gpus):
        raise ConfigError(f"NUM_GPUS is {cfg.NUM_GPUS}; at most {min(1, gpus)} is used here")
    return cfg


def load_model(cfg: CfgNode, weights: str) -> nn.Module:
    """The config's model with a checkpoint's weights, for looking only."""
    content = checkpoint.load(weights)
    model = build_model(cfg)
    checkpoint.load_weights(model, content["model_state"], weights)
    return model.eval().requires_grad_(False)
