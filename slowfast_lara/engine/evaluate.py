"""Validation with one clip per video, and tests with all views.

Every video counts once, for any number of ranks. (PySlowFast's sampler pads the list, so that
some videos count twice.) A test runs no collectives while it scores its videos.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from fvcore.common.config import CfgNode
from slowfast.utils.logging import log_json_stats
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from slowfast_lara.data.dataset import VideoDataset, VideoViews
from slowfast_lara.data.loader import TestVideos
from slowfast_lara.engine.distributed import all_gather, all_reduce_sum, barrier, rank, unwrap_ddp
from slowfast_lara.engine.score_files import ScoreFiles, VideoResult, scores_fingerprint
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.errors import RunError, Stopped
from slowfast_lara.files import atomic_write, write_json
from slowfast_lara.inference.scoring import autocast, score_views, to_device
from slowfast_lara.models.build import device_of
from slowfast_lara.progress import progress_bar
from slowfast_lara.runs.folder import TEST_RESULTS

logger = logging.getLogger(__name__)


class TestedWeights(NamedTuple):
    """The tested checkpoint, whether its EMA weights are tested, and the class names if known."""

    checkpoint: str
    averaged: bool
    class_names: list[str] | None


def count_correct(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Count the top-1 and top-5 correct predictions; the counts stay on the device.

    PySlowFast's `topks_correct` raises for more than one video: it calls `view` on a transposed
    tensor, which PyTorch no longer allows.
    """
    top5 = scores.topk(min(5, scores.shape[1]), dim=1).indices
    correct = top5 == labels[:, None]
    return correct[:, 0].sum(), correct.sum()


@torch.no_grad()
def validate(
    model: nn.Module, loader: DataLoader, cfg: CfgNode, stop: StopRequest
) -> dict[str, Any] | None:
    """Return the mean loss, the errors in percent and the video counts; None after a stop request.

    The loss is the cross-entropy of the labels without smoothing.
    """
    model = unwrap_ddp(model)
    model.eval()
    device = device_of(cfg)
    correct = torch.zeros(2, dtype=torch.int64, device=device)
    loss = torch.zeros((), device=device)
    count = failed = 0.0
    for batch in stop.batches(loader):
        if stop.requested:
            break
        failed += len(batch.failures)
        for failure in batch.failures:
            logger.warning("Ignoring a video: %s: %s", failure.path, failure.reason)
        if batch.clips:
            with autocast(cfg, device):
                scores = model([to_device(clip, device) for clip in batch.clips])
            labels, scores = to_device(batch.labels, device), scores.float()
            correct += torch.stack(count_correct(scores, labels))
            # In eval mode the model returns probabilities; a tiny one may be rounded to 0.
            log_scores = scores.clamp_min(torch.finfo(scores.dtype).tiny).log()
            loss += functional.nll_loss(log_scores, labels, reduction="sum")
            count += len(batch.labels)
    model.train()
    local = [loss.item(), *correct.tolist(), count, failed, stop.requested]
    total_loss, top1, top5, count, failed, stopped = all_reduce_sum(local)
    if stopped:
        return None
    if not count:
        raise RunError("no video of the validation list could be decoded")
    return {
        "loss": total_loss / count,
        "top1_err": 100.0 - 100.0 * top1 / count,
        "top5_err": 100.0 - 100.0 * top5 / count,
        "num_videos": int(count),
        "num_failed": int(failed),
    }


def run_test(
    model: nn.Module, loader: DataLoader, cfg: CfgNode, weights: TestedWeights, stop: StopRequest
) -> None:
    """Score every video of the test list and write the results.

    The scores of each video are saved immediately, so that an interrupted test can resume.
    """
    model = unwrap_ddp(model).eval()
    dataset = cast(VideoDataset, loader.dataset)
    fingerprint = scores_fingerprint(model, dataset.paths, dataset.labels, cfg)
    files = ScoreFiles(cfg.OUTPUT_DIR, fingerprint, cfg.MODEL.NUM_CLASSES)
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
            f"{len(dataset)} videos are scored; the same command resumes the test"
        )
    by_rank = all_gather(results)
    if rank() == 0:
        merged = sorted((result for part in by_rank for result in part), key=lambda r: r.index)
        _write_results(merged, dataset, cfg, weights)
    barrier()  # no rank may remove its score files before rank 0 has written the results
    files.remove()


