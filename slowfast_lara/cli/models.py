"""Subcommands for a trained model: predict, visualize, demo, swap, export, report and more."""

from __future__ import annotations

import argparse
import os

from slowfast_lara.cli.parser import (
    CommandParser,
    add_classes_flag,
    add_model_arguments,
    add_table_flag,
    model_and_files,
    only_model,
    positive_int,
    print_table,
)
from slowfast_lara.errors import InputError, printable

VIDEOS = ("RUN VIDEO_OR_FOLDER", "the run, then videos or folders (all videos below them)")
VIEWS = "number of views to average, 1 to 30 (default: from the config)"
ATTENTIONS = "names of attentions (default: all)"
RUN_OR_CHECKPOINT = """
RUN is a checkpoint, the folder of a run, or a folder that `slowfast-lara export` wrote as
safetensors. From the folder of a run, best.pyth is loaded or, if there is none, the newest
checkpoint.
"""
PREDICT_EPILOG = f"""\
examples:
  slowfast-lara predict RUN video.mp4
  slowfast-lara predict RUN --views 30 --json out.json --csv out.csv folder/
  slowfast-lara predict RUN --npz out.npz folder/
  slowfast-lara predict model.pyth --stream --csv out.csv --plot plot.png long.mp4
  slowfast-lara predict --cfg quick/lara --checkpoint model.pyth --video-out new.mp4 video.mp4
{RUN_OR_CHECKPOINT}
out.npz has the arrays paths, scores [videos, classes], features [videos, D], num_views and
class_names: `numpy.load("out.npz")["features"]`. Videos that failed are left out.

exit codes: 0 if every video was scored; 2 if the command cannot run, or if a video failed; 130 if
interrupted by Ctrl-C. A failed video is reported on stderr, in the JSON and in the CSV; the other
videos are scored.
"""
VISUALIZE_EPILOG = f"""\
examples:
  slowfast-lara visualize RUN video.mp4 --moving 3 --out FOLDER
  slowfast-lara visualize model.pyth video.mp4 --point 30,42 --frame 4 --layer 1 --out FOLDER
  slowfast-lara visualize RUN video.mp4 --estimators lara,nystrom --out FOLDER
{RUN_OR_CHECKPOINT}
Written to FOLDER: point_1.png and point_1.mp4, the same for each further point, and
trajectories.json with all numbers. The PNG has one row per attention and one column per temporal
token; each image is the mean of the token's frames. Colour marks weights above the mean weight of
exact attention; all rows have the same scale. The box marks the point. The line follows the centre
of the attention's peak. Errors are mean squared errors to exact attention on the same q, k, v.

For a model with joint or divided attention, the images show the point's row of the attention
matrix over the patches of all frames (divided: the product of spatial and temporal attention).
In addition, cls.png and cls.mp4 show the attention rollout of the CLS token through all layers.
"""
DEMO_EPILOG = f"""\
examples:
  slowfast-lara demo RUN
  slowfast-lara demo model.pyth --port 8000 --views 30
{RUN_OR_CHECKPOINT}
Only this machine can open the page, unless --host is another address. The page sends no data to
other servers, and refuses requests from other sites. An uploaded file is removed after it has been
read; all uploads together may have at most five times --megabytes.
The demo needs Gradio: pip install 'slowfast_lara[demo]'.
"""
SWAP_EPILOG = """\
examples:
  slowfast-lara swap RUN
  slowfast-lara swap RUN --attentions lara nystrom --landmarks 8 16 32 --views 3 --videos 100
  slowfast-lara swap RUN DATA.PATH_TO_DATA_DIR lists/elsewhere --out results/swap
"""
EXPORT_EPILOG = """\
examples:
  slowfast-lara export RUN OUT                   weights, config and class names, for `load`
  slowfast-lara export RUN OUT --to onnx         with `python OUT/example.py VIDEO`
  slowfast-lara export RUN OUT --to torch VIT.APPROX_ATTN_TYPE lara VIT.APPROX_ATTN_DIM 64

OUT must not exist. The exported model is compared with the original before OUT is created.
"""
ERROR_EPILOG = """\
examples:
  slowfast-lara approximation-error RUN video.mp4 another.mp4 --out results/errors
  slowfast-lara approximation-error RUN FOLDER --attentions lara --samples 8 16 32 --budget 0.25
"""


