"""Validation with one clip per video, and tests with all views.

Every video counts once, for any number of ranks. (PySlowFast's sampler pads the list, so that
some videos count twice.) A test runs no collectives while it scores its videos.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from fvcore.common.config import CfgNode
from slowfast.utils.logging import log_json_stats
from torch import Tensor, nn
from torch.utils.data import DataLoader

from slowfast_lara.data.bad_videos import Failure
from slowfast_lara.data.dataset import VideoDataset, VideoViews
from slowfast_lara.data.loader import TestVideos
from slowfast_lara.engine.batch_copies import BatchCopies
from slowfast_lara.engine.distributed import all_gather, all_reduce_sum, barrier, rank, unwrap_ddp
from slowfast_lara.engine.metrics import metrics, per_class, score_loss
from slowfast_lara.engine.score_files import (
    ScoreFiles,
    VideoResult,
    remove_files,
    scores_fingerprint,
)
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.errors import RunError, Stopped, counted
from slowfast_lara.files import atomic_write, write_json
from slowfast_lara.inference.prediction import Prediction
from slowfast_lara.inference.scoring import autocast, score_views
from slowfast_lara.labels import Label, LabelKind, label_kind
from slowfast_lara.models.build import device_of
from slowfast_lara.progress import progress_bar
from slowfast_lara.runs.folder import TEST_METRICS, TEST_RESULTS

logger = logging.getLogger(__name__)

NOT_FINITE = "the scores of the model are not finite"


class TestedWeights(NamedTuple):
    """The tested checkpoint, whether its EMA weights are tested, and the class names if known."""

    checkpoint: str
    averaged: bool
    class_names: list[str] | None


@torch.no_grad()
def validate(
    model: nn.Module, loader: DataLoader, cfg: CfgNode, stop: StopRequest
) -> dict[str, Any] | None:
    """Return the mean loss, the errors or the mAP in percent, and the video counts.

    The loss uses no label smoothing. As in a test, a video with non-finite scores counts as
    failed. The result is None after a stop request on any rank.
    """
    model = unwrap_ddp(model)
    model.eval()
    device, kind = device_of(cfg), label_kind(cfg)
    scores, labels = [torch.empty(0, kind.num_classes, device=device)], []
    indices, failures = [torch.empty(0, dtype=torch.int64)], []
    copies = BatchCopies(cfg, device)
    for batch in stop.batches(loader):
        if stop.requested:
            break
        failures += batch.failures
        if batch.clips:
            with autocast(cfg, device):
                scores.append(model(copies(batch)[0]).float())
            labels.append(batch.labels)
            indices.append(batch.indices)
    model.train()
    own_scores, paths = torch.cat(scores).cpu(), cast(VideoDataset, loader.dataset).paths
    finite = own_scores.isfinite().all(dim=1)
    failures += [Failure(paths[index], NOT_FINITE) for index in torch.cat(indices)[~finite]]
    for failure in failures:
        logger.warning("Ignoring a video: %s: %s", *failure)
    own_labels = torch.cat(labels)[finite] if labels else None
    parts = all_gather((own_scores[finite], own_labels, failures, stop.requested))
    if any(stopped for *_, stopped in parts):
        return None
    return _validation_stats(
        torch.cat([part[0] for part in parts]),
        [part[1] for part in parts if part[1] is not None],
        [failure for part in parts for failure in part[2]],
        kind,
    )


def _validation_stats(
    scores: Tensor, labels: list[Tensor], failures: list[Failure], kind: LabelKind
) -> dict[str, Any]:
    """Validation metrics; accuracies are converted to error rates, as in PySlowFast's log."""
    if not len(scores):
        raise _nothing_scored("validation", failures)
    all_labels = torch.cat(labels)
    errors = {
        key.replace("_acc", "_err"): 100.0 - value if key.endswith("_acc") else value
        for key, value in metrics(scores, all_labels, kind).items()
    }
    not_finite = sum(failure.reason == NOT_FINITE for failure in failures)
    return {
        "loss": score_loss(scores, all_labels, kind).item(),
        **errors,
        "num_videos": len(scores),
        "num_failed": len(failures),
        **({"num_not_finite": not_finite} if not_finite else {}),
    }


