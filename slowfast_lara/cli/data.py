"""Subcommands of `data`: lists, checks, re-encoding, loader speed, synthetic datasets."""

from __future__ import annotations

import argparse
import os

from slowfast_lara.cli.parser import (
    CommandParser,
    add_jobs_flag,
    add_opts_marker,
    add_table_flag,
    positive_int,
    print_table,
    regular_expression,
)
from slowfast_lara.errors import FAILED, InputError

SPLITS = ("train", "val", "test")
# x264 presets, fastest first; veryslow and placebo would take hours.
PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower")


def add_commands(root: CommandParser) -> None:
    data = root.add_command(
        "data",
        description="Build lists, check and prepare videos, time the loader, make synthetic data.",
    )
    parser = data.add_command("lists-kinetics", lists_kinetics)
    parser.add_argument("videos", metavar="VIDEOS", help="the folder with the videos")
    _add_lists_out(parser)
    for split in SPLITS:
        parser.add_flag(f"--{split}", f"annotation file of the {split} split", metavar="FILE")
    _add_separator(parser)

    parser = data.add_command("lists-ssv2", lists_ssv2)
    parser.add_argument("annotations", metavar="ANNOTATIONS", help="the folder of the JSON files")
    parser.add_argument("folder", metavar="FOLDER", help="the folder with the videos or frames")
    _add_lists_out(parser)
    parser.add_flag("--classes", "number of classes", type=positive_int, default=174)

    parser = data.add_command("lists-folder", lists_folder)
    parser.add_argument("videos", metavar="VIDEOS", help="the folder with one folder per class")
    _add_lists_out(parser)
    for split in ("val", "test"):
        meaning = f"share of each class in {split}.csv, at least one video"
        parser.add_flag(f"--{split}-share", meaning, type=float, default=0.1, metavar="SHARE")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split (default: 0)")
    group = "keep videos in one list if this regular expression matches the same text in their path"
    parser.add_flag("--group", group, type=regular_expression, default="", metavar="REGEX")

    parser = data.add_command("check", check)
    parser.add_argument("out", metavar="OUT", help="the file to list bad videos in")
    sources = "lists (.csv, .txt), folders or videos"
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=sources)
    _add_separator(parser)
    _add_prefix(parser)
    add_jobs_flag(parser)

    parser = data.add_command("drop-bad", drop_bad)
    parser.add_argument("bad", metavar="BAD", help="the file that `data check` wrote")
    parser.add_argument("lists", nargs="+", metavar="LIST", help="the lists to change")
    _add_separator(parser)
    _add_prefix(parser)

    _add_prepare(data)
    _add_speed(data)

    parser = data.add_command("synthetic", synthetic)
    add_set_arguments(parser)


def add_set_arguments(parser: CommandParser) -> None:
    """Add the flags of a synthetic dataset: folder, number and size of the videos."""
    parser.add_argument("out", metavar="OUT", help="the folder to create")
    parser.add_flag("--classes", "number of classes (motions), 1 to 12", type=int, default=4)
    for split, default in zip(SPLITS, (512, 64, 64)):
        parser.add_flag(f"--{split}", "number of videos", type=int, default=default)
    parser.add_flag("--size", "height and width in pixels, an even number", type=int, default=80)
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
        ("--short-side", 256, "shorter side in pixels; smaller videos are not scaled"),
        ("--key-frames", 16, "largest key-frame interval, in frames"),
        ("--time-limit", 1800, "seconds per video; a video that takes longer counts as failed"),
    ):
        parser.add_flag(flag, meaning, type=positive_int, default=default)
    quality = "x264's constant rate factor: 18 is visually lossless; +6 halves the file size"
    scale = {"type": int, "choices": range(52), "metavar": "0..51"}
    parser.add_flag("--crf", quality, default=22, **scale)
    parser.add_flag("--preset", "x264 preset", choices=PRESETS, default="fast")
    _add_separator(parser)
    link = "make symbolic links to mp4 files that need no encoding, instead of remuxing them"
    parser.add_flag("--link", link, action="store_true")
    dry_run = "prepare 20 videos to estimate time and disk space for all videos; OUT is not written"
    parser.add_flag("--dry-run", dry_run, action="store_true")
    add_jobs_flag(parser)


