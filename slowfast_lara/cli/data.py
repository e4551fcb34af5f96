"""Subcommands `data ...`: lists, checks, re-encoding, loader speed, synthetic sets."""

from __future__ import annotations

import argparse
import os

from slowfast_lara.cli.parser import (
    CommandParser,
    add_jobs_flag,
    add_table_flag,
    positive_int,
    print_table,
)
from slowfast_lara.errors import FAILED, InputError

SPLITS = ("train", "val", "test")
# x264's presets, fastest first.
PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower")


def add_commands(root: CommandParser) -> None:
    data = root.add_command(
        "data", description="Build lists, check and prepare videos, make a synthetic set."
    )
    parser = data.add_command("lists-kinetics", lists_kinetics)
    parser.add_argument("videos", metavar="VIDEOS", help="the folder with the videos")
    _add_lists_out(parser)
    for split in SPLITS:
        parser.add_flag(f"--{split}", f"annotations of {split}", metavar="FILE")
    _add_separator(parser)

    parser = data.add_command("lists-ssv2", lists_ssv2)
    parser.add_argument("annotations", metavar="ANNOTATIONS", help="the folder of the JSON files")
    parser.add_argument("folder", metavar="FOLDER", help="the folder with the videos or frames")
    _add_lists_out(parser)
    parser.add_flag("--classes", "number of classes", type=positive_int, default=174)

    parser = data.add_command("lists-folder", lists_folder)
    parser.add_argument("videos", metavar="VIDEOS", help="the folder with one folder per class")
    _add_lists_out(parser)

    parser = data.add_command("check", check)
    parser.add_argument("out", metavar="OUT", help="the file for the bad videos")
    sources = "lists (.csv, .txt), folders or videos"
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=sources)
    _add_separator(parser)
    parser.add_flag("--prefix", "DATA.PATH_PREFIX", default="")
    add_jobs_flag(parser)

    _add_prepare(data)
    _add_speed(data)

    parser = data.add_command("synthetic", synthetic)
    add_set_arguments(parser)


