"""Command line of the studies: `python -m studies SUBCOMMAND ...`, from a checkout."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence

from slowfast_lara.cli import run_command
from slowfast_lara.cli.parser import CommandParser, add_jobs_flag, positive_int
from slowfast_lara.errors import INTERRUPTED, STOPPED, print_error

# The default is not results/: a trial run must not overwrite the published tables of the checkout.
_OUT = "runs/results"
_PUBLISHED = "; the published ones are in results/"


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(build_parser(), sys.argv[1:] if argv is None else argv)


def build_parser() -> CommandParser:
    root = CommandParser(
        prog="python -m studies", description="Train and test many small models and compare them."
    )
    parser = root.add_command("attention", attention)
    protocols = (
        "finetune: for each seed, train a model with exact attention and fine-tune every row from "
        "its weights, as in the paper; scratch: train every row from random weights"
    )
    parser.add_flag("--protocol", protocols, default="finetune", metavar="NAME")
    parts = (
        "compare_attention: all attentions at equal cost; ablation: the ablation of LARA; "
        "landmarks: error and accuracy by number of landmarks, without training; all: these three"
    )
    parser.add_flag("--part", parts, default="compare_attention", metavar="NAME")
    textures = "make synthetic videos from real ones in FOLDER (see `python -m studies.textured`)"
    parser.add_flag("--textures", textures, metavar="FOLDER")
    for split in ("train", "val", "test"):
        parser.add_flag(f"--{split}", f"number of {split} videos", type=positive_int)
    seeds = "number of seeds (default: 5; ablation: 3)"
    parser.add_flag("--seeds", seeds, type=positive_int)
    _add_study_flags(parser, "runs/study")

    parser = root.add_command("recipes", recipes)
    clips = "numbers of training clips; rows of single techniques use only the first number"
    parser.add_flag("--clips", clips, type=positive_int, nargs="+", default=[240, 24])
    parser.add_flag("--train", "videos for pretraining", type=positive_int, default=2048)
    parser.add_flag("--seeds", "number of seeds", type=positive_int, default=5)
    _add_study_flags(parser, "runs/recipes")

    parser = root.add_command("pretrained", pretrained)
    models = "Hugging Face folder of an image model, or a trained video model"
    parser.add_argument("model", metavar="MODEL", help=models)
    parser.add_argument("videos", nargs="+", metavar="VIDEO", help="video, or folder of videos")
    parser.add_flag("--crop", "crop size of an image model (default: 224)", type=positive_int)
    parser.add_flag(
        "--frames", "frames of a clip of an image model (default: 8)", type=positive_int
    )
    clips = "number of clips, one per video; the videos are evenly spaced in the list"
    parser.add_flag("--clips", clips, type=positive_int, default=6)
    numbers = "numbers of landmarks, samples or groups"
    parser.add_flag("--numbers", numbers, type=positive_int, nargs="+", default=[32, 64, 96, 128])
    parser.add_flag("--attentions", "attentions (default: all but RA)", nargs="+", metavar="NAME")
    parser.add_flag("--out", f"prefix of the results{_PUBLISHED}", default=f"{_OUT}/pretrained")

    parser = root.add_command("videos", videos)
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder of DINOv2 ViT-S/14")
    parser.add_argument("videos", metavar="VIDEOS", help="folder with one folder per class")
    group = "put videos in one fold if this regular expression matches the same text in their path"
    parser.add_flag("--group", group, default="", metavar="REGEX")
    parser.add_flag("--folds", "folds of the cross-validation", type=positive_int, default=3)
    motions = "number of synthetic videos for pretraining"
    parser.add_flag("--motions", motions, type=positive_int, default=3072)
    _add_study_flags(parser, "runs/videos")
    return root


def _add_study_flags(parser: CommandParser, work: str) -> None:
    parser.add_flag("--rows", "run only these rows", nargs="+", metavar="ROW")
    add_jobs_flag(parser, "parallel runs, each with one thread")
    parser.add_flag("--work", "folder for the runs and videos", default=work)
    parser.add_flag("--out", f"folder for the results{_PUBLISHED}", default=_OUT)
    overrides = "config overrides for all runs; must come last"
    parser.add_flag("--opts", overrides, nargs=argparse.REMAINDER, default=[], metavar="KEY VALUE")


def attention(args: argparse.Namespace) -> None:
    """Train and test small models with each attention."""
    from studies.attention import study

    _run(lambda: study(**vars(args)))


def recipes(args: argparse.Namespace) -> None:
    """Fine-tune one small model on few clips with several recipes.

    Compares plain fine-tuning, the recipe of configs/finetune, and single techniques such as mixup.
    """
    from studies.recipes import compare_recipes

    _run(lambda: compare_recipes(**vars(args)))


def pretrained(args: argparse.Namespace) -> None:
    """Compare the attentions with exact attention in a pretrained model, on real videos."""
    from studies.pretrained import study_pretrained

    _run(lambda: study_pretrained(**vars(args)))


def videos(args: argparse.Namespace) -> None:
    """Fine-tune an image model on real videos with several attentions, cross-validated."""
    from studies.real_videos import study_videos

    _run(lambda: study_videos(**vars(args)))


def _run(study: Callable[[], str]) -> None:
    # SystemExit makes run_all terminate its training processes, which then save a checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    try:
        print(study(), end="")
    except KeyboardInterrupt:
        print_error("interrupted; run the same command to resume")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
