"""Demo page: classes of an uploaded video, and the attention of a clicked patch.

Import this module only after the environment variables of Gradio are set: see demo.py.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import gradio as gr
import numpy as np
from fvcore.common.config import CfgNode

from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.video import check_length
from slowfast_lara.errors import UserError, counted, first_line, printable
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.models.attention_config import chosen_estimator, display_name
from slowfast_lara.visualization.attention_view import AttentionView, default_attentions
from slowfast_lara.visualization.demo_uploads import Uploads
from slowfast_lara.visualization.heat_maps import HeatMapFigure
from slowfast_lara.visualization.token_grid import QueryPoint

TITLE = "Where does the attention go?"
START = "Drop a video to begin."
# Frames are enlarged to sides of at least this many pixels. The factor is an integer, so that a
# click hits exactly one pixel of the frame.
MIN_SIDE = 384
# Gradio removes image files after this time, and the state of a page after six times as long.
LIFETIME_SECONDS = 600
# Maximum number of open pages; beyond it, the oldest page loses its video.
MAX_SESSIONS = 20


class DemoPage:
    """Event handlers of the page, and the model that they run."""

    def __init__(
        self, model: TrainedModel, uploads: Uploads, views: int | None, max_seconds: float
    ) -> None:
        self.model, self.uploads = model, uploads
        self._views, self._max_seconds = views, max_seconds
        self.examples = _example_videos(model.cfg)

    def model_name(self) -> str:
        """Display name of the model: end of the checkpoint's path, attention, number of classes."""
        vit, parts = self.model.cfg.VIT, Path(os.path.abspath(self.model.path)).parts[-4:]
        name = "/".join(part for part in parts if part not in ("checkpoints", os.sep))
        attention = display_name(chosen_estimator(self.model.cfg))
        classes = len(self.model.class_names)
        return printable(f"{name}: {vit.ATTN_LAYER} attention ({attention}), {classes} classes")

    def upload(self, file: dict[str, Any] | None) -> tuple[Any, ...]:
        """Handle an uploaded file; returns message, classes, view, slider, frame, figure.

        The file is removed after it is decoded: the returned view contains its pixels.
        """
        if file is None:
            return _nothing(START)
        path = ""
        try:
            with self.uploads.take(file["path"]) as path:
                check_length(path, self._max_seconds)
                return self._show(path)
        except Exception as error:  # a bad upload must not stop the server
            return _nothing(_error_message(error, path))

    def example(self, number: int) -> tuple[Any, ...]:
        """Handle a click on an example video; returns the same as `upload`."""
        path = self.examples[_clamp(number, len(self.examples))]
        try:
            return self._show(path)
        except Exception as error:  # the video may have been removed
            return _nothing(_error_message(error, path))

    def _show(self, path: str) -> tuple[Any, ...]:
        prediction = self.model(path, views=self._views)
        view = AttentionView(self.model, path)
        _, names, scores = prediction.top()
        middle = len(view.pixels) // 2
        slider = gr.Slider(maximum=len(view.pixels) - 1, value=middle, visible=True)
        views = counted(prediction.num_views, "view")
        message = f"Average of {views}. Now click a patch of the frame."
        classes = {printable(name): score for name, score in zip(names, scores)}
        return message, classes, view, slider, self.frame(view, middle), None

    def frame(self, view: AttentionView | None, number: int) -> np.ndarray | None:
        """A frame of the model's input clip, enlarged."""
        if view is None:
            return None
        image = view.pixels[_clamp(number, len(view.pixels))]
        factor = _zoom(image)
        return cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)

    def click(
        self, view: AttentionView | None, number: int, event: gr.SelectData
    ) -> np.ndarray | None:
        """The figure with the attention of the clicked patch: one row per estimator."""
        if view is None:
            return None
        image = view.pixels[0]
        x, y = (
            _clamp(pixel // _zoom(image), size)
            for pixel, size in zip(event.index, (image.shape[1], image.shape[0]))
        )
        point = QueryPoint(x, y, _clamp(number, len(view.pixels)))
        maps = view.attention_maps(point, default_attentions(view.cfg))
        return HeatMapFigure(view.pixels, view.grid, maps, point, view.total).strip()


def build(page: DemoPage) -> gr.Blocks:
    """Build the page from Gradio blocks; the model handles one request at a time."""
    with gr.Blocks(
        title=TITLE,
        analytics_enabled=False,
        delete_cache=(LIFETIME_SECONDS // 10, LIFETIME_SECONDS),
    ) as blocks:
        output: dict[str, Any] = {"interactive": False, "format": "png"}
        view = gr.State(time_to_live=6 * LIFETIME_SECONDS)
        gr.Markdown(f"## {TITLE}")
        gr.Textbox(page.model_name(), label="Model", interactive=False, elem_id="model")
        with gr.Row():
            with gr.Column():
                file = gr.File(label="Video", elem_id="video")
                examples = gr.Dataset(
                    label="Or an example from the test list",
                    components=["textbox"],
                    samples=[[printable(os.path.basename(path))] for path in page.examples],
                    type="index",
                    visible=bool(page.examples),
                    elem_id="examples",
                )
                message = gr.Textbox(START, show_label=False, interactive=False, elem_id="message")
                classes = gr.Label(label="Most likely classes", elem_id="classes")
            with gr.Column():
                frame = gr.Image(label="Click a patch", elem_id="frame", buttons=[], **output)
                number = gr.Slider(
                    0, 1, step=1, label="Frame of the clip", visible=False, elem_id="number"
                )
        figure = gr.Image(
            label="Attention of the clicked patch",
            elem_id="figure",
            buttons=["download", "fullscreen"],  # "share" would upload the picture
            **output,
        )
        queued: dict[str, Any] = {
            "api_visibility": "private",
            "concurrency_id": "model",
            "concurrency_limit": 1,
        }
        outputs = [message, classes, view, number, frame, figure]
        # gr.File's preprocessing creates an empty file for each upload.
        file.change(page.upload, file, outputs, preprocess=False, **queued)
        examples.click(page.example, examples, outputs, **queued)
        frame.select(page.click, [view, number], figure, **queued)
        number.input(page.frame, [view, number], frame, api_visibility="private")
    return blocks.queue(max_size=MAX_SESSIONS)


def _example_videos(cfg: CfgNode, count: int = 4) -> list[str]:
    """Up to `count` videos of the test list, of different classes; none if the list is missing."""
    try:
        dataset = dataset_class(cfg, "TEST")(cfg, "test")
    except (UserError, OSError):
        return []
    first_of_class = {label: index for index, label in reversed([*enumerate(dataset.labels)])}
    paths = (dataset.paths[index] for index in sorted(first_of_class.values()))
    return list(islice((path for path in paths if os.path.exists(path)), count))


def _nothing(message: str) -> tuple[Any, ...]:
    """Outputs of `DemoPage.upload` if there is no usable video."""
    return message, None, None, gr.Slider(visible=False), None, None


def _error_message(error: Exception, path: str) -> str:
    """Message for a file that cannot be used; it contains the file name without temporary path."""
    text = str(error) if isinstance(error, UserError) else first_line(error)
    text = text.replace(path, os.path.basename(path)) if path else text
    return printable(f"Cannot use this file: {text}")


def _zoom(image: np.ndarray) -> int:
    return -(-MIN_SIDE // min(image.shape[:2]))


def _clamp(number: float, size: int) -> int:
    return min(max(int(number), 0), size - 1)