def _resume_test(files: ScoreFiles, loader: DataLoader) -> list[VideoResult]:
    """Return the results saved by an interrupted test; exclude their videos from the loader.

    On a shared file system, several ranks find the same score files. Only the lowest rank that
    finds the scores of a video returns its result.
    """
    found = files.read()
    by_rank = all_gather((sorted(found), len(files.of_other_tests)))
    files.remove_other_tests()
    done = {index for indices, _ in by_rank for index in indices}
    if any(others for _, others in by_rank):
        logger.warning(
            "Removing scores of an interrupted test that had other weights, list, config or version"
        )
    if done:
        logger.info("Resuming a test: %d videos are already scored", len(done))
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
        reason = "the scores of the model are not finite"
    logger.warning("Ignoring a video: %s: %s", video.path, reason)
    return VideoResult(video.index, reason=reason)


def _write_results(
    results: list[VideoResult], dataset: VideoDataset, cfg: CfgNode, weights: TestedWeights
) -> None:
    scored, failed, rows, names = [], [], [], weights.class_names
    for result in results:
        label = dataset.labels[result.index]
        video: dict[str, Any] = {"path": dataset.paths[result.index], "label": label}
        video |= {"label_name": names[label]} if names else {}
        if result.scores is None:
            failed.append({**video, "reason": result.reason})
            continue
        order = np.argsort(-result.scores, kind="stable")[:5]
        video |= {"top5": order.tolist(), "top5_scores": result.scores[order].tolist()}
        video |= {"top5_names": [names[number] for number in order]} if names else {}
        scored.append({**video, "num_views": result.num_views})
        rows.append(result.scores)
    if not scored:
        raise RunError(
            f"none of the {len(failed)} test videos could be scored; the first: "
            f"{failed[0]['path']}: {failed[0]['reason']}"
        )
    scores, labels = np.stack(rows), [video["label"] for video in scored]
    tensors = torch.from_numpy(scores), torch.tensor(labels)
    top1, top5 = count_correct(*tensors)
    summary = {
        "top1_acc": 100.0 * top1.item() / len(scored),
        "top5_acc": 100.0 * top5.item() / len(scored),
        "num_videos": len(scored),
        "num_failed": len(failed),
    }
    content = {
        **summary,
        "checkpoint": weights.checkpoint,
        "weights": "moving average" if weights.averaged else "as trained",
        "per_class": _per_class(*tensors, names),
        "videos": scored,
        "failed": failed,
    }
    path = os.path.join(cfg.OUTPUT_DIR, TEST_RESULTS)
    write_json(path, content)
    if cfg.TEST.SAVE_RESULTS_PATH:
        # scores is [videos, classes]; the other arrays are [videos].
        scores_path = os.path.join(cfg.OUTPUT_DIR, cfg.TEST.SAVE_RESULTS_PATH)
        paths, num_views = ([video[key] for video in scored] for key in ("path", "num_views"))
        with atomic_write(scores_path) as temporary, open(temporary, "wb") as file:
            np.savez(file, scores=scores, paths=paths, labels=labels, num_views=num_views)
    logger.info("Wrote the results of all videos to %s", path)
    log_json_stats({"split": "test_final", **summary})
    top5_text = f", top-5 {summary['top5_acc']:.2f} %" if scores.shape[1] > 5 else ""
    failed_text = f"; {len(failed)} videos failed" if failed else ""
    logger.info(
        f"Test of {os.path.basename(weights.checkpoint)}: top-1 {summary['top1_acc']:.2f} %"
        f"{top5_text} on {len(scored)} videos{failed_text}"
    )


def _per_class(
    scores: Tensor, labels: Tensor, names: list[str] | None
) -> dict[str, dict[str, float | str]]:
    is_correct = scores.argmax(dim=1) == labels
    result: dict[str, dict[str, float | str]] = {}
    for label in labels.unique().tolist():
        part = is_correct[labels == label]
        name = {"name": names[label]} if names else {}
        accuracy = 100.0 * part.double().mean().item()
        result[str(label)] = {**name, "top1_acc": accuracy, "num_videos": len(part)}
    return result
