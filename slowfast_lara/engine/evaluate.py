"""Accuracy: of one clip of each video while training, of all views in a test.

Every video counts once, whatever the number of processes; between the start and the end
of a test no process waits for another. PySlowFast's sampler pads, so that some videos count twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from fvcore.common.config import CfgNode
from slowfast.utils.logging import log_json_stats
from torch import Tensor, nn
from torch.utils.data import DataLoader

from slowfast_lara.data.dataset import VideoDataset, VideoViews
from slowfast_lara.data.loader import TestVideos
from slowfast_lara.engine.distributed import (
    gather,
    gather_on_first,
    rank,
    sum_over_processes,
    without_ddp,
)
from slowfast_lara.engine.score_files import Score, ScoreFiles, identity_of_test
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.errors import RunError, Stopped
from slowfast_lara.files import atomic_write, write_json
from slowfast_lara.inference.scoring import autocast, score_views, to_device
from slowfast_lara.models.build import device_of
from slowfast_lara.progress import progress_bar
from slowfast_lara.runs.folder import TEST_RESULTS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredVideo:
    """A tested video: `scores` [classes] are the mean over its views."""

    index: int
    path: str
    label: int
    num_views: int
    scores: np.ndarray


@dataclass(frozen=True)
class UnscoredVideo:
    """A video of the test that has no scores, and why."""

    index: int
    path: str
    label: int
    reason: str


class TestedWeights(NamedTuple):
    """The checkpoint that a test is of, and whether of the moving average of its weights."""

    checkpoint: str
    averaged: bool


def count_correct(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How many labels are the first guess, and among the first five (if there are five).

    The counts stay on the device of the scores. PySlowFast's `topks_correct` raises for
    more than one video: it takes a `view` of a transposed tensor, which PyTorch no longer
    allows.
    """
    guesses = scores.topk(min(5, scores.shape[1]), dim=1).indices
    right = guesses == labels[:, None]
    return right[:, 0].sum(), right.sum()


@torch.no_grad()
def validate(
    model: nn.Module, loader: DataLoader, cfg: CfgNode, stop: StopRequest
) -> dict[str, Any] | None:
    """The accuracy with one clip of each video; None if a signal cut it short."""
    model = without_ddp(model)
    model.eval()
    device = device_of(cfg)
    correct = torch.zeros(2, dtype=torch.int64, device=device)
    count = failed = 0.0
    for batch in stop.batches(loader):
        if stop.requested:
            break
        failed += len(batch.failures)
        for failure in batch.failures:
            logger.warning("not counted: %s: %s", failure.path, failure.reason)
        if batch.clips:
            with autocast(cfg, device):
                scores = model([to_device(clip, device) for clip in batch.clips])
            labels = to_device(batch.labels, device)
            correct += torch.stack(count_correct(scores.float(), labels))
            count += len(batch.labels)
    model.train()
    mine = [*correct.tolist(), count, failed, stop.requested]
    top1, top5, count, failed, stopped = sum_over_processes(mine)
    if stopped:
        return None
    if not count:
        raise RunError("no video of the validation list could be decoded")
    return {
        "top1_err": 100.0 - 100.0 * top1 / count,
        "top5_err": 100.0 - 100.0 * top5 / count,
        "num_videos": int(count),
        "num_failed": int(failed),
    }


def run_test(
    model: nn.Module, loader: DataLoader, cfg: CfgNode, weights: TestedWeights, stop: StopRequest
) -> None:
    """Score every video of the test list, and write what came out.

    Scores are written as they come, and a test that was cut short goes on from there.
    """
    model = without_ddp(model).eval()
    dataset = cast(VideoDataset, loader.dataset)
    files = ScoreFiles(cfg.OUTPUT_DIR, identity_of_test(model, dataset.paths, dataset.labels, cfg))
    mine = _take_up(files, loader)
    started, before = time.perf_counter(), len(mine)
    with progress_bar(len(loader), "test", unit="video") as bar:
        for video in stop.batches(loader):
            if stop.requested:
                break
            mine.append(_score(model, video, cfg, files))
            bar.update()
            scored = len(mine) - before
            if scored % cfg.LOG_PERIOD == 0:
                log_json_stats(
                    {
                        "split": "test_iter",
                        "cur_iter": f"{scored}/{len(loader)}",
                        "time_diff": (time.perf_counter() - started) / scored,
                    }
                )
    # All stop if one does: the results would lack its videos.
    states = gather((stop.requested, len(mine)))
    if any(stopped for stopped, _ in states):
        scored = sum(count for _, count in states)
        raise Stopped(
            f"stopped by {stop.signal_name or 'a signal to another process'}; {scored} of "
            f"{len(dataset)} videos are done; the same command goes on with the others"
        )
    gathered = gather_on_first(mine)
    if gathered is not None:
        videos = sorted((video for share in gathered for video in share), key=lambda v: v.index)
        scored_videos = [video for video in videos if isinstance(video, ScoredVideo)]
        failed = [video for video in videos if isinstance(video, UnscoredVideo)]
        _write_results(scored_videos, failed, cfg, weights)
    gather(None)  # the results are written
    files.remove()


