"""The `predict` command: prints the classes of videos, writes files and annotated copies."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack, closing

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
from slowfast_lara.inference.prediction_files import ArrayRow, PredictionFiles, prediction_arrays
from slowfast_lara.inference.timeline import Timeline
from slowfast_lara.inference.videos import find_videos, output_paths


def predict_videos(
    args: argparse.Namespace,
    model_files: tuple[str, str | None],
    files: list[str],
    overrides: list[str],
) -> int:
    """Run `slowfast-lara predict` with its parsed flags; return the exit code."""
    if not files:
        raise InputError(f"no video given for the model {model_files[0]}; see --help")
    if args.plot and not args.stream:
        raise InputError("--plot needs --stream")
    if args.npz and args.stream:
        raise InputError("--npz does not work with --stream; use --json or --csv")
    for flag, seconds in (("--window", args.window), ("--stride", args.stride)):
        check_positive(flag, seconds)
    if args.views is not None and not 1 <= args.views <= MAX_VIEWS:
        raise InputError(f"--views is {args.views}; must be from 1 to {MAX_VIEWS}")
    model = load(*model_files, classes=args.classes, overrides=overrides)
    in_folders = dataset_class(model.cfg, "TEST").frames_in_folders
    videos = find_videos(files, frames_in_folders=in_folders)
    copies = output_paths(args.video_out, videos, ".mp4")
    plots = output_paths(args.plot, videos, ".png")
    code = DONE
    with ExitStack() as stack:
        out = stack.enter_context(
            PredictionFiles(args.json, args.csv, model.path, windows=args.stream)
        )
        arrays = None
        if args.npz:
            width = model.cfg.VIT.EMBED_DIM
            arrays = stack.enter_context(prediction_arrays(args.npz, model.class_names, width))
        for video, copy, plot in zip(videos, copies, plots):
            try:
                if args.stream:
                    print(printable(video), flush=True)
                else:
                    _score_views(model, video, args.views, out, arrays)
                if args.stream or copy:
                    _score_windows(model, video, args, copy, plot, out)
            except DecodeError as error:
                reason = str(error).removeprefix(f"{video}: ")
                print_error(f"{video}: {reason}")
                out.fail(video, reason)
                code = BAD_INPUT
            except KeyboardInterrupt:
                print_error(f"interrupted at {video}; output files contain the results so far")
                return INTERRUPTED
    return code


def _score_views(
    model: TrainedModel,
    video: str,
    views: int | None,
    out: PredictionFiles,
    arrays: list[ArrayRow] | None,
) -> None:
    if arrays is None:
        prediction = model(video, views=views)
    else:
        prediction, features = model.predict_with_features(video, views=views)
        arrays.append((video, prediction.scores, features, prediction.num_views))
    print(printable(video))
    parts = prediction.top_parts()
    rankings = {"action": prediction.top(), **parts} if parts else {"": prediction.top()}
    for part, ranking in rankings.items():
        if part:
            print(f"  {part}")
        for number, (_, name, score) in enumerate(zip(*ranking), start=1):
            print(f"  {number}. {score:6.1%}  {printable(name)}", flush=True)
    out.add((video, prediction.num_views), prediction.top(), parts)


def _score_windows(
    model: TrainedModel,
    video: str,
    args: argparse.Namespace,
    copy: str | None,
    plot: str | None,
    out: PredictionFiles,
) -> None:
    """Score the windows of a video, and write a copy with the classes to `copy` if it is not None.

    With --stream, also print the full windows, and write them to `out` and `plot`.
    """
    timeline, ranking = Timeline(), Ranking([], [], [])
    with ExitStack() as stack:
        # Open the output before the video: an output error must not count as a bad video.
        temporary = stack.enter_context(atomic_write(copy)) if copy else None
        fps, frames = stack.enter_context(open_frames(video, model.cfg.DATA.TARGET_FPS))
        writer = stack.enter_context(closing(VideoWriter(temporary, fps))) if temporary else None
        for image, window in model.scorer(fps, args.window, args.stride).run(frames):
            if window is not None and window.full and args.stream:
                start, end = round(window.start, 3), round(window.end, 3)
                line = format_ranking(window.top(3))
                print(f"  {start:8.2f} to {end:8.2f} s  {line}", flush=True)
                out.add((video, start, end), window.top())
                if plot:
                    timeline.add(window)
            if window is not None:
                ranking = window.top()
            if writer:
                writer.add(_annotate(image, ranking))
    if plot:
        timeline.plot(plot, model.class_names, os.path.basename(video))


def _annotate(image: np.ndarray, ranking: Ranking) -> np.ndarray:
    """Append a panel with the three best classes below a frame."""
    image = enlarge(image, 360)  # a narrower panel would be unreadable
    width = image.shape[1]
    panel = score_panel(ranking.names, ranking.scores, 3, width, max(13, width // 28))
    return np.concatenate((image, panel))