def _add_speed(data: CommandParser) -> None:
    usage = "%(prog)s --cfg FILE_OR_NAME [flags] [KEY VALUE ...]"
    parser = data.add_command("speed", speed, usage=usage)
    parser.add_flag("--cfg", "a YAML file, or the name of a shipped config", required=True)
    add_opts_marker(parser)
    parser.add_argument("pairs", nargs="*", metavar="KEY VALUE", help="config overrides")
    workers = "numbers of workers (default: 0, 1, 2, 4, ... up to the number of cores)"
    parser.add_flag("--workers", workers, type=int, nargs="+", metavar="N")
    seconds = "seconds to measure each number of workers"
    parser.add_flag("--seconds", seconds, type=positive_int, default=5)
    step = "time of a training step on your GPU, in milliseconds"
    parser.add_flag("--step-ms", step, type=positive_int, metavar="MS")
    add_table_flag(parser, "PATH.csv")


def _add_lists_out(parser: CommandParser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder for the lists (DATA.PATH_TO_DATA_DIR)")


def _add_separator(parser: CommandParser) -> None:
    meaning = "text between path and label in lists (DATA.PATH_LABEL_SEPARATOR; default: a space)"
    parser.add_argument("--separator", default=" ", help=meaning)


def _add_prefix(parser: CommandParser) -> None:
    prefix = "folder that the paths in the lists are relative to (DATA.PATH_PREFIX)"
    parser.add_flag("--prefix", prefix, default="")


def lists_kinetics(args: argparse.Namespace) -> None:
    """Write the lists for Kinetics.

    The annotation files are CSV with columns `label`, `youtube_id`, `time_start` and `time_end`.
    Videos may be anywhere below VIDEOS. They are named ID_START_END.mp4 (START and END in six
    digits, as in the official downloads) or ID.mp4; other file extensions are accepted. Classes are
    numbered in alphabetical order. Written to OUT: classes.json and, for each given flag, e.g.
    --train, train.csv (`path label`) and missing_train.txt with the videos that were not found.
    """
    from slowfast_lara.prepare.lists import write_kinetics_lists

    files = {split: path for split in SPLITS if (path := getattr(args, split))}
    if not files:
        raise InputError("expected at least one of --train, --val and --test")
    write_kinetics_lists(args.videos, args.out, files, args.separator)


def lists_ssv2(args: argparse.Namespace) -> None:
    """Write the lists for Something-Something-v2.

    ANNOTATIONS contains something-something-v2-{labels,train,validation}.json. FOLDER contains the
    official ID.webm files, or for each video a folder ID of extracted frames. Written to OUT:
    train.csv and val.csv, and missing_train.txt and missing_val.txt with the videos that were not
    found. For videos, the lists have lines `path label`, and classes.json is written to OUT. For
    frames, the lists have PySlowFast's format, and the JSON files are copied to OUT.

    If no video is missing, .webm files need no lists: set DATA.PATH_TO_DATA_DIR to ANNOTATIONS and
    DATA.PATH_PREFIX to FOLDER.
    """
    from slowfast_lara.prepare.lists import write_ssv2_lists

    write_ssv2_lists(args.annotations, args.folder, args.out, args.classes)


def lists_folder(args: argparse.Namespace) -> None:
    """Write the lists for your own videos.

    VIDEOS contains one folder per class, named after the class. Each class is divided into test,
    validation (by default 10 % each) and training videos. The split depends only on the file names
    and the flags. Classes are numbered in alphabetical order. Written to OUT: train.csv,
    val.csv and test.csv (`path label`) and classes.json.

    Videos of one scene or session must be in one list, otherwise the test accuracy is too high.
    --group keeps videos together if the expression (or its first group in parentheses) matches the
    same text in their paths below the class folder. Examples: '^[^_]+' groups by the name up to the
    first underscore, '^[^/]+/' by subfolder.
    """
    from slowfast_lara.prepare.lists import Split, write_folder_lists

    split = Split(args.val_share, args.test_share, args.seed, args.group)
    write_folder_lists(args.videos, args.out, split)


def check(args: argparse.Namespace) -> int | None:
    """Decode every video and list the bad ones.

    A video is bad if it cannot be opened, if it has no frames or has undecodable packets, or if
    decoding it crashes or takes more than 30 minutes. OUT lists the paths of bad videos with the
    reasons. OUT.progress lists the checked videos. A file OUT without OUT.progress is not replaced.
    To resume an interrupted check, or after repairing videos, repeat the command: it skips videos
    that were good and have not changed. To remove the bad videos from the lists, use `data
    drop-bad`. The exit code is 1 if there are bad videos.
    """
    from slowfast_lara.prepare.check import check_videos

    options = {"separator": args.separator, "prefix": args.prefix, "jobs": args.jobs}
    return FAILED if check_videos(args.out, args.sources, **options) else None


def drop_bad(args: argparse.Namespace) -> None:
    """Remove bad videos from lists.

    BAD is OUT of `data check`, or a file with a path per line, optionally followed by a tab and a
    reason. The lines of these videos are removed from each LIST, in place. To keep a video, remove
    its line from BAD first.
    """
    from slowfast_lara.prepare.check import drop_bad

    drop_bad(args.bad, args.lists, separator=args.separator, prefix=args.prefix)


def prepare(args: argparse.Namespace) -> int | None:
    """Re-encode videos for fast reading.

    Converts all videos below VIDEOS to H.264 in mp4 with the given short side and key-frame
    interval, upright, with square pixels and without sound. OUT has the same subfolders as VIDEOS.
    Each new file is decoded to check that it has the frames and timestamps of its source. Videos
    that already have this form are remuxed, not re-encoded. Also written to OUT: the lists that
    VIDEOS contains (train.csv, val.csv, test.csv, classes.json, files of Something-Something-v2);
    failures.csv with videos that failed entirely (column `prepared`: no) or in part (yes);
    prepared.jsonl, from which the same command resumes. The exit code is 1 if some videos failed.
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
    """Measure the speed of the training data loader of a config.

    Loads training clips, as in training, with each number of workers. Prints the clips per second,
    the time of each stage of loading a sample and, with --step-ms, how many workers keep up with
    the GPU. Only one process is measured: in training on several GPUs, each process has this number
    of workers, and all workers share the cores. The first read of a video also scans its
    timestamps; the time of this scan is reported separately.
    """
    from slowfast_lara.analysis.loader_benchmark import loader_speed
    from slowfast_lara.config import load_config
    from slowfast_lara.config.validate import check_lists

    cores = os.cpu_count() or 1
    workers = args.workers or sorted({0, cores, *(2**n for n in range(cores.bit_length()))})
    if min(workers) < 0:
        raise InputError(f"--workers is {min(workers)}; must be at least 0")
    cfg = load_config(args.cfg, args.pairs)
    check_lists(cfg)
    print_table(loader_speed(cfg, workers, args.seconds, args.step_ms), args.out)


def synthetic(args: argparse.Namespace) -> None:
    """Make a synthetic dataset of videos.

    Each video shows a moving object; classes differ only in the motion. Written to OUT: the videos,
    train.csv, val.csv and test.csv (`path label`), classes.json, and tracks.json with the centre of
    the moving object in every frame. With --form frames, the lists have PySlowFast's format for
    extracted frames, and the JSON files of Something-Something-v2 are also written.
    """
    from slowfast_lara.prepare.synthetic import Settings, make_set

    videos = {split: getattr(args, split) for split in SPLITS}
    options = (args.size, args.frames, args.seed, args.form)
    make_set(Settings(args.out, args.classes, videos, *options), args.jobs)