def _nothing_scored(split: str, failures: Sequence[Failure]) -> RunError:
    first = failures[0]
    return RunError(
        f"none of {counted(len(failures), f'{split} video')} could be scored; first failure: "
        f"{first.path}: {first.reason}"
    )


def run_test(
    model: nn.Module, loader: DataLoader, cfg: CfgNode, weights: TestedWeights, stop: StopRequest
) -> None:
    """Score every video of the test list and write the results.

    The scores of each video are saved immediately, so that an interrupted test can resume.
    """
    model = unwrap_ddp(model).eval()
    dataset = cast(VideoDataset, loader.dataset)
    fingerprint = scores_fingerprint(model, dataset.paths, dataset.labels, cfg)
    files = ScoreFiles(cfg.OUTPUT_DIR, fingerprint, label_kind(cfg).num_classes)
    results = _resume_test(files, loader)
    started, num_resumed = time.perf_counter(), len(results)
    with progress_bar(len(loader), "test", unit="video") as bar:
        for video in stop.batches(loader):
            if stop.requested:
                break
            results.append(_score(model, video, cfg, files))
            bar.update()
            num_scored = len(results) - num_resumed
            if num_scored % cfg.LOG_PERIOD == 0:
                log_json_stats(
                    {
                        "split": "test_iter",
                        "cur_iter": f"{num_scored}/{len(loader)}",
                        "time_diff": (time.perf_counter() - started) / num_scored,
                    }
                )
    # If one rank stops, all ranks stop: the results need the scores of every rank.
    num_done, stopped = all_reduce_sum([len(results), stop.requested])
    if stopped:
        raise Stopped(
            f"stopped by {stop.signal_name or 'a signal to another process'}; {num_done:.0f} of "
            f"{counted(len(dataset), 'video')} processed; the same command resumes the test"
        )
    by_rank = all_gather(results)
    if rank() == 0:
        merged = sorted((result for part in by_rank for result in part), key=lambda r: r.index)
        _write_results(merged, dataset, cfg, weights)
    barrier()  # no rank may remove its score files before rank 0 has written the results
    files.remove()


def _resume_test(files: ScoreFiles, loader: DataLoader) -> list[VideoResult]:
    """Return this rank's share of the results that an interrupted test saved.

    On a shared file system, several ranks find the same score files. Only the lowest rank that
    finds the scores of a video returns its result. The loader leaves out all videos with scores.
    """
    found = files.read()
    by_rank = all_gather((sorted(found), len(files.of_other_tests)))
    remove_files(files.of_other_tests)
    done = {index for indices, _ in by_rank for index in indices}
    if any(others for _, others in by_rank):
        logger.warning(
            "Removing scores of an interrupted test with different weights, list, config or version"
        )
    if done:
        logger.info("Resuming a test: %s already scored", counted(len(done), "video"))
    cast(TestVideos, loader.sampler).leave_out(done)
    on_lower_ranks = {index for indices, _ in by_rank[: rank()] for index in indices}
    return [result for index, result in found.items() if index not in on_lower_ranks]


def _score(model: nn.Module, video: VideoViews, cfg: CfgNode, files: ScoreFiles) -> VideoResult:
    reason = video.error or ""
    if video.views is not None:
        mean = score_views(model, video.views, cfg)
        if torch.isfinite(mean).all():
            result = VideoResult(video.index, len(video.views), mean.numpy())
            files.add(result)
            return result
        reason = NOT_FINITE
    logger.warning("Ignoring a video: %s: %s", video.path, reason)
    return VideoResult(video.index, reason=reason)