def add_set_arguments(parser: CommandParser) -> None:
    """Flags of a synthetic set: folder, number and size of the videos."""
    parser.add_argument("out", metavar="OUT", help="the folder to create")
    parser.add_flag("--classes", "number of motions, 1 to 12", type=int, default=4)
    for split, default in zip(SPLITS, (512, 64, 64)):
        parser.add_flag(f"--{split}", "number of videos", type=int, default=default)
    parser.add_flag("--size", "height and width, an even number", type=int, default=80)
    parser.add_flag("--frames", "frames per video", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    forms = "H.264 files, or extracted frames as for Something-Something-v2"
    parser.add_flag("--form", forms, choices=("mp4", "frames"), default="mp4")
    add_jobs_flag(parser)


def _add_prepare(data: CommandParser) -> None:
    parser = data.add_command("prepare", prepare)
    parser.add_argument("videos", metavar="VIDEOS", help="the folder with the videos")
    parser.add_argument("out", metavar="OUT", help="the folder for the results")
    for flag, default, meaning in (
        ("--short-side", 256, "pixels of the shorter side; smaller videos are not scaled"),
        ("--key-frames", 16, "largest key-frame interval, in frames"),
        ("--time-limit", 1800, "seconds per video; a longer time is a failure"),
    ):
        parser.add_flag(flag, meaning, type=positive_int, default=default)
    quality = "x264's constant rate factor: 18 is visually lossless, 6 more halve the size"
    scale = {"type": int, "choices": range(52), "metavar": "0..51"}
    parser.add_flag("--crf", quality, default=22, **scale)
    parser.add_flag("--preset", "x264 preset", choices=PRESETS, default="fast")
    _add_separator(parser)
    link = "link to mp4 files that need no encoding, instead of copying"
    parser.add_flag("--link", link, action="store_true")
    dry_run = "prepare 20 videos and estimate time and space for all; OUT is not written"
    parser.add_flag("--dry-run", dry_run, action="store_true")
    add_jobs_flag(parser)


def _add_speed(data: CommandParser) -> None:
    usage = "%(prog)s --cfg FILE_OR_NAME [flags] [KEY VALUE ...]"
    parser = data.add_command("speed", speed, usage=usage)
    parser.add_flag("--cfg", "the config: a YAML file, or a shipped one", required=True)
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config overrides")
    workers = "numbers of workers (default: 0, 1, 2, 4, ... up to the number of cores)"
    parser.add_flag("--workers", workers, type=int, nargs="+", metavar="N")
    parser.add_flag("--seconds", "time per number of workers", type=positive_int, default=5)
    step = "time of a training step on your GPU"
    parser.add_flag("--step-ms", step, type=positive_int, metavar="MS")
    add_table_flag(parser, "PATH.csv")


def _add_lists_out(parser: CommandParser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder for the lists: DATA.PATH_TO_DATA_DIR")


def _add_separator(parser: CommandParser) -> None:
    parser.add_argument("--separator", default=" ", help="DATA.PATH_LABEL_SEPARATOR")


def lists_kinetics(args: argparse.Namespace) -> None:
    """Write the lists for Kinetics.

    The annotation files have a header with `label`, `youtube_id`, `time_start` and `time_end`.
    Videos are found anywhere below VIDEOS as ID_START_END.mp4 (six digits each, as in the official
    downloads) or ID.mp4, with any suffix. Classes are numbered in alphabetical order. OUT gets
    train.csv, val.csv and test.csv (`path label`), classes.json, and missing_train.txt and so on
    with the videos that were not found.
    """
    from slowfast_lara.prepare.lists import write_kinetics_lists

    files = {split: path for split in SPLITS if (path := getattr(args, split))}
    if not files:
        raise InputError("expected at least one of --train, --val and --test")
    write_kinetics_lists(args.videos, args.out, files, args.separator)


def lists_ssv2(args: argparse.Namespace) -> None:
    """Write the lists for Something-Something-v2.

    ANNOTATIONS contains something-something-v2-{labels,train,validation}.json. FOLDER contains the
    distributed ID.webm files, or one folder ID of extracted frames per video. OUT gets train.csv
    and val.csv (for frames in PySlowFast's format, together with the JSON files; for videos as
    `path label`), and missing_train.txt and missing_val.txt with the videos that were not found.

    If no video is missing, .webm files need no lists: set DATA.PATH_TO_DATA_DIR ANNOTATIONS and
    DATA.PATH_PREFIX FOLDER.
    """
    from slowfast_lara.prepare.lists import write_ssv2_lists

    write_ssv2_lists(args.annotations, args.folder, args.out, args.classes)


def lists_folder(args: argparse.Namespace) -> None:
    """Write the lists for your own videos.

    VIDEOS has one folder per class, named after the class. Of each class, a tenth of the videos is
    for testing, a tenth for validation (at least one video each), the rest for training; the split
    depends on the file names only. Classes are numbered in alphabetical order. OUT gets train.csv,
    val.csv and test.csv (`path label`) and classes.json.
    """
    from slowfast_lara.prepare.lists import write_folder_lists

    write_folder_lists(args.videos, args.out)


def check(args: argparse.Namespace) -> int | None:
    """Decode every video and list the bad ones.

    A video is bad if it has no frame, or packets that do not decode; OUT gets its path and the
    reason. OUT.progress lists the checked videos: the same command resumes an interrupted check.
    The exit code is 1 if there are bad videos.
    """
    from slowfast_lara.prepare.check import check_videos

    options = {"separator": args.separator, "prefix": args.prefix, "jobs": args.jobs}
    return FAILED if check_videos(args.out, args.sources, **options) else None


def prepare(args: argparse.Namespace) -> int | None:
    """Re-encode videos for fast reading.

    All videos below VIDEOS are written to the same folders below OUT: H.264 in mp4 with the given
    short side and key-frame interval, upright, with square pixels and without sound. Every result
    is decoded again before it counts, and has the frames and timestamps of its source. Videos that
    already satisfy this are copied without encoding. OUT gets the lists train.csv, val.csv and
    test.csv (`path label`), classes.json and the files of Something-Something-v2 that VIDEOS has;
    failures.csv with the videos that failed, entirely (column `prepared`: no) or in part (yes); and
    prepared.jsonl, with which the same command resumes. The exit code is 1 if some videos failed.
    """
    from slowfast_lara.prepare.prepare import estimate_set, prepare_set
    from slowfast_lara.prepare.reencode import Options

    options = Options(args.short_side, args.key_frames, args.crf, args.preset, args.link)
    limits = {"jobs": args.jobs, "time_limit": args.time_limit}
    if args.dry_run:
        failed = estimate_set(args.videos, args.out, options, **limits)
    else:
        failed = prepare_set(args.videos, args.out, options, separator=args.separator, **limits)
    return FAILED if failed else None


def speed(args: argparse.Namespace) -> None:
    """Measure the training loader of a config.

    Reads the training list as a training does, with each number of workers. Prints clips per
    second, the time of each stage of a sample, and, with --step-ms, the number of workers that
    keep up with the GPU. Measured with one process: with NUM_GPUS above 1, each process has this
    number of workers, and all share the cores. The first read of a video scans its timestamps;
    that time is reported separately.
    """
    from slowfast_lara.analysis.loader_benchmark import loader_speed
    from slowfast_lara.config import load_config

    cores = os.cpu_count() or 1
    workers = args.workers or sorted({0, cores, *(2**n for n in range(cores.bit_length()))})
    if min(workers) < 0:
        raise InputError(f"--workers is {min(workers)}; must be at least 0")
    cfg = load_config(args.cfg, args.opts)
    print_table(loader_speed(cfg, workers, args.seconds, args.step_ms), args.out)


def synthetic(args: argparse.Namespace) -> None:
    """Make a synthetic set of videos.

    The set is labelled and needs no download. Classes differ only in motion. OUT gets the videos,
    train.csv, val.csv and test.csv (`path label`), classes.json and tracks.json: the centre of the
    moving object in every frame.
    """
    from slowfast_lara.prepare.synthetic import Settings, make_set

    videos = {split: getattr(args, split) for split in SPLITS}
    options = (args.size, args.frames, args.seed, args.form)
    make_set(Settings(args.out, args.classes, videos, *options), args.jobs)
