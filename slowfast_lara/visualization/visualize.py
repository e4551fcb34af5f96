"""The `visualize` command: writes the attention of query points as PNG, MP4 and JSON files."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from slowfast_lara.errors import DONE, InputError, printable
from slowfast_lara.files import write_json
from slowfast_lara.inference.load import load
from slowfast_lara.models.attention_config import EXACT, RECOMMENDED, resolve_estimator
from slowfast_lara.models.numerics import choose_threads
from slowfast_lara.visualization.attention_view import AttentionView, default_attentions
from slowfast_lara.visualization.heat_maps import AttentionMap, HeatMapFigure
from slowfast_lara.visualization.token_grid import QueryPoint, TokenGrid, moving_points


def visualize(
    args: argparse.Namespace,
    model_files: tuple[str, str | None],
    files: list[str],
    overrides: list[str],
) -> int:
    """Run `slowfast-lara visualize` with its parsed flags; returns the exit code."""
    if len(files) != 1:
        raise InputError(f"expected one video, got {len(files)}")
    model = load(*model_files, overrides=overrides)
    choose_threads(model.cfg)
    heads = model.cfg.VIT.NUM_HEADS
    if args.head is not None and not 0 <= args.head < heads:
        raise InputError(f"--head is {args.head}; must be from 0 to {heads - 1}")
    view = AttentionView(model, files[0], args.layer)
    points = _query_points(args, view.pixels, view.grid)
    names = default_attentions(model.cfg)
    if args.estimators is not None:
        given = filter(None, args.estimators.split(","))
        chosen = [resolve_estimator(name, also=RECOMMENDED) for name in given]
        names = list(dict.fromkeys([EXACT, *chosen]))
    results = []
    for number, point in enumerate(points, start=1):
        maps = view.attention_maps(point, names, args.head)
        path = os.path.join(args.out, f"point_{number}")
        _write_figure(path, view, maps, point)
        results.append(_point_json(point, maps))
        _print_errors(path, point, maps)
    content: dict[str, Any] = {
        "video": files[0],
        "checkpoint": model.path,
        "layer": view.layer,
        "head": args.head,
        "points": results,
    }
    if not view.has_trajectories and model.cfg.VIT.CLS_TOKEN:
        cls, path = view.cls_map(), os.path.join(args.out, "cls")
        _write_figure(path, view, [cls], None)
        print(f"{printable(path)}.png, {printable(path)}.mp4: attention rollout of CLS")
        content["cls"] = {"weights": cls.weights.round(6).tolist()}
    write_json(os.path.join(args.out, "trajectories.json"), content)
    return DONE


def _write_figure(
    path: str, view: AttentionView, maps: Sequence[AttentionMap], point: QueryPoint | None
) -> None:
    figure = HeatMapFigure(view.pixels, view.grid, maps, point, view.total)
    figure.write_strip(f"{path}.png")
    figure.write_video(f"{path}.mp4")


def _query_points(
    args: argparse.Namespace, pixels: np.ndarray, grid: TokenGrid
) -> list[QueryPoint]:
    frame = len(pixels) // 2 if args.frame is None else args.frame
    if args.point is None:
        count = 1 if args.moving is None else args.moving
        if not 1 <= count <= grid.side**2:
            raise InputError(f"--moving is {count}; must be from 1 to {grid.side**2}")
        grid.token(QueryPoint(0, 0, frame))  # raises if the frame is invalid
        return moving_points(pixels, grid, count, frame)
    if args.moving is not None:
        raise InputError("--point and --moving cannot be combined")
    with contextlib.suppress(ValueError):
        x, y = (int(number) for number in args.point.split(","))
        return [QueryPoint(x, y, frame)]
    raise InputError(f"--point is {args.point!r}; must be X,Y, two integers (pixels)")


def _point_json(point: QueryPoint, maps: Sequence[AttentionMap]) -> dict[str, Any]:
    return {
        **point._asdict(),
        "attention": {
            attention.name: {
                "path": attention.path.round(2).tolist(),
                "weights": attention.weights.round(6).tolist(),
                "weight_error": attention.weight_error,
                "output_error": attention.output_error,
            }
            for attention in maps
        },
    }


def _print_errors(path: str, point: QueryPoint, maps: Sequence[AttentionMap]) -> None:
    path = printable(path)
    print(f"{path}.png, {path}.mp4: point {point.x},{point.y} of frame {point.frame}")
    print(f"  {'':<18} mean squared error to exact attention")
    print(f"  {'attention':<18} {'of weights':>10}  {'of output':>10}   centres of the peak")
    for attention in maps:
        errors = f"{attention.weight_error:>10.3e}  {attention.output_error:>10.3e}"
        centres = " ".join(f"{x:.0f},{y:.0f}" for x, y in attention.path)
        print(f"  {attention.label:<18} {errors}   {centres}", flush=True)
