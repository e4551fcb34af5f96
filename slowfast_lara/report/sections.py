"""Sections of the report of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import numpy as np

from slowfast_lara.data.sources import read_frames
from slowfast_lara.data.transforms import whole_frame
from slowfast_lara.errors import DecodeError
from slowfast_lara.models.attention_config import display_name
from slowfast_lara.report.page import chart, document, embedded_image, escape, table, tile
from slowfast_lara.runs.folder import TEST_METRICS, RunRecord, TestedVideo

# With more than this number of classes, the confusion matrix is an image instead of a table.
MAX_TABLE_CLASSES = 25
MAX_ERRORS = 24  # largest number of videos in the section of errors
THUMBNAIL_FRAMES, THUMBNAIL_SIDE = 4, 96


def report(run: RunRecord) -> str:
    """Build the HTML report of a run; sections without content are left out."""
    title = _title(run)
    config = f"<details><summary>all keys</summary><pre>{escape(run.config_text)}</pre></details>"
    failed = table(("video", "reason"), run.failed, name="failed")
    sections = {
        "Learning curves": _curves(run),
        **_results(run),
        "Videos that could not be scored": failed if run.failed else "",
        "Speed and memory": table(("", ""), _speed(run)) if run.stats else "",
        "Environment": _environment(run),
        "Config": config if run.config_text else "",
    }
    parts = [f"<h1>{escape(title)}</h1>", _summary(run)]
    parts += [
        f"<section><h2>{heading}</h2>\n{content}</section>"
        for heading, content in sections.items()
        if content
    ]
    return document(f"{title}: report", parts)


def _results(run: RunRecord) -> dict[str, str]:
    """Sections with the test results; their tables depend on the kind of labels."""
    if not run.videos:
        return {}
    if run.precisions:
        names = ("class", "videos", "average precision, %")
        rows = [(run.names[row.label], row.num_videos, row.percent) for row in run.precisions]
        return {"Classes": table(names, rows, name="classes")}
    sections = {}
    for part, record in (run.parts or {"": run}).items():
        of_part = f" of {part}s" if part else ""
        sections[f"Confusion matrix{of_part}"] = _confusion(record)
        sections[f"Classes{of_part}"] = _classes(record, name=f"{part}classes")
    return {**sections, "Worst errors": _errors(run)}


def _title(run: RunRecord) -> str:
    """The run's folder name; for a generic name ("out"), also the parent folder and attention."""
    parent, name = os.path.split(os.path.abspath(run.folder))
    if name.lower() not in ("out", "output", "run", "result", "results", "train", "test"):
        return name
    return ", ".join(filter(None, (f"{os.path.basename(parent)}/{name}", _attention(run))))


def _attention(run: RunRecord) -> str:
    attention = run.tested("VIT.APPROX_ATTN_TYPE")
    return f"{display_name(str(attention))} attention" if attention else ""


def _summary(run: RunRecord) -> str:
    parts = (
        run.tested("MODEL.MODEL_NAME"),
        run.tested("VIT.ATTN_LAYER"),
        _attention(run),
        run.tested("TEST.DATASET"),
        run.checkpoint,
    )
    model = " · ".join(str(part) for part in parts if part)
    tiles = []
    if run.videos:
        tiles += [tile(f"{run.metrics[key]:.2f} %", TEST_METRICS[key]) for key in run.metrics]
        tiles.append(tile(str(len(run.videos)), "videos tested"))
        tiles.append(tile(str(len(run.failed)), "videos failed"))
    for key, name in (("top1_err", "top-1"), ("action_top1_err", "action top-1"), ("map", "mAP")):
        if validation := run.curve("val_epoch", key):
            epoch, value = validation[-1]
            percent = value if key == "map" else 100 - value
            tiles.append(tile(f"{percent:.2f} %", f"validation {name}, epoch {epoch:g}"))
    return f'<p class="quiet">{escape(model)}</p><div class="tiles">{"".join(tiles)}</div>'


def _curves(run: RunRecord) -> str:
    kind = "train_iter" if run.curve("train_iter", "loss") else "train_epoch"
    if not run.curve(kind, "loss"):
        return ""
    charts = []
    keys = {"loss": "loss", "top-1 error, %": "top1_err", "top-5 error, %": "top5_err"}
    if len(run.names) <= 5:  # then the top-5 error is always 0
        del keys["top-5 error, %"]
    keys |= {f"{part} top-1 error, %": f"{part}_top1_err" for part in ("action", "verb", "noun")}
    for title, key in {**keys, "mean average precision, %": "map"}.items():
        lines = {"training": run.curve(kind, key), "validation": run.curve("val_epoch", key)}
        charts.append(chart(title, lines))
    charts.append(chart("learning rate", {"training": run.curve(kind, "lr")}))
    return f'<div class="charts">{"".join(charts)}</div>'