def _write_results(
    results: list[VideoResult], dataset: VideoDataset, cfg: CfgNode, weights: TestedWeights
) -> None:
    kind, names = label_kind(cfg), weights.class_names
    failed: list[dict[str, Any]] = [
        {
            "path": dataset.paths[result.index],
            **_labelled(dataset.labels[result.index], kind, names),
            "reason": result.reason,
        }
        for result in results
        if result.scores is None
    ]
    scored = [result for result in results if result.scores is not None]
    if not scored:
        raise _nothing_scored("test", [Failure(video["path"], video["reason"]) for video in failed])
    scores = torch.from_numpy(np.array([result.scores for result in scored]))
    labels = torch.tensor(np.array([dataset.target(result.index) for result in scored]))
    counts = {"num_videos": len(scored), "num_failed": len(failed)}
    summary = {**metrics(scores, labels, kind), **counts}
    videos = [
        _video_entry(result, dataset.paths[result.index], dataset.labels[result.index], kind, names)
        for result in scored
    ]
    content = {
        **summary,
        "checkpoint": weights.checkpoint,
        "weights": "moving average" if weights.averaged else "as trained",
        "per_class": per_class(scores, labels, kind, names),
        "videos": videos,
        "failed": failed,
    }
    path = os.path.join(cfg.OUTPUT_DIR, TEST_RESULTS)
    write_json(path, content)
    if cfg.TEST.SAVE_RESULTS_PATH:
        # scores: [videos, classes]; labels: [videos], [videos, 2] or multi-hot [videos, classes]
        scores_path = os.path.join(cfg.OUTPUT_DIR, cfg.TEST.SAVE_RESULTS_PATH)
        paths, num_views = ([video[key] for video in videos] for key in ("path", "num_views"))
        with atomic_write(scores_path) as temporary, open(temporary, "wb") as file:
            np.savez(file, scores=scores, paths=paths, labels=labels, num_views=num_views)
    logger.info("Wrote the results of all videos to %s", path)
    log_json_stats({"split": "test_final", **summary})
    _log_summary(summary, os.path.basename(weights.checkpoint), math.prod(kind.parts.values()))


def _log_summary(summary: dict[str, float], checkpoint: str, num_classes: int) -> None:
    """Log the results of a test in one line; omit top-5 (always 100 %) for at most five classes."""
    results = ", ".join(
        f"{name.removesuffix(' accuracy')} {summary[key]:.2f} %"
        for key, name in TEST_METRICS.items()
        if key in summary and (num_classes > 5 or "top5" not in key)
    )
    num_failed = summary["num_failed"]
    failed_text = f"; {num_failed} failed" if num_failed else ""
    videos = counted(int(summary["num_videos"]), "video")
    logger.info(f"Test of {checkpoint}: {results} on {videos}{failed_text}")


def _labelled(label: Label, kind: LabelKind, names: Sequence[str] | None) -> dict[str, Any]:
    """Entries `label` and, if class names are known, `label_name` of a video's result."""
    return {"label": label} | ({"label_name": kind.name_of(label, names)} if names else {})


def _video_entry(
    result: VideoResult, path: str, label: Label, kind: LabelKind, names: Sequence[str] | None
) -> dict[str, Any]:
    """A video's entry in the results: path, number of views, label, top-5 classes and their scores.

    For a (verb, noun) label, the entry also has label, top-5 classes and scores of each part.
    """
    assert result.scores is not None
    found = Prediction(result.scores, names or (), result.num_views, path, kind=kind).to_dict()
    if isinstance(label, tuple) and kind.is_pair:
        part_names = kind.split_names(names) if names else {}
        for part, own in zip(kind.parts, label):
            labelled = _labelled(own, LabelKind({"": kind.parts[part]}), part_names.get(part))
            found[part] = {**labelled, **found[part]}
    return {"path": path, **_labelled(label, kind, names), **found}
