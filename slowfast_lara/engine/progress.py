"""Training metrics: a progress bar, lines in the log, scalars for TensorBoard and W&B.

The `json_stats:` lines use PySlowFast's keys. PySlowFast's TrainMeter is not used: it reports no
data loading time and computes the ETA from the last iteration only. Importing it also imports
matplotlib, which takes a second.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np
import torch
from fvcore.common.config import CfgNode
from fvcore.common.history_buffer import HistoryBuffer
from slowfast.utils.logging import log_json_stats

from slowfast_lara.config.yaml_files import parse_yaml
from slowfast_lara.data.dataset import Sample, VideoDataset
from slowfast_lara.data.transforms import pixels_of
from slowfast_lara.engine.distributed import rank
from slowfast_lara.engine.iteration import PendingIteration
from slowfast_lara.engine.metrics import main_metric
from slowfast_lara.engine.throughput import Throughput
from slowfast_lara.errors import ConfigError, first_line
from slowfast_lara.files import write_text
from slowfast_lara.labels import label_kind
from slowfast_lara.progress import progress_bar

logger = logging.getLogger(__name__)
T = TypeVar("T")

# File in OUTPUT_DIR with the W&B run id, so that a resumed run logs to the same W&B run.
WANDB_ID_FILE = "wandb_run_id.txt"


class TrainProgress:
    """Mean loss, errors and times over the last LOG_PERIOD batches and over the epoch."""

    def __init__(
        self, cfg: CfgNode, epoch_batches: int, accuracies: Sequence[str], throughput: Throughput
    ) -> None:
        self._cfg, self._epoch_batches, self._throughput = cfg, epoch_batches, throughput
        self._errors = [f"{name}_err" for name in accuracies]
        self._data_seconds = 0.0
        self._summary: list[str] = []  # results of the current epoch
        self._writer: Any = None
        if rank() == 0 and cfg.TENSORBOARD.ENABLE:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            folder = cfg.TENSORBOARD.LOG_DIR or os.path.join(cfg.OUTPUT_DIR, "tensorboard")
            self._writer = SummaryWriter(folder)
        self._wandb = start_wandb(cfg) if rank() == 0 and cfg.WANDB.ENABLE else None

    def show_clips(self, dataset: VideoDataset, class_names: list[str] | None) -> None:
        """Write a few labelled clips to TensorBoard, if TENSORBOARD.ENABLE is True."""
        if self._writer is not None:
            write_clips(self._writer, dataset, class_names)

    def start_epoch(self, epoch: int, first_batch: int) -> None:
        self._epoch, self._batch = epoch, first_batch
        names = ("loss", *self._errors, "dt", "dt_data")
        self._meters = {name: HistoryBuffer(self._cfg.LOG_PERIOD) for name in names}
        self._bar = progress_bar(
            self._epoch_batches,
            f"epoch {epoch + 1}/{self._cfg.SOLVER.MAX_EPOCH}",
            unit="batch",
            initial=first_batch,
        )
        self._clock = time.perf_counter()

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate over the batches and measure the time spent waiting for each."""
        start = time.perf_counter()
        for batch in batches:
            self._data_seconds = time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last call, and the seconds spent waiting for the batch.

        The first call of an epoch counts from `start_epoch`.
        """
        last, self._clock = self._clock, time.perf_counter()
        return {"dt": self._clock - last, "dt_data": self._data_seconds}

    def update(self, pending: PendingIteration, means: dict[str, float]) -> None:
        """Add the metrics of an iteration (means over ranks); log every LOG_PERIOD batches."""
        for name, value in {**means, **pending.times}.items():
            self._meters[name].update(value)
        self._batch, self._lr = pending.iteration.batch + 1, pending.iteration.lr
        if rank() != 0:
            return
        # The last two entries of `_errors` are the top-1 and top-5 errors; for EPIC-KITCHENS, those
        # of the action.
        top1 = f"{100 - self._recent(self._errors[-2]):.1f}%" if self._errors else ""
        self._bar.set_postfix(
            loss=f"{self._recent('loss'):.3f}",
            **({"top1": top1} if top1 else {}),
            data=f"{self._recent('dt_data'):.3f}s",
            eta=self._eta(),
            refresh=False,
        )
        self._bar.update()
        if self._batch % self._cfg.LOG_PERIOD == 0:
            means = {name: self._recent(name) for name in self._meters}
            self._report("train_iter", means, iter=f"{self._batch}/{self._epoch_batches}")

    def end_epoch(self) -> None:
        self._bar.close()
        if rank() == 0 and self._meters["loss"].values():
            means = {name: meter.global_avg() for name, meter in self._meters.items()}
            self._report("train_epoch", means)
            self._summary = _summarize(means)

    def log_validation(self, epoch: int, stats: dict[str, Any]) -> None:
        if rank() == 0:
            total = self._cfg.SOLVER.MAX_EPOCH
            log_json_stats({"_type": "val_epoch", "epoch": f"{epoch + 1}/{total}", **stats})
            keys = ("loss", *self._errors, "map")
            scalars = {key: stats[key] for key in keys if key in stats}
            self._write("val", scalars, (epoch + 1) * self._epoch_batches)
            self._summary += _summarize(stats, "val ")

    def log_epoch(self, epoch: int) -> None:
        """Log one line with the training and validation results of an epoch."""
        if self._summary:
            total = self._cfg.SOLVER.MAX_EPOCH
            logger.info("Epoch %d/%d: %s", epoch + 1, total, ", ".join(self._summary))
        self._summary = []

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _recent(self, name: str) -> float:
        return self._meters[name].avg(self._cfg.LOG_PERIOD)

    def _report(self, kind: str, values: dict[str, float], **fields: str) -> None:
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        log_json_stats(
            {
                "_type": kind,
                "epoch": f"{self._epoch + 1}/{self._cfg.SOLVER.MAX_EPOCH}",
                **fields,
                **values,
                "eta": self._eta(),
                # log_json_stats rounds floats to six decimals, too few for a learning rate.
                "lr": Decimal(f"{self._lr:.6g}"),
                **self._throughput.stats(values["dt"]),  # per process, i.e. per GPU
                "gpu_mem": f"{memory:.2f}G",
                **_peak_memory(),
            }
        )
        scalars = {key: values[key] for key in ("loss", *self._errors)}
        step = self._epoch * self._epoch_batches + self._batch
        self._write(kind, {**scalars, "lr": self._lr}, step)

    def _write(self, group: str, scalars: dict[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)
            self._writer.flush()
        if self._wandb is not None:
            named = {f"{group}/{name}": value for name, value in scalars.items()}
            self._wandb.log({"batch": step, **named})

    def _eta(self) -> str:
        done = self._epoch * self._epoch_batches + self._batch
        left = self._cfg.SOLVER.MAX_EPOCH * self._epoch_batches - done
        return str(datetime.timedelta(seconds=int(self._recent("dt") * left)))


def start_wandb(cfg: CfgNode) -> Any:
    """Start or resume the W&B run of OUTPUT_DIR; W&B's environment variables apply."""
    import wandb  # optional dependency

    path = os.path.join(cfg.OUTPUT_DIR, WANDB_ID_FILE)
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
    # A resumed run repeats some batches. W&B drops values of earlier steps; therefore the batch
    # number is logged as a metric and is not W&B's step.
    run.define_metric("*", step_metric="batch")
    write_text(path, f"{run.id}\n")
    return run


