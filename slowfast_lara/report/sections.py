"""What the page of a run shows, section by section."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from slowfast_lara.data.sources import read_frames
from slowfast_lara.data.transforms import whole_frame
from slowfast_lara.errors import DecodeError
from slowfast_lara.models.attention_config import display_name
from slowfast_lara.report.page import chart, document, picture, safe, table, tile
from slowfast_lara.runs.folder import Run, Video

# More classes than this are a picture, not a table.
MOST_CELLS = 25
MISTAKES = 24
THUMBNAIL_FRAMES, THUMBNAIL_SIDE = 4, 96


def report(run: Run) -> str:
    """The page."""
    title = os.path.basename(os.path.abspath(run.folder))
    sections = {
        "Learning curves": _curves(run),
        "Confusion matrix": _confusion(run),
        "Classes": _classes(run),
        "Worst mistakes": _mistakes(run),
        "Videos that could not be scored": _failed(run),
        "Speed and memory": _speed(run),
        "Surroundings": _surroundings(run),
        "Config": f"<details><summary>all keys</summary><pre>{safe(run.config_text)}</pre>"
        "</details>"
        if run.config_text
        else "",
    }
    parts = [f"<h1>{safe(title)}</h1>", _summary(run)]
    parts += [
        f"<section><h2>{head}</h2>\n{content}</section>"
        for head, content in sections.items()
        if content
    ]
    return document(f"{title}: report", parts)


def _summary(run: Run) -> str:
    attention = run.setting("VIT.APPROX_ATTN_TYPE")
    model = " · ".join(
        str(part)
        for part in (
            run.setting("MODEL.MODEL_NAME"),
            run.setting("VIT.ATTN_LAYER"),
            f"{display_name(str(attention))} attention" if attention else None,
            run.setting("TEST.DATASET"),
            run.checkpoint,
        )
        if part
    )
    tiles = []
    if run.videos:
        top1 = 100 * np.mean([video.correct for video in run.videos])
        top5 = 100 * np.mean([video.label in video.top5 for video in run.videos])
        tiles += [
            tile(f"{top1:.2f} %", "top-1 accuracy"),
            tile(f"{top5:.2f} %", "top-5 accuracy"),
            tile(str(len(run.videos)), "videos tested"),
            tile(str(len(run.failed)), "videos failed"),
        ]
    validated = run.curve("val_epoch", "top1_err")
    if validated:
        epoch, error = validated[-1]
        tiles.append(tile(f"{100 - error:.2f} %", f"validation top-1, epoch {epoch:g}"))
    return f'<p class="quiet">{safe(model)}</p><div class="tiles">{"".join(tiles)}</div>'


def _curves(run: Run) -> str:
    kind = "train_iter" if run.curve("train_iter", "loss") else "train_epoch"
    if not run.curve(kind, "loss"):
        return ""
    errors = [("top-1 error, %", "top1_err")]
    if len(run.names) > 5:  # with fewer, no label is beyond the first five
        errors.append(("top-5 error, %", "top5_err"))
    return (
        '<div class="charts">'
        + "".join(
            (
                chart("loss", {"training": run.curve(kind, "loss")}),
                *(
                    chart(
                        title,
                        {
                            "training": run.curve(kind, key),
                            "validation": run.curve("val_epoch", key),
                        },
                    )
                    for title, key in errors
                ),
                chart("learning rate", {"training": run.curve(kind, "lr")}),
            )
        )
        + "</div>"
    )


def _confusion(run: Run) -> str:
    if not run.videos:
        return ""
    matrix = run.confusion()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    note = '<p class="quiet">rows: true class; columns: first guess</p>'
    if len(matrix) > MOST_CELLS:
        grey = (255 * (1 - np.sqrt(shares))).astype(np.uint8)
        shown = picture(np.repeat(grey[..., None], 3, axis=2), ".png", "confusion matrix", "pixels")
    else:
        heads = "".join(f"<th>{safe(name)}</th>" for name in run.names)
        rows = "".join(
            f"<tr><th>{safe(name)}</th>"
            + "".join(
                f'<td style="background: rgba(var(--heat), {share * 0.8:.2f})">{count or ""}</td>'
                for count, share in zip(counts, row)
            )
            + "</tr>"
            for name, counts, row in zip(run.names, matrix.tolist(), shares.tolist())
        )
        shown = (
            f'<div class="wide"><table class="matrix"><thead><tr><th></th>{heads}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )
    return note + shown + _confused_pairs(run, matrix)


def _confused_pairs(run: Run, matrix: np.ndarray) -> str:
    wrong = matrix - np.diag(matrix.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[:10]
    pairs = [divmod(int(place), len(matrix)) for place in order]
    rows = [
        (run.names[true], run.names[guess], int(wrong[true, guess]), int(matrix[true].sum()))
        for true, guess in pairs
        if wrong[true, guess]
    ]
    return (
        "<p>Most frequent mistakes</p>" + table(("true class", "taken for", "videos", "of"), rows)
        if rows
        else ""
    )


def _classes(run: Run) -> str:
    if not run.videos:
        return ""
    matrix = run.confusion()
    in_top5 = np.zeros(len(matrix), int)
    for video in run.videos:
        in_top5[video.label] += video.label in video.top5
    wrong = matrix - np.diag(matrix.diagonal())
    rows = []
    for label, name in enumerate(run.names):
        count = int(matrix[label].sum())
        if count:
            taken_for = run.names[wrong[label].argmax()] if wrong[label].any() else ""
            rows.append(
                (
                    name,
                    count,
                    100.0 * float(matrix[label, label]) / count,
                    100.0 * float(in_top5[label]) / count,
                    taken_for,
                )
            )
    heads = ("class", "videos", "top-1 %", "top-5 %", "most often taken for")
    return table(heads, rows, name="classes")


def _mistakes(run: Run) -> str:
    wrong = sorted(
        (video for video in run.videos if not video.correct), key=lambda video: -video.scores[0]
    )
    if not wrong:
        return "<p>None.</p>" if run.videos else ""
    cards = "".join(_card(run, video) for video in wrong[:MISTAKES])
    return (
        f'<p class="quiet">{len(wrong)} of {len(run.videos)} videos; those whose wrong guess '
        f'has the highest score come first</p><div class="mistakes">{cards}</div>'
    )


def _card(run: Run, video: Video) -> str:
    try:
        shown = picture(thumbnail(video.path), ".jpg", f"frames of {video.path}")
    except DecodeError:
        shown = '<div class="none">the video is not here any more</div>'
    # A true class beyond the first five has no score in the results.
    own = [score for label, score in zip(video.top5, video.scores) if label == video.label]
    true = f"{own[0]:.1%}" if own else f"below {video.scores[-1]:.1%}"
    return (
        f'<div class="mistake">{shown}<p><b>{safe(run.names[video.label])}</b> ({true}), taken '
        f"for <b>{safe(run.names[video.top5[0]])}</b> ({video.scores[0]:.1%})</p>"
        f'<p class="quiet">{safe(video.path)}</p></div>'
    )


def thumbnail(path: str) -> np.ndarray:
    """A few frames of a video beside each other, RGB."""

    def spread(frames: int, fps: float) -> np.ndarray:
        return np.linspace(0, frames - 1, THUMBNAIL_FRAMES).round().astype(int)

    place = partial(whole_frame, short_side=THUMBNAIL_SIDE)
    frames = read_frames(path, spread, place, whole=False)
    apart = np.pad(
        frames.pixels[frames.order], ((0, 0), (0, 0), (0, 3), (0, 0)), constant_values=255
    )
    return np.concatenate(list(apart), axis=1)[:, :-3]


def _failed(run: Run) -> str:
    return table(("video", "reason"), run.failed, name="failed") if run.failed else ""


def _speed(run: Run) -> str:
    return table(("", ""), _speed_rows(run)) if run.stats else ""


def _speed_rows(run: Run) -> Iterator[tuple[str, str]]:
    epochs = run.of_type("train_epoch")
    seconds = [line["dt"] for line in epochs if isinstance(line.get("dt"), (int, float))]
    waited = [line["dt_data"] for line in epochs if isinstance(line.get("dt_data"), (int, float))]
    if seconds and np.median(seconds) > 0:
        batch = run.setting("TRAIN.BATCH_SIZE", 0) * run.setting("NUM_SHARDS", 1)
        step = float(np.median(seconds))
        yield "training", f"{batch / step:.1f} clips a second: batches of {batch} in {step:.3f} s"
        if waited:
            yield "of which waiting for data", f"{100 * float(np.median(waited)) / step:.0f} %"
    tested = [
        line["time_diff"]
        for line in run.of_type("test_iter")
        if isinstance(line.get("time_diff"), (int, float))
    ]
    if tested:
        yield "testing", f"{tested[-1]:.3f} s a video, in each process"
    for key, meaning in (("gpu_mem", "GPU memory, peak"), ("ram", "main memory, peak")):
        sizes = [str(line[key]) for line in run.stats if key in line]
        amounts = [float(size.rstrip("G")) for size in sizes if _is_number(size.rstrip("G"))]
        if amounts and max(amounts) > 0:
            yield meaning, f"{max(amounts):.2f} GiB"


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _surroundings(run: Run) -> str:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {entry}" for key, entry in value.items())
        if isinstance(value, list):
            return " ".join(map(str, value)) or "none"
        return value if isinstance(value, str) else json.dumps(value)

    rows = [(key.replace("_", " "), text(value)) for key, value in run.environment.items()]
    return table(("", ""), rows) if rows else ""
