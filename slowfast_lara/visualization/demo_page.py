"""The demo's page: drop a video, see its classes, click a patch, see where its attention goes.

It needs Gradio, which reads its settings when it is imported: see demo.py.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import cv2
import gradio as gr
import numpy as np

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.data.video import check_length
from slowfast_lara.errors import UserError, first_line, printable
from slowfast_lara.files import remove_empty
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.visualization.heat_maps import Drawing
from slowfast_lara.visualization.scene import Scene
from slowfast_lara.visualization.trajectories import Point

TITLE = "Where attention goes"
# Frames are shown this large at least, in whole steps: a click's pixel is then a frame's.
LEAST_SIDE = 384
# Pictures that were shown are removed after so many seconds; so is what a closed page had open.
KEPT_SECONDS = 600
# Pages open at a time; the oldest beyond these loses its video.
MOST_PAGES = 20


class Page:
    """A model, and what it is asked by the page."""

    def __init__(self, model: TrainedModel, views: int | None, most_seconds: float) -> None:
        self._model, self._views, self._most_seconds = model, views, most_seconds

    def take(self, path: str | None) -> tuple[Any, ...]:
        """A dropped file: what is said, the classes, the scene, the slider, its frame, no picture.

        The file is removed: all that is needed of it is in the scene. It is taken away first:
        the same video dropped once more meanwhile is put in the same place.
        """
        if path is None:
            return "", None, None, gr.Slider(visible=False), None, None
        with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.dirname(path))) as own:
            taken = os.path.join(own, os.path.basename(path))
            try:
                os.rename(path, taken)
                remove_empty([os.path.dirname(path)])
                check_length(taken, self._most_seconds)
                prediction, scene = self._model(taken, views=self._views), Scene(self._model, taken)
            except Exception as error:  # whatever was dropped, the page stays
                return _reason(error, taken), None, None, gr.Slider(visible=False), None, None
        _, names, scores = prediction.top()
        middle = len(scene.pixels) // 2
        slider = gr.Slider(maximum=len(scene.pixels) - 1, value=middle, visible=True)
        said = f"The mean of {prediction.num_views} views. Now click a patch of the frame."
        classes = {printable(name): score for name, score in zip(names, scores)}
        return said, classes, scene, slider, self.frame(scene, middle), None

    def frame(self, scene: Scene | None, number: int) -> np.ndarray | None:
        """A frame of the clip that the model sees."""
        if scene is None:
            return None
        image = scene.pixels[_inside(number, len(scene.pixels))]
        steps = _steps(image)
        return cv2.resize(image, None, fx=steps, fy=steps, interpolation=cv2.INTER_NEAREST)

    def look(self, scene: Scene | None, number: int, click: gr.SelectData) -> np.ndarray | None:
        """Where the attention of the clicked patch goes, by every attention."""
        if scene is None:
            return None
        image = scene.pixels[0]
        x, y = (
            _inside(pixel // _steps(image), size)
            for pixel, size in zip(click.index, (image.shape[1], image.shape[0]))
        )
        point = Point(x, y, _inside(number, len(scene.pixels)))
        pictures = scene.look(point, list(ESTIMATORS))
        return Drawing(scene.pixels, scene.grid, pictures, point, scene.shares_of).strip()


def build(page: Page) -> gr.Blocks:
    """The page as Gradio serves it. The model answers one question at a time."""
    with gr.Blocks(
        title=TITLE, analytics_enabled=False, delete_cache=(KEPT_SECONDS // 10, KEPT_SECONDS)
    ) as blocks:
        shown: dict[str, Any] = {"interactive": False, "format": "png"}
        scene = gr.State(time_to_live=6 * KEPT_SECONDS)
        gr.Markdown(f"## {TITLE}")
        with gr.Row():
            with gr.Column():
                file = gr.File(label="A video", elem_id="video")
                said = gr.Textbox(show_label=False, interactive=False, elem_id="said")
                classes = gr.Label(label="Its likeliest classes", elem_id="classes")
            with gr.Column():
                frame = gr.Image(label="Click a patch", elem_id="frame", buttons=[], **shown)
                number = gr.Slider(
                    0, 1, step=1, label="Frame of the clip", visible=False, elem_id="number"
                )
        picture = gr.Image(
            label="Where its attention goes",
            elem_id="picture",
            buttons=["download", "fullscreen"],  # not the third, which sends it to a host
            **shown,
        )
        one_at_a_time: dict[str, Any] = {
            "api_visibility": "private",
            "concurrency_id": "model",
            "concurrency_limit": 1,
        }
        file.change(
            page.take, file, [said, classes, scene, number, frame, picture], **one_at_a_time
        )
        frame.select(page.look, [scene, number], picture, **one_at_a_time)
        number.input(page.frame, [scene, number], frame, api_visibility="private")
    return blocks.queue(max_size=MOST_PAGES)


def _reason(error: Exception, path: str) -> str:
    """Why a file cannot be shown, without the place where it was put for a moment."""
    text = str(error) if isinstance(error, UserError) else first_line(error)
    return printable(f"Cannot be used: {text}".replace(path, os.path.basename(path)))


def _steps(image: np.ndarray) -> int:
    return -(-LEAST_SIDE // min(image.shape[:2]))


def _inside(number: float, size: int) -> int:
    return min(max(int(number), 0), size - 1)
