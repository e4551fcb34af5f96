"""What a model says of videos, one after the other: printed, in files, drawn on copies."""

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
from slowfast_lara.inference.model import MOST_VIEWS, TrainedModel, check_positive
from slowfast_lara.inference.prediction import Ranking, shown
from slowfast_lara.inference.prediction_files import PredictionFiles
from slowfast_lara.inference.stream import Window
from slowfast_lara.inference.timeline import Timeline
from slowfast_lara.inference.videos import find_videos, output_paths


def predict_videos(
    args: argparse.Namespace,
    model_files: tuple[str, str | None],
    files: list[str],
    overrides: list[str],
) -> int:
    """Predict as the flags of `slowfast-lara predict` say; the exit code."""
    if not files:
        raise InputError("no video given; see --help")
    if args.plot and not args.stream:
        raise InputError("--plot shows scores over time: it needs --stream")
    for flag, seconds in (("--window", args.window), ("--stride", args.stride)):
        check_positive(flag, seconds)
    if args.views is not None and not 1 <= args.views <= MOST_VIEWS:
        raise InputError(f"--views is {args.views}; 1 to {MOST_VIEWS} are allowed")
    model = load(*model_files, classes=args.classes, overrides=overrides)
    in_folders = dataset_class(model.cfg, "TEST").frames_in_folders
    videos = find_videos(files, frames_in_folders=in_folders)
    copies = output_paths(args.video_out, videos, ".mp4")
    plots = output_paths(args.plot, videos, ".png")
    predictor = Predictor(model, args)
    columns = ("path", "start", "end") if args.stream else ("path", "num_views")
    failed = False
    with PredictionFiles(
        args.json,
        args.csv,
        checkpoint=model.path,
        columns=columns,
        rows="windows" if args.stream else "videos",
    ) as out:
        for video, copy, plot in zip(videos, copies, plots):
            try:
                predictor.predict(video, copy, plot, out)
            except DecodeError as error:
                print_error(str(error))
                out.fail(video, str(error).removeprefix(f"{video}: "))
                failed = True
            except KeyboardInterrupt:  # the files are finished with what is there
                print_error(f"interrupted at {video}; the files have what was done before")
                return INTERRUPTED
    return BAD_INPUT if failed else DONE


class Predictor:
    """A model, and what is wanted of each video."""

    def __init__(self, model: TrainedModel, args: argparse.Namespace) -> None:
        self._model, self._stream, self._views = model, args.stream, args.views
        self._window, self._stride = args.window, args.stride

    def predict(self, video: str, copy: str | None, plot: str | None, out: PredictionFiles) -> None:
        if self._stream:
            print(printable(video), flush=True)
        else:
            prediction = self._model(video, views=self._views)
            print(printable(video))
            for place, (_, name, score) in enumerate(zip(*prediction.top()), start=1):
                print(f"  {place}. {score:6.1%}  {printable(name)}", flush=True)
            out.add((video, prediction.num_views), prediction.top())
        if self._stream or copy:
            self._follow(video, copy, plot, out)

    def _follow(self, video: str, copy: str | None, plot: str | None, out: PredictionFiles) -> None:
        """Through all frames once: rows of windows, the annotated copy, the plot."""
        names = self._model.class_names
        timeline = Timeline(len(names)) if plot else None
        with contextlib.ExitStack() as stack:
            # First the place for the copy: its errors are not the video's.
            aside = stack.enter_context(atomic_write(copy)) if copy else None
            target_fps = self._model.cfg.DATA.TARGET_FPS
            fps, frames = stack.enter_context(open_frames(video, target_fps))
            scorer = self._model.scorer(fps, self._window, self._stride)
            annotated = AnnotatedVideo(aside, fps) if aside else None
            if annotated:
                stack.callback(annotated.close)
            for image, window in scorer.run(frames):
                if window is not None:
                    if not np.isfinite(window.scores).all():
                        raise DecodeError(f"{video}: the model's scores are not finite")
                    if self._stream and window.full:
                        self._report(video, window, out)
                        if timeline:
                            timeline.add(window)
                    if annotated:
                        annotated.show(window.top())
                if annotated:
                    annotated.add(image)
        if timeline and plot:
            timeline.plot(plot, names, os.path.basename(video))

    def _report(self, video: str, window: Window, out: PredictionFiles) -> None:
        start, end, ranking = round(window.start, 3), round(window.end, 3), window.top()
        print(f"  {start:8.2f} to {end:8.2f} s  {shown(window.top(3))}", flush=True)
        out.add((video, start, end), ranking)


class AnnotatedVideo:
    """A copy of a video with a panel of the classes below the picture."""

    ROWS = 3
    # Smaller videos are enlarged: their panel could not be read.
    LEAST_SIDE = 360

    def __init__(self, path: str, fps: float) -> None:
        self._writer = VideoWriter(path, fps)
        self._ranking = Ranking([], [], [])
        self._panel: np.ndarray | None = None

    def show(self, ranking: Ranking) -> None:
        self._ranking, self._panel = ranking, None

    def add(self, image: np.ndarray) -> None:
        image = enlarge(image, self.LEAST_SIDE)
        width = image.shape[1]
        if self._panel is None or self._panel.shape[1] != width:
            _, names, scores = self._ranking
            size = max(13, width // 28)
            self._panel = score_panel(names, scores, self.ROWS, width, size)
        self._writer.add(np.concatenate((image, self._panel)))

    def close(self) -> None:
        self._writer.close()
