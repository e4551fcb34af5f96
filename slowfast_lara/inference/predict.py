"""The `predict` command: classes of videos on the terminal, in files and on annotated copies."""

from __future__ import annotations

import argparse
import contextlib
import os

import numpy as np

from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.sources import open_frames
from slowfast_lara.drawing import VideoWriter, enlarge, score_panel
from slowfast_lara.errors import (
    BAD_INPUT,
    DONE,
    INTERRUPTED,
    DecodeError,
    InputError,
    print_error,
    printable,
)
from slowfast_lara.files import atomic_write
from slowfast_lara.inference.load import load
from slowfast_lara.inference.model import MAX_VIEWS, TrainedModel, check_positive
from slowfast_lara.inference.prediction import Ranking, format_ranking
from slowfast_lara.inference.prediction_files import PredictionFiles
from slowfast_lara.inference.timeline import Timeline
from slowfast_lara.inference.videos import find_videos, output_paths


def predict_videos(
    args: argparse.Namespace,
    model_files: tuple[str, str | None],
    files: list[str],
    overrides: list[str],
) -> int:
    """Run `slowfast-lara predict` with its parsed flags; returns the exit code."""
    if not files:
        raise InputError("no video given; see --help")
    if args.plot and not args.stream:
        raise InputError("--plot needs --stream")
    for flag, seconds in (("--window", args.window), ("--stride", args.stride)):
        check_positive(flag, seconds)
    if args.views is not None and not 1 <= args.views <= MAX_VIEWS:
        raise InputError(f"--views is {args.views}; must be from 1 to {MAX_VIEWS}")
    model = load(*model_files, classes=args.classes, overrides=overrides)
    in_folders = dataset_class(model.cfg, "TEST").frames_in_folders
    videos = find_videos(files, frames_in_folders=in_folders)
    copies = output_paths(args.video_out, videos, ".mp4")
    plots = output_paths(args.plot, videos, ".png")
    predictor = Predictor(model, args)
    columns = ["path", "start", "end"] if args.stream else ["path", "num_views"]
    rows, code = "windows" if args.stream else "videos", DONE
    with PredictionFiles(
        args.json, args.csv, checkpoint=model.path, rows=rows, columns=columns
    ) as out:
        for video, copy, plot in zip(videos, copies, plots):
            try:
                predictor.predict(video, copy, plot, out)
            except DecodeError as error:
                reason = str(error).removeprefix(f"{video}: ")
                print_error(f"{video}: {reason}")
                out.fail(video, reason)
                code = BAD_INPUT
            except KeyboardInterrupt:
                print_error(f"interrupted at {video}; the files contain the predictions before it")
                return INTERRUPTED
    return code


class Predictor:
    """A model and the flags that apply to each video."""

    def __init__(self, model: TrainedModel, args: argparse.Namespace) -> None:
        self._model, self._stream, self._views = model, args.stream, args.views
        self._window, self._stride = args.window, args.stride

    def predict(self, video: str, copy: str | None, plot: str | None, out: PredictionFiles) -> None:
        if self._stream:
            print(printable(video), flush=True)
        else:
            prediction = self._model(video, views=self._views)
            print(printable(video))
            for number, (_, name, score) in enumerate(zip(*prediction.top()), start=1):
                print(f"  {number}. {score:6.1%}  {printable(name)}", flush=True)
            out.add((video, prediction.num_views), prediction.top())
        if self._stream or copy:
            self._score_windows(video, copy, plot, out)

    def _score_windows(
        self, video: str, copy: str | None, plot: str | None, out: PredictionFiles
    ) -> None:
        """Score windows in one pass over the frames: rows, annotated copy and plot."""
        timeline = Timeline()
        with contextlib.ExitStack() as stack:
            # Open the output first: an error there must not be reported as a bad video.
            temporary = stack.enter_context(atomic_write(copy)) if copy else None
            target_fps = self._model.cfg.DATA.TARGET_FPS
            fps, frames = stack.enter_context(open_frames(video, target_fps))
            annotated = AnnotatedVideo(temporary, fps) if temporary else None
            if annotated:
                stack.callback(annotated.close)
            scorer = self._model.scorer(fps, self._window, self._stride)
            for image, window in scorer.run(frames):
                if window is not None and window.full and self._stream:
                    start, end = round(window.start, 3), round(window.end, 3)
                    line = format_ranking(window.top(3))
                    print(f"  {start:8.2f} to {end:8.2f} s  {line}", flush=True)
                    out.add((video, start, end), window.top())
                    if plot:
                        timeline.add(window)
                if annotated:
                    annotated.add(image, window.top() if window else None)
        if plot:
            timeline.plot(plot, self._model.class_names, os.path.basename(video))


class AnnotatedVideo:
    """A copy of a video with a panel of the best classes below each frame."""

    ROWS = 3
    MIN_SIDE = 360  # smaller videos are enlarged, so that the panel is readable

    def __init__(self, path: str, fps: float) -> None:
        self._writer = VideoWriter(path, fps)
        self._ranking = Ranking([], [], [])
        self._panel: np.ndarray | None = None
        self.close = self._writer.close

    def add(self, image: np.ndarray, ranking: Ranking | None) -> None:
        """Add a frame; a ranking replaces the one in the panel."""
        image = enlarge(image, self.MIN_SIDE)
        width = image.shape[1]
        if ranking or self._panel is None or self._panel.shape[1] != width:
            self._ranking = ranking or self._ranking
            _, names, scores = self._ranking
            self._panel = score_panel(names, scores, self.ROWS, width, max(13, width // 28))
        self._writer.add(np.concatenate((image, self._panel)))