def _confusion(run: RunRecord) -> str:
    matrix = run.confusion()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    note = '<p class="quiet">rows: true class; columns: predicted class</p>'
    if len(matrix) > MAX_TABLE_CLASSES:
        grey = (255 * (1 - np.sqrt(shares))).astype(np.uint8)
        rgb = np.repeat(grey[..., None], 3, axis=2)
        shown = embedded_image(rgb, ".png", "confusion matrix", "pixels")
    else:
        columns = "".join(f"<th>{escape(name)}</th>" for name in run.names)
        rows = "".join(
            f"<tr><th>{escape(name)}</th>"
            + "".join(
                f'<td style="background: rgba(var(--heat), {share * 0.8:.2f})">{count or ""}</td>'
                for count, share in zip(counts, row)
            )
            + "</tr>"
            for name, counts, row in zip(run.names, matrix.tolist(), shares.tolist())
        )
        shown = (
            f'<div class="wide"><table class="matrix"><thead><tr><th></th>{columns}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )
    return note + shown + _confused_pairs(run, matrix)


def _confused_pairs(run: RunRecord, matrix: np.ndarray) -> str:
    wrong = matrix - np.diag(matrix.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[:10]
    pairs = [divmod(int(index), len(matrix)) for index in order]
    rows = [
        (run.names[label], run.names[other], int(wrong[label, other]), int(matrix[label].sum()))
        for label, other in pairs
        if wrong[label, other]
    ]
    columns = ("true class", "predicted class", "videos", "all videos of the true class")
    return "<p>Most frequent errors</p>" + table(columns, rows) if rows else ""


def _classes(run: RunRecord, name: str) -> str:
    matrix = run.confusion()
    in_top5 = np.zeros(len(matrix), int)
    for video in run.videos:
        in_top5[cast(int, video.label)] += video.label in video.top5
    wrong = matrix - np.diag(matrix.diagonal())
    rows = []
    for label, class_name in enumerate(run.names):
        count = int(matrix[label].sum())
        if count:
            top1, top5 = (100.0 * int(n) / count for n in (matrix[label, label], in_top5[label]))
            confused = run.names[wrong[label].argmax()] if wrong[label].any() else ""
            rows.append((class_name, count, top1, top5, confused))
    columns = ("class", "videos", "top-1 %", "top-5 %", "most often confused with")
    return table(columns, rows, name=name)


def _errors(run: RunRecord) -> str:
    wrong = [video for video in run.videos if not video.correct]
    if not wrong:
        return "<p>None.</p>"
    wrong.sort(key=lambda video: -video.scores[0])
    cards = "".join(_error_card(run, video) for video in wrong[:MAX_ERRORS])
    return (
        f'<p class="quiet">{len(wrong)} of {len(run.videos)} videos, sorted by the score of the '
        f'wrong class; at most {MAX_ERRORS} are shown</p><div class="errors">{cards}</div>'
    )


def _error_card(run: RunRecord, video: TestedVideo) -> str:
    try:
        shown = embedded_image(thumbnail(video.path), ".jpg", f"frames of {video.path}")
    except DecodeError:
        shown = '<div class="missing">video cannot be read</div>'
    # The results contain the scores of the top 5 classes only; the true class may be missing.
    own = [score for label, score in zip(video.top5, video.scores) if label == video.label]
    score = f"{own[0]:.1%}" if own else f"below {video.scores[-1]:.1%}"
    return (
        f'<div class="error">{shown}<p><b>{escape(run.name_of(video.label))}</b> ({score}), '
        f"predicted <b>{escape(run.name_of(video.top5[0]))}</b> ({video.scores[0]:.1%})</p>"
        f'<p class="quiet">{escape(video.path)}</p></div>'
    )


def thumbnail(path: str) -> np.ndarray:
    """THUMBNAIL_FRAMES evenly spaced frames of a video side by side, RGB."""

    def choose(frames: int, fps: float) -> np.ndarray:
        return np.linspace(0, frames - 1, THUMBNAIL_FRAMES).round().astype(int)

    resize = partial(whole_frame, short_side=THUMBNAIL_SIDE)
    frames = read_frames(path, choose, resize, whole=False)
    pixels = frames.pixels[frames.order]
    spaced = np.pad(pixels, ((0, 0), (0, 0), (0, 3), (0, 0)), constant_values=255)
    return np.concatenate(list(spaced), axis=1)[:, :-3]


def _speed(run: RunRecord) -> Iterator[tuple[str, str]]:
    def numbers(kind: str, key: str) -> list[float]:
        values = [line.get(key) for line in run.stats_of(kind)]
        return [value for value in values if isinstance(value, (int, float))]

    steps, waits = numbers("train_epoch", "dt"), numbers("train_epoch", "dt_data")
    if steps and np.median(steps) > 0:
        batch = run.setting("TRAIN.BATCH_SIZE", 0) * run.setting("NUM_SHARDS", 1)
        step = float(np.median(steps))
        yield "training", f"{batch / step:.1f} clips per second: a batch of {batch} in {step:.3f} s"
        if waits:
            yield "waiting for data", f"{100 * float(np.median(waits)) / step:.0f} % of a step"
    tests = numbers("test_iter", "time_diff")
    if tests:
        yield "testing", f"{tests[-1]:.3f} s per video, in each process"
    for key, meaning in (("gpu_mem", "GPU memory, peak"), ("ram", "main memory, peak")):
        sizes = [str(line[key]).rstrip("G") for line in run.stats if key in line]
        amounts = [float(size) for size in sizes if size.replace(".", "", 1).isdigit()]
        if amounts and max(amounts) > 0:
            yield meaning, f"{max(amounts):.2f} GiB"


def _environment(run: RunRecord) -> str:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {entry}" for key, entry in value.items())
        if isinstance(value, list):
            return " ".join(map(str, value))
        return value if isinstance(value, str) else json.dumps(value)

    known = {key: value for key, value in run.environment.items() if value not in (None, [], {})}
    rows = [(key.replace("_", " "), text(value)) for key, value in known.items()]
    return table(("", ""), rows) if rows else ""