def add_commands(root: CommandParser) -> None:
    _add_predict(root)
    _add_visualize(root)

    parser = root.add_command("demo", demo, epilog=DEMO_EPILOG)
    add_model_arguments(parser, "RUN", "the run, or a checkpoint")
    add_classes_flag(parser)
    parser.add_flag("--views", VIEWS, type=positive_int, metavar="N")
    host = "address to listen on; by default, only this machine can connect"
    parser.add_flag("--host", host, default="127.0.0.1")
    parser.add_flag("--port", "TCP port", type=int, default=7860)
    names = "further host names under which clients may open the page, e.g. of a proxy"
    parser.add_flag("--allow-host", names, nargs="+", default=[], metavar="NAME")
    number = {"type": positive_int, "metavar": "N"}
    parser.add_flag("--megabytes", "maximum size of an upload, in MB", default=200, **number)
    parser.add_flag("--minutes", "maximum duration of a video, in minutes", default=10, **number)

    parser = root.add_command("swap", swap, epilog=SWAP_EPILOG)
    add_model_arguments(parser, "RUN", "the run, or a checkpoint")
    attentions = f"{ATTENTIONS}; lara-recommended is LARA with the recommended options"
    parser.add_flag("--attentions", attentions, nargs="+", metavar="NAME")
    _add_numbers_flag(parser, "--landmarks", [8, 16, 32, 64, 128])
    parser.add_flag("--views", VIEWS, **number)
    some = "number of test videos, evenly spaced over the list (default: all)"
    parser.add_flag("--videos", some, **number)
    add_table_flag(parser)

    parser = root.add_command("export", export, epilog=EXPORT_EPILOG)
    add_model_arguments(parser, "RUN OUT", "the run, or a checkpoint; the folder to create")
    formats = "safetensors (weights for `load`), torch (a torch.export program) or onnx"
    parser.add_flag("--to", formats, default="safetensors", metavar="FORMAT")
    pushed = "also upload OUT to this model of the Hugging Face Hub (created as private)"
    parser.add_flag("--push", pushed, metavar="USER/MODEL")
    add_classes_flag(parser)

    parser = root.add_command("report", report, epilog="exit codes: 0, or 2 if RUN_DIR has no run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="OUTPUT_DIR of the run")
    parser.add_flag("--out", "output file (default: RUN_DIR/report.html)", metavar="FILE")
    add_classes_flag(parser)

    parser = root.add_command("approximation-error", approximation_error, epilog=ERROR_EPILOG)
    add_model_arguments(parser, *VIDEOS)
    _add_numbers_flag(parser, "--samples", [16, 32, 64, 128, 256])
    seeds = "number of seeds to average over, for attentions that draw random samples"
    parser.add_flag("--seeds", seeds, type=positive_int, default=5)
    parser.add_flag("--attentions", ATTENTIONS, nargs="+", metavar="NAME")
    parser.add_flag("--layer", "measure only this layer, counted from 0 (default: all)", type=int)
    budget = "recommend only settings with at most this share of the MACs of exact attention"
    parser.add_flag("--budget", budget, type=float, default=0.5, metavar="SHARE")
    some = "maximum number of videos to measure, evenly spaced over the given videos"
    parser.add_flag("--videos", some, default=8, **number)
    add_table_flag(parser)


def _add_predict(root: CommandParser) -> None:
    parser = root.add_command("predict", predict, epilog=PREDICT_EPILOG)
    add_model_arguments(parser, *VIDEOS)
    add_classes_flag(parser)
    parser.add_flag(
        "--views",
        f"{VIEWS}; N/3 clips with 3 crops each if 3 divides N, else N clips with a centre crop",
        type=int,
        metavar="N",
    )
    parser.add_flag("--json", "also write the predictions as JSON", metavar="FILE")
    parser.add_flag("--csv", "also write the predictions as CSV", metavar="FILE")
    npz = "also write the scores of all classes and the features as NumPy arrays"
    parser.add_flag("--npz", npz, metavar="FILE.npz")
    parser.add_flag(
        "--video-out",
        "also write a copy of each video, without sound, with a panel below the frames that shows "
        "the three most likely classes of the most recent window",
        metavar="FILE.mp4|FOLDER",
    )
    parser.add_flag("--stream", "predict sliding windows of each video", action="store_true")
    seconds = {"type": float, "metavar": "SECONDS"}
    window = "length of a window (default: the time span of a clip; 4 for Ssv2 models)"
    parser.add_flag("--window", window, **seconds)
    parser.add_flag("--stride", "time between window starts (default: half a window)", **seconds)
    plot = "with --stream: also plot the scores over time"
    parser.add_flag("--plot", plot, metavar="FILE.png|FOLDER")


def _add_visualize(root: CommandParser) -> None:
    parser = root.add_command("visualize", visualize, epilog=VISUALIZE_EPILOG)
    add_model_arguments(parser, "RUN VIDEO", "the run and the video")
    parser.add_flag("--out", "the output folder", required=True, metavar="FOLDER")
    point = "the query point, in pixels of the centre crop that the model sees"
    parser.add_flag("--point", point, metavar="X,Y")
    parser.add_flag("--frame", "frame of the clip, from 0 (default: the middle one)", type=int)
    moving = "instead of --point: the K patches with the most motion in the frame (default: 1)"
    parser.add_flag("--moving", moving, type=int, metavar="K")
    parser.add_flag("--layer", "layer, from 0 (default: the last)", type=int)
    parser.add_flag("--head", "attention head, from 0 (default: the mean of all heads)", type=int)
    others = "attentions to draw in addition to exact attention (default: all)"
    parser.add_flag("--estimators", others, metavar="NAME,NAME")


def _add_numbers_flag(parser: CommandParser, flag: str, default: list[int]) -> None:
    meaning = (
        "numbers of landmarks, samples, or groups of keys per frame to try; numbers that are too "
        "large for an attention are skipped"
    )
    parser.add_flag(flag, meaning, type=positive_int, nargs="+", default=default, metavar="C")


def predict(args: argparse.Namespace) -> int:
    """Print the five most likely classes of each video."""
    from slowfast_lara.inference.predict import predict_videos

    return predict_videos(args, *model_and_files(args))


def visualize(args: argparse.Namespace) -> int:
    """Draw the attention of a query point over the frames of a video."""
    from slowfast_lara.visualization.visualize import visualize

    return visualize(args, *model_and_files(args))


def demo(args: argparse.Namespace) -> None:
    """Serve a web page for a trained model.

    Upload a video to see its classes; click a patch to see its exact and estimated attention.
    """
    if not 1 <= args.port <= 65535:
        raise InputError(f"--port is {args.port}; must be 1 to 65535")
    model_files, overrides = only_model(args)
    from slowfast_lara.inference.load import load
    from slowfast_lara.inference.model import with_views
    from slowfast_lara.models.numerics import choose_threads
    from slowfast_lara.visualization.demo import serve

    model = load(*model_files, classes=args.classes, overrides=overrides)
    with_views(model.cfg, args.views)  # raises if the number of views is invalid
    choose_threads(model.cfg)
    limits = {"max_megabytes": args.megabytes, "max_minutes": args.minutes}
    names = args.allow_host
    serve(model, host=args.host, port=args.port, names=names, views=args.views, **limits)


def swap(args: argparse.Namespace) -> None:
    """Test a trained model with other attentions, without retraining.

    Prints the accuracy on the test list of the config, and the time per view.
    """
    model_files, overrides = only_model(args)
    from slowfast_lara.analysis.swap import swap

    table = swap(
        model_files,
        overrides,
        attentions=args.attentions,
        landmarks=args.landmarks,
        views=args.views,
        videos=args.videos,
    )
    print_table(table, args.out)


def export(args: argparse.Namespace) -> None:
    """Export a trained model as safetensors, torch.export program or ONNX."""
    model_files, rest, overrides = model_and_files(args)
    if len(rest) != 1:
        raise InputError(f"expected one output folder, got {len(rest)}")
    from slowfast_lara.inference.export import export
    from slowfast_lara.inference.load import load

    model = load(*model_files, device="cpu", classes=args.classes, overrides=overrides)
    print(f"{printable(rest[0])}: {export(model, rest[0], args.to, push=args.push)}")


def report(args: argparse.Namespace) -> None:
    """Write the report of a run as one HTML file.

    The file needs no server and no network.
    """
    from slowfast_lara.files import write_text
    from slowfast_lara.report.sections import report
    from slowfast_lara.runs.folder import read_run

    out = args.out or os.path.join(args.run_dir, "report.html")
    write_text(out, report(read_run(args.run_dir, args.classes)))
    print(printable(out))


def approximation_error(args: argparse.Namespace) -> None:
    """Compare each attention with exact attention in a trained model.

    Measures the error of each attention, with all values of its options `proposal`, `landmarks` and
    `biased`, on the q, k, v of the model's layers for some of the given videos. There are two
    errors: `error` weights all tokens equally, `moving` weights each token by the change of its
    pixels over time. Prints a table of all settings. For each of the two errors, recommends the
    setting with the smallest error within a cost budget, and prints its config lines. Cost is the
    number of multiply-accumulates (MACs) of the spatial stage.
    """
    model_files, videos, overrides = model_and_files(args)
    if not videos:
        raise InputError(f"no video given for the model {model_files[0]}; see --help")
    if not args.budget > 0:  # also rejects NaN
        raise InputError(f"--budget is {args.budget}; must be above 0")
    from slowfast_lara.analysis.model_errors import errors_in_model

    table = errors_in_model(
        model_files,
        overrides,
        videos,
        attentions=args.attentions,
        layer=args.layer,
        samples=args.samples,
        seeds=args.seeds,
        budget=args.budget,
        number=args.videos,
    )
    print_table(table, args.out)
