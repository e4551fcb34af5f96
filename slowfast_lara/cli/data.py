"""slowfast-lara data, datasets/*.py: lists, checking, re-encoding, speed, a synthetic set."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

from slowfast_lara.cli.shared import OneLineParser, add_jobs_argument, positive_int
from slowfast_lara.errors import FAILED, InputError, run_with_exit_code

LISTS_KINETICS = """\
The annotation files have a header with `label`, `youtube_id`, `time_start` and
`time_end`. Videos are found anywhere below VIDEOS as ID_START_END.mp4 (six digits
each, as the official downloads) or ID.mp4, whatever the suffix. Classes are
numbered in alphabetical order. OUT gets train.csv, val.csv, test.csv (`path
label`), classes.json, and missing_train.txt and so on with what was not found.
"""
LISTS_SSV2 = """\
ANNOTATIONS holds something-something-v2-{labels,train,validation}.json. FOLDER
holds the distributed ID.webm files, or a folder ID of extracted frames for each
video. OUT gets train.csv and val.csv (for frames in PySlowFast's form, with the
JSON files beside them; for videos as `path label`), and missing_train.txt and
missing_val.txt with the videos that were not found.

Where no video is missing, no lists are needed for .webm files: DATA.PATH_TO_DATA_DIR
ANNOTATIONS and DATA.PATH_PREFIX FOLDER do.
"""
LISTS_FOLDER = """\
VIDEOS has a folder for each class, named as the class. A tenth of each class tests, a
tenth validates (at least one video each), the rest trains; which, follows from the
names alone. Classes are numbered in alphabetical order. OUT gets train.csv, val.csv,
test.csv (`path label`) and classes.json.
"""
CHECK = """\
Decodes every video and writes down the bad ones, with the reason. Bad is what gives
no frame, and what has packets that do not decode. What was checked is kept in
OUT.progress: a run that was stopped goes on from there. Ends with status 1 if there
are bad videos.
"""
PREPARE = """\
Makes all videos below VIDEOS quick to read, into the same folders below OUT: H.264 in
mp4 with the short side and the distance of key frames given here, upright, with square
pixels and without sound. Every result is decoded again before it counts, and has the
frames and times of its source. Videos that are so already are copied without encoding.
OUT gets the lists train.csv, val.csv and test.csv (`path label`), classes.json and the
files of Something-Something-v2 that VIDEOS has; failures.csv, what could not be prepared
(prepared: no) or only in part (yes); and prepared.jsonl, by which the same command goes
on where it was stopped. Ends with status 1 if some videos failed.
"""
SPEED = """\
Reads the training list of a config as a training does, with each number of workers, and
says how many clips per second come, where the time of a sample goes, and, given the time of
a step on your GPU, how many workers that needs or that the data will be the bottleneck.
Times are of one process: with NUM_GPUS above 1 each has so many workers, and shares the
cores. Videos that are read for the first time are scanned, which is told apart, and kept in
DATA.PATH_TO_DATA_DIR/packets.index.
"""
SYNTHETIC = """\
Makes a labelled video set that needs no download; only motion tells its classes
apart. OUT gets the videos, train.csv, val.csv, test.csv (`path label`), classes.json
and tracks.json, the centre of the moving object in every frame.
"""
# Of x264, from the quickest on.
PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower")


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(description="Data: lists, checks, re-encoding, speed, a synthetic set.")
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for name, (help_text, description, add_arguments, run) in _KINDS.items():
        kind = kinds.add_parser(name, help=help_text, description=description)
        add_arguments(kind)
        kind.set_defaults(run=run)
    args = parser.parse_args(argv)
    return run_with_exit_code(lambda: args.run(args))


def _add_lists_kinetics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("videos", metavar="VIDEOS", help="the folder with the videos")
    _add_out(parser)
    for split in ("train", "val", "test"):
        parser.add_argument(f"--{split}", metavar="FILE", help=f"annotations of {split}")
    _add_separator(parser)


def _lists_kinetics(args: argparse.Namespace) -> None:
    from slowfast_lara.prepare.lists import write_kinetics_lists

    files = {"train": args.train, "val": args.val, "test": args.test}
    given = {split: path for split, path in files.items() if path}
    if not given:
        raise InputError("at least one of --train, --val and --test is expected")
    write_kinetics_lists(args.videos, args.out, given, args.separator)


def _add_lists_ssv2(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("annotations", metavar="ANNOTATIONS", help="the folder of the JSON files")
    parser.add_argument("folder", metavar="FOLDER", help="the folder with the videos or frames")
    _add_out(parser)
    parser.add_argument("--classes", type=positive_int, default=174)


def _lists_ssv2(args: argparse.Namespace) -> None:
    from slowfast_lara.prepare.lists import write_ssv2_lists

    write_ssv2_lists(args.annotations, args.folder, args.out, args.classes)


def _add_lists_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("videos", metavar="VIDEOS", help="the folder with a folder for each class")
    _add_out(parser)


def _lists_folder(args: argparse.Namespace) -> None:
    from slowfast_lara.prepare.lists import write_folder_lists

    write_folder_lists(args.videos, args.out)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="where the bad videos are written")
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="lists (.csv, .txt), folders or videos"
    )
    _add_separator(parser)
    parser.add_argument("--prefix", default="", help="DATA.PATH_PREFIX")
    add_jobs_argument(parser, "processes")


def _check(args: argparse.Namespace) -> int | None:
    from slowfast_lara.prepare.check import check_videos

    options = {"separator": args.separator, "prefix": args.prefix, "jobs": args.jobs}
    return FAILED if check_videos(args.out, args.sources, **options) else None


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("videos", metavar="VIDEOS", help="the folder with the videos")
    parser.add_argument("out", metavar="OUT", help="the folder for the results")
    numbers = {
        "--short-side": (256, "pixels of the shorter side; smaller ones stay as they are"),
        "--key-frames": (16, "the largest distance of two key frames, in frames"),
        "--time-limit": (1800, "seconds for one video; longer is a failure"),
    }
    for flag, (default, meaning) in numbers.items():
        meaning = f"{meaning} (default {default})"
        parser.add_argument(flag, type=positive_int, default=default, help=meaning)
    parser.add_argument(
        "--crf",
        type=int,
        choices=range(52),
        metavar="0..51",
        default=22,
        help="loss of quality: 18 cannot be seen, 6 more halve the bytes (default 22)",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="fast", help="effort of the encoder (default fast)"
    )
    parser.add_argument("--separator", default=" ", help="DATA.PATH_LABEL_SEPARATOR")
    parser.add_argument(
        "--link", action="store_true", help="link to mp4 files that need no encoding: no copies"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="try 20 videos; say what all will take, and how much faster training reads them",
    )
    add_jobs_argument(parser, "processes")


def _prepare(args: argparse.Namespace) -> int | None:
    from slowfast_lara.prepare.estimate import estimate
    from slowfast_lara.prepare.prepare import prepare_set
    from slowfast_lara.prepare.reencode import Options

    options = Options(args.short_side, args.key_frames, args.crf, args.preset, args.link)
    limits = {"jobs": args.jobs, "time_limit": args.time_limit}
    if args.dry_run:
        failed = estimate(args.videos, args.out, options, **limits)
    else:
        failed = prepare_set(args.videos, args.out, options, separator=args.separator, **limits)
    return FAILED if failed else None


def _add_speed(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --cfg FILE_OR_NAME [flags] [KEY VALUE ...]"
    parser.add_argument("--cfg", required=True, help="the config: a YAML file, or a shipped one")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of workers (default: 0, 1, 2, 4, ... up to the cores)",
    )
    parser.add_argument(
        "--seconds", type=positive_int, default=5, help="for each of them (default 5)"
    )
    parser.add_argument(
        "--step-ms", type=positive_int, metavar="MS", help="the time of a training step"
    )


def _speed(args: argparse.Namespace) -> None:
    from slowfast_lara.analysis.loader_benchmark import as_text, loader_speed
    from slowfast_lara.config import load_config

    cores = os.cpu_count() or 1
    workers = args.workers or sorted({0, cores, *(2**n for n in range(cores.bit_length()))})
    if min(workers) < 0:
        raise InputError(f"--workers {min(workers)}; numbers from 0 on are expected")
    speed = loader_speed(load_config(args.cfg, args.opts), workers, args.seconds)
    print(as_text(speed, args.step_ms))


def _add_synthetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--classes", type=int, default=4, help="kinds of motion, 1 to 12")
    for split, default in (("train", 512), ("val", 64), ("test", 64)):
        parser.add_argument(
            f"--{split}", type=int, default=default, help=f"number of videos (default {default})"
        )
    parser.add_argument("--size", type=int, default=80, help="height and width, an even number")
    parser.add_argument("--frames", type=int, default=16, help="frames of each video")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--form",
        choices=("mp4", "frames"),
        default="mp4",
        help="H.264 files, or extracted frames as for Something-Something-v2",
    )
    add_jobs_argument(parser, "processes")


def _synthetic(args: argparse.Namespace) -> None:
    from slowfast_lara.prepare.synthetic import Settings, make_set

    videos = {"train": args.train, "val": args.val, "test": args.test}
    look = {"size": args.size, "frames": args.frames, "seed": args.seed, "form": args.form}
    settings = Settings(args.out, args.classes, videos, **look)
    make_set(settings, args.jobs)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder for the lists: DATA.PATH_TO_DATA_DIR")


def _add_separator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--separator", default=" ", help="DATA.PATH_LABEL_SEPARATOR")


Run = Callable[[argparse.Namespace], int | None]
_KINDS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None], Run]] = {
    "lists-kinetics": ("lists of Kinetics", LISTS_KINETICS, _add_lists_kinetics, _lists_kinetics),
    "lists-ssv2": ("lists of Something-Something-v2", LISTS_SSV2, _add_lists_ssv2, _lists_ssv2),
    "lists-folder": ("lists of your own videos", LISTS_FOLDER, _add_lists_folder, _lists_folder),
    "check": ("decode every video once", CHECK, _add_check, _check),
    "prepare": ("make videos quick to read", PREPARE, _add_prepare, _prepare),
    "speed": ("how fast the training loader reads", SPEED, _add_speed, _speed),
    "synthetic": ("make a set of videos", SYNTHETIC, _add_synthetic, _synthetic),
}
