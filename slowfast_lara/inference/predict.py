"""What a model says of videos, one after the other: printed, in files, drawn on copies."""

from __future__ import annotations

import argparse
import contextlib
import os

import numpy as np
from fvcore.common.config import CfgNode
from torch import nn

from slowfast_lara.data import load_views
from slowfast_lara.data.classes import class_names
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.sources import open_frames
from slowfast_lara.drawing import VideoWriter, enlarge, score_panel
from slowfast_lara.engine.evaluate import score_views
from slowfast_lara.errors import (
    BAD_INPUT,
    DONE,
    INTERRUPTED,
    DecodeError,
    InputError,
    complain,
    printable,
)
from slowfast_lara.files import written_aside
from slowfast_lara.inference.model import load_model, read_config
from slowfast_lara.inference.prediction_files import PredictionFiles, Ranking, rank
from slowfast_lara.inference.stream import Window, WindowScorer
from slowfast_lara.inference.timeline import Timeline
from slowfast_lara.inference.videos import find_videos, output_paths

MOST_VIEWS = 30


def predict_videos(args: argparse.Namespace, files: list[str], overrides: list[str]) -> int:
    """Predict as the flags of `slowfast-lara predict` say; the exit code."""
    if not files:
        raise InputError("no video given; see --help")
    if args.plot and not args.stream:
        raise InputError("--plot shows scores over time: it needs --stream")
    for flag, seconds in (("--window", args.window), ("--stride", args.stride)):
        if seconds is not None and not 0 < seconds < float("inf"):
            raise InputError(f"{flag} is {seconds}; a positive number of seconds is expected")
    cfg = read_config(args.cfg, [*_view_overrides(args.views), *overrides])
    videos = find_videos(files, frames_in_folders=dataset_class(cfg, "TEST").frames_in_folders)
    copies = output_paths(args.video_out, videos, ".mp4")
    plots = output_paths(args.plot, videos, ".png")
    names = class_names(args.classes, cfg.MODEL.NUM_CLASSES, cfg.DATA.PATH_TO_DATA_DIR)
    predictor = Predictor(load_model(cfg, args.checkpoint), cfg, names, args)
    columns = ("path", "start", "end") if args.stream else ("path", "num_views")
    failed = False
    with PredictionFiles(
        args.json,
        args.csv,
        checkpoint=args.checkpoint,
        columns=columns,
        rows="windows" if args.stream else "videos",
    ) as out:
        for video, copy, plot in zip(videos, copies, plots):
            try:
                predictor.predict(video, copy, plot, out)
            except DecodeError as error:
                complain(str(error))
                out.fail(video, str(error).removeprefix(f"{video}: "))
                failed = True
            except KeyboardInterrupt:  # the files are finished with what is there
                complain(f"interrupted at {video}; the files have what was done before")
                return INTERRUPTED
    return BAD_INPUT if failed else DONE


def _view_overrides(views: int | None) -> list[object]:
    if views is None:
        return []
    if not 1 <= views <= MOST_VIEWS:
        raise InputError(f"--views is {views}; 1 to {MOST_VIEWS} are allowed")
    crops = 1 if views % 3 else 3
    return ["TEST.NUM_ENSEMBLE_VIEWS", views // crops, "TEST.NUM_SPATIAL_CROPS", crops]


class Predictor:
    """A model, and what is wanted of each video."""

    def __init__(
        self, model: nn.Module, cfg: CfgNode, names: list[str], args: argparse.Namespace
    ) -> None:
        self._model, self._cfg, self._names = model, cfg, names
        self._stream = args.stream
        self._window = args.window or dataset_class(cfg, "TEST").window_seconds(cfg)
        self._stride = args.stride or self._window / 2

    def predict(self, video: str, copy: str | None, plot: str | None, out: PredictionFiles) -> None:
        if self._stream:
            print(printable(video), flush=True)
        else:
            views = load_views(video, self._cfg)
            ranking = self._ranking(video, score_views(self._model, views, self._cfg).numpy())
            print(printable(video))
            for place, (_, name, score) in enumerate(zip(*ranking), start=1):
                print(f"  {place}. {score:6.1%}  {printable(name)}", flush=True)
            out.add((video, len(views)), ranking)
        if self._stream or copy:
            self._follow(video, copy, plot, out)

    def _follow(self, video: str, copy: str | None, plot: str | None, out: PredictionFiles) -> None:
        """Through all frames once: rows of windows, the annotated copy, the plot."""
        timeline = Timeline(len(self._names)) if plot else None
        with contextlib.ExitStack() as stack:
            # First the place for the copy: its errors are not the video's.
            aside = stack.enter_context(written_aside(copy)) if copy else None
            fps, frames = stack.enter_context(open_frames(video, self._cfg.DATA.TARGET_FPS))
            scorer = WindowScorer(self._model, self._cfg, fps, self._window, self._stride)
            annotated = AnnotatedVideo(aside, fps) if aside else None
            if annotated:
                stack.callback(annotated.close)
            for image, window in scorer.run(frames):
                if window is not None:
                    ranking = self._ranking(video, window.scores)
                    if self._stream and window.full:
                        self._report(video, window, ranking, out)
                        if timeline:
                            timeline.add(window)
                    if annotated:
                        annotated.show(ranking)
                if annotated:
                    annotated.add(image)
        if timeline and plot:
            timeline.plot(plot, self._names, os.path.basename(video))

    def _report(self, video: str, window: Window, ranking: Ranking, out: PredictionFiles) -> None:
        start, end = round(window.start, 3), round(window.end, 3)
        best = ", ".join(
            f"{printable(name)} {score:.1%}" for _, name, score in list(zip(*ranking))[:3]
        )
        print(f"  {start:8.2f} to {end:8.2f} s  {best}", flush=True)
        out.add((video, start, end), ranking)

    def _ranking(self, video: str, scores: np.ndarray) -> Ranking:
        if not np.isfinite(scores).all():
            raise DecodeError(f"{video}: the model's scores are not finite")
        return rank(scores, self._names)


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
