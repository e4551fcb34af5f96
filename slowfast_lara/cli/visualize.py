"""slowfast-lara visualize, tools/visualize.py: where the attention of a point goes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slowfast_lara.cli.shared import (
    OneLineParser,
    add_model_arguments,
    split_model,
    split_overrides,
)
from slowfast_lara.errors import run_with_exit_code

EXAMPLES = """\
examples:
  visualize.py RUN video.mp4 --moving 3 --out FOLDER
  visualize.py model.pyth video.mp4 --point 30,42 --frame 4 --layer 1 --head 0 --out FOLDER
  visualize.py RUN video.mp4 --estimators lara,nystrom --out FOLDER VIT.APPROX_ATTN_DIM 32

RUN is a run's folder (its best checkpoint is used, if one was kept, or else the newest) or a
checkpoint.

In FOLDER: point_1.png (a row for each attention, a column for each frame of tokens, that
is, the mean of the frames of video that a token sees), point_1.mp4, ..., and
trajectories.json with all the numbers. Colour is attention beyond an equal share, on one
scale for all rows; the line is the path of the centre of its peak; the box is the chosen
point. Errors are mean squared errors to exact attention on the same q, k, v.

Of a model with joint or divided attention, a point's row of the layer's attention, over the
patches of all frames (in divided attention: its frame, and what that took over time before);
and cls.png, cls.mp4: what CLS takes from each patch through all layers (attention rollout).
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_intermixed_args(argv)

    def command() -> int:
        from slowfast_lara.visualization.visualize import visualize

        words, overrides = split_overrides(args.words)
        return visualize(args, *split_model(args, words), overrides)

    return run_with_exit_code(command)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description="Draw where the attention of a point of a video goes in each frame.",
        epilog=EXAMPLES,
    )
    add_model_arguments(parser)
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN VIDEO",
        help="the run and the video; also KEY VALUE pairs that change the config",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the pictures go")
    parser.add_argument(
        "--point", metavar="X,Y", help="the point, in pixels of the model's view (the centre crop)"
    )
    parser.add_argument(
        "--frame",
        type=int,
        metavar="T",
        help="its frame in the clip, from 0 (default: the middle one)",
    )
    parser.add_argument(
        "--moving",
        type=int,
        metavar="K",
        help="instead of a point: the K most moving ones of the frame (default 1)",
    )
    parser.add_argument("--layer", type=int, help="layer, from 0 (default: the last)")
    parser.add_argument("--head", type=int, help="attention head, from 0 (default: their mean)")
    parser.add_argument(
        "--estimators",
        metavar="NAME,NAME",
        help="what to draw beside exact attention (default: all others)",
    )
    return parser
