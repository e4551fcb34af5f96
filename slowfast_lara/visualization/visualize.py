"""What attention sees of a point, by every estimator, as pictures and figures; and of CLS."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.errors import DONE, InputError, printable
from slowfast_lara.files import write_json
from slowfast_lara.inference.load import load
from slowfast_lara.models.attention_config import EXACT, display_name, resolve_estimator
from slowfast_lara.models.numerics import choose_threads
from slowfast_lara.visualization.heat_maps import Drawing, Picture
from slowfast_lara.visualization.scene import Scene
from slowfast_lara.visualization.trajectories import Grid, Point, moving_points


def visualize(
    args: argparse.Namespace,
    model_files: tuple[str, str | None],
    files: list[str],
    overrides: list[str],
) -> int:
    """Draw as the flags of `slowfast-lara visualize` say; the exit code."""
    if len(files) != 1:
        raise InputError(f"{len(files)} videos given; one is expected")
    model = load(*model_files, overrides=overrides)
    choose_threads(model.cfg)
    heads = model.cfg.VIT.NUM_HEADS
    if args.head is not None and not 0 <= args.head < heads:
        raise InputError(f"--head is {args.head}; the model has 0 to {heads - 1}")
    scene = Scene(model, files[0], args.layer)
    points = _points(args, scene.pixels, scene.grid)
    chosen = list(ESTIMATORS) if args.estimators is None else args.estimators.split(",")
    others = [resolve_estimator(name) for name in chosen if name]
    names = list(dict.fromkeys([EXACT, *others]))
    drawn = []
    for number, point in enumerate(points, start=1):
        pictures = scene.look(point, names, args.head)
        path = os.path.join(args.out, f"point_{number}")
        _draw(path, scene, pictures, point)
        drawn.append(_as_json(point, pictures))
        _print(path, point, pictures)
    facts: dict[str, Any] = {
        "video": files[0],
        "checkpoint": model.path,
        "layer": scene.layer,
        "head": args.head,
        "points": drawn,
    }
    if not scene.has_trajectories:
        cls, path = scene.cls(), os.path.join(args.out, "cls")
        _draw(path, scene, [cls], None)
        print(f"{printable(path)}.png, {printable(path)}.mp4: what CLS takes, through all layers")
        facts["cls"] = {"weights": cls.weights.round(6).tolist()}
    write_json(os.path.join(args.out, "trajectories.json"), facts)
    return DONE


def _draw(path: str, scene: Scene, pictures: Sequence[Picture], point: Point | None) -> None:
    drawing = Drawing(scene.pixels, scene.grid, pictures, point, scene.shares_of)
    drawing.write_strip(f"{path}.png")
    drawing.write_video(f"{path}.mp4")


def _points(args: argparse.Namespace, pixels: np.ndarray, grid: Grid) -> list[Point]:
    frame = len(pixels) // 2 if args.frame is None else args.frame
    if args.point is None:
        count = 1 if args.moving is None else args.moving
        if not 1 <= count <= grid.side**2:
            raise InputError(f"--moving is {count}; 1 to {grid.side**2} are allowed")
        grid.token(Point(0, 0, frame))  # refuses a frame that is not there
        return moving_points(pixels, grid, count, frame)
    if args.moving is not None:
        raise InputError("--point and --moving: one of them")
    with contextlib.suppress(ValueError):
        x, y = (int(number) for number in args.point.split(","))
        return [Point(x, y, frame)]
    raise InputError(f"--point is {args.point!r}; X,Y in whole pixels is expected")


def _as_json(point: Point, pictures: Sequence[Picture]) -> dict[str, Any]:
    return {
        **point._asdict(),
        "attention": {
            picture.name: {
                "path": picture.path.round(2).tolist(),
                "weights": picture.weights.round(6).tolist(),
                "weight_error": picture.weight_error,
                "output_error": picture.output_error,
            }
            for picture in pictures
        },
    }


def _print(path: str, point: Point, pictures: Sequence[Picture]) -> None:
    path = printable(path)
    print(f"{path}.png, {path}.mp4: point {point.x},{point.y} of frame {point.frame}")
    print(f"  {'':<12} mean squared error to exact attention")
    print(f"  {'attention':<12} {'of weights':>10}  {'of output':>10}   path of the centre")
    for picture in pictures:
        errors = f"{picture.weight_error:>10.3e}  {picture.output_error:>10.3e}"
        centres = " ".join(f"{x:.0f},{y:.0f}" for x, y in picture.path)
        print(f"  {display_name(picture.name):<12} {errors}   {centres}", flush=True)
