"""The run in Weights & Biases (W&B) to which a training logs, if WANDB.ENABLE is True."""

from __future__ import annotations

import os
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.config.yaml_files import parse_yaml
from slowfast_lara.errors import ConfigError, first_line
from slowfast_lara.files import write_text

# In OUTPUT_DIR: the id of the W&B run, so that a resumed training logs to the same run.
ID_FILE = "wandb_run_id.txt"


def start_wandb(cfg: CfgNode) -> Any:
    """Start or resume the W&B run of OUTPUT_DIR; W&B's environment variables apply."""
    import wandb  # optional dependency

    path = os.path.join(cfg.OUTPUT_DIR, ID_FILE)
    run_id = None
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            run_id = file.read(100).strip()
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "slowfast_lara"),
            name=os.environ.get("WANDB_NAME", os.path.basename(os.path.abspath(cfg.OUTPUT_DIR))),
            dir=cfg.OUTPUT_DIR,
            config=parse_yaml(cfg.dump(), "the config"),
            id=run_id or None,
            resume="allow",
            settings=wandb.Settings(console="off"),  # stdout.log records the output
        )
    except Exception as error:  # no API key, no network, ...: W&B raises many exception types
        raise ConfigError(
            f"WANDB.ENABLE is True, but W&B does not start: {first_line(error)}; "
            "set the environment variable WANDB_MODE=offline to log without a server"
        ) from None
    # A resumed training repeats some batches. W&B drops values of earlier steps, so the batch
    # number is a metric of its own.
    run.define_metric("*", step_metric="batch")
    write_text(path, f"{run.id}\n")
    return run
