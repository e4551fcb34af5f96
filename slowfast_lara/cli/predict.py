"""slowfast-lara predict, tools/predict.py: the likeliest classes of videos."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slowfast_lara.cli.shared import (
    OneLineParser,
    add_classes_argument,
    add_model_arguments,
    split_model,
    split_overrides,
)
from slowfast_lara.errors import run_with_exit_code

EXAMPLES = """\
examples:
  predict.py RUN video.mp4
  predict.py RUN --views 30 --json out.json --csv out.csv folder/
  predict.py model.pyth --stream --csv out.csv --plot plot.png long.mp4
  predict.py --cfg quick/lara --checkpoint RUN/checkpoints/NAME.pyth --video-out new.mp4 video.mp4

RUN is a run's folder (its best checkpoint is used, if one was kept, or else the newest) or a
checkpoint.

exit code: 0 if every video was scored, 2 if any was not (it is named on stderr, in the
JSON and in the CSV; the others are done) or if the command itself cannot be run.
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_intermixed_args(argv)

    def command() -> int:
        from slowfast_lara.inference.predict import predict_videos

        words, overrides = split_overrides(args.words)
        return predict_videos(args, *split_model(args, words), overrides)

    return run_with_exit_code(command)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description="Print the five likeliest classes of each video.", epilog=EXAMPLES
    )
    add_model_arguments(parser)
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN VIDEO_OR_FOLDER",
        help="the run; videos, or folders of which every file is taken; also KEY VALUE "
        "pairs that change the config",
    )
    add_classes_argument(parser)
    parser.add_argument(
        "--views",
        type=int,
        metavar="N",
        help="clips and crops to average, 1 to 30: N/3 clips of 3 crops "
        "where 3 divides N, else N clips of the centre crop (default: as in "
        "the config)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the predictions as JSON")
    parser.add_argument("--csv", metavar="FILE", help="also write the predictions as CSV")
    parser.add_argument(
        "--video-out",
        metavar="FILE.mp4|FOLDER",
        help="also write each video, without sound, with the three likeliest "
        "classes of the last window drawn on it",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="predict every window of a (long) video instead of the whole",
    )
    parser.add_argument(
        "--window",
        type=float,
        metavar="SECONDS",
        help="length of a window (default: what a clip of the model spans; 4 for ssv2 models)",
    )
    parser.add_argument(
        "--stride",
        type=float,
        metavar="SECONDS",
        help="from window to window (default: half a window)",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png|FOLDER", help="with --stream: also plot the scores over time"
    )
    return parser