def _take_up(files: ScoreFiles, loader: DataLoader) -> list[ScoredVideo | UnscoredVideo]:
    """Leave out of the loader what is scored already; what this process hands in of that.

    The processes may share their folders or not, and may have been more or fewer: of those
    that have found the scores of a video, the first hands them in.
    """
    found = files.read()
    everywhere = gather((sorted(found), len(files.others)))
    files.remove_others()
    done = {index for indices, _ in everywhere for index in indices}
    if any(others for _, others in everywhere):
        logger.warning(
            "the scores of a test that was cut short are of another one (weights, list, config "
            "or version differ), so they are removed"
        )
    if done:
        logger.info("Going on with a test: %d videos are scored", len(done))
    cast(TestVideos, loader.sampler).leave_out(done)
    handed_in = {index for indices, _ in everywhere[: rank()] for index in indices}
    dataset = cast(VideoDataset, loader.dataset)
    return [
        ScoredVideo(index, dataset.paths[index], dataset.labels[index], *score)
        for index, score in sorted(found.items())
        if index not in handed_in
    ]


def _score(
    model: nn.Module, video: VideoViews, cfg: CfgNode, files: ScoreFiles
) -> ScoredVideo | UnscoredVideo:
    reason = video.error or ""
    if video.views is not None:
        scores = score_views(model, video.views, cfg)
        if torch.isfinite(scores).all():
            score = Score(len(video.views), scores.numpy())
            files.add(video.index, score)
            return ScoredVideo(video.index, video.path, video.label, *score)
        reason = "the model's scores are not finite"
    logger.warning("not counted: %s: %s", video.path, reason)
    return UnscoredVideo(video.index, video.path, video.label, reason)


def _write_results(
    scored: list[ScoredVideo], failed: list[UnscoredVideo], cfg: CfgNode, weights: TestedWeights
) -> None:
    if not scored:
        raise RunError(
            f"none of the {len(failed)} test videos could be scored; the first: "
            f"{failed[0].path}: {failed[0].reason}"
        )
    scores = torch.from_numpy(np.stack([video.scores for video in scored]))
    labels = torch.tensor([video.label for video in scored])
    top1, top5 = (100.0 * count.item() / len(scored) for count in count_correct(scores, labels))
    summary = {
        "top1_acc": top1,
        "top5_acc": top5,
        "num_videos": len(scored),
        "num_failed": len(failed),
    }
    results = {
        **summary,
        "checkpoint": weights.checkpoint,
        "weights": "moving average" if weights.averaged else "as trained",
        "per_class": _per_class(scores, labels),
        "videos": [_as_json(video) for video in scored],
        "failed": [{"path": v.path, "label": v.label, "reason": v.reason} for v in failed],
    }
    path = os.path.join(cfg.OUTPUT_DIR, TEST_RESULTS)
    with _scores_are_kept(path):
        write_json(path, results)
    if cfg.TEST.SAVE_RESULTS_PATH:
        save_path = os.path.join(cfg.OUTPUT_DIR, cfg.TEST.SAVE_RESULTS_PATH)
        with _scores_are_kept(save_path):
            _save_scores(save_path, scored, scores)
    logger.info("Results of every video: %s", path)
    log_json_stats({"split": "test_final", **summary})


@contextlib.contextmanager
def _scores_are_kept(path: str) -> Iterator[None]:
    """Name the file that could not be written."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror}; all scores are kept: the same command "
            "writes it without scoring again"
        ) from None


def _as_json(video: ScoredVideo) -> dict[str, Any]:
    order = np.argsort(-video.scores, kind="stable")[:5]
    return {
        "path": video.path,
        "label": video.label,
        "top5": order.tolist(),
        "top5_scores": [float(video.scores[i]) for i in order],
        "num_views": video.num_views,
    }


def _per_class(scores: Tensor, labels: Tensor) -> dict[str, dict[str, float]]:
    right = scores.argmax(dim=1) == labels
    return {
        str(label): {
            "top1_acc": 100.0 * right[labels == label].double().mean().item(),
            "num_videos": int((labels == label).sum()),
        }
        for label in labels.unique().tolist()
    }


def _save_scores(path: str, videos: list[ScoredVideo], scores: Tensor) -> None:
    """An .npz of plain arrays: paths, labels, scores [videos, classes], num_views."""
    arrays: dict[str, Any] = {
        "scores": scores.numpy(),
        "paths": np.array([video.path for video in videos]),
        "labels": np.array([video.label for video in videos]),
        "num_views": np.array([video.num_views for video in videos]),
    }
    with atomic_write(path) as aside, open(aside, "wb") as file:
        np.savez(file, **arrays)