def _summarize(stats: dict[str, float], prefix: str = "") -> list[str]:
    parts = [f"{prefix}loss {stats['loss']:.3f}"]
    with contextlib.suppress(KeyError):  # with MULTI_LABEL, training has only a loss
        name, error = main_metric(stats)
        parts.append(f"{prefix}{name} {100 - error:.1f} %")
    return parts


def _peak_memory() -> dict[str, str]:
    """Return the peak memory of this process; {} on Windows, which has no module `resource`."""
    try:
        import resource
    except ImportError:
        return {}
    unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, Linux kilobytes
    return {"ram": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.2f}G"}


def write_clips(
    writer: Any, dataset: VideoDataset, class_names: list[str] | None, count: int = 4
) -> None:
    """Write clips of up to `count` different labels to a SummaryWriter, frames side by side."""
    kind = label_kind(dataset.cfg)
    first_of_label = {label: index for index, label in reversed([*enumerate(dataset.labels)])}
    for label, index in sorted(first_of_label.items(), key=lambda item: item[1])[:count]:
        sample = dataset[index]
        if isinstance(sample, Sample) and sample.clip is not None:
            raw = sample.clip.numpy() if dataset.raw else pixels_of(sample.clip, dataset.cfg)
            frames = np.concatenate(list(raw), axis=1)
            # TensorBoard replaces special characters; the class number keeps the tags distinct.
            name = kind.name_of(label, class_names) if class_names else "class"
            number = label if isinstance(label, int) else "_".join(map(str, label))
            writer.add_image(f"clips/{number}_{name}", frames, dataformats="HWC")
