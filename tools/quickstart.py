#!/usr/bin/env python3
"""Quick start without a GPU and without data: python tools/quickstart.py [FOLDER]

Makes a small set of synthetic videos, trains a small Motionformer with LARA, tests it with 30 views
of each video, and prints the accuracy, the paths of the output files, and commands to try next.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from slowfast_lara.cli.parser import CommandParser

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "quick" / "lara.yaml"
SET = ("--classes", "4", "--train", "2048", "--val", "128", "--test", "128", "--size", "64")


def main(folder: Path) -> int:
    videos, output = folder / "videos", folder / "output"
    started = time.monotonic()
    for command in (
        ["data", "synthetic", videos, *SET],
        ["run", "--cfg", CONFIG, "DATA.PATH_TO_DATA_DIR", videos, "OUTPUT_DIR", output],
    ):
        if code := run_command(*map(str, command)):
            return code
    results = json.loads((output / "test_results.json").read_text())
    classes = len(json.loads((videos / "classes.json").read_text()))
    views = results["videos"][0]["num_views"]
    print(f"""
Top-1 accuracy {results["top1_acc"]:.1f} % on {results["num_videos"]} videos, {views} views \
each (chance: {100 / classes:.1f} %), in {time.monotonic() - started:.0f} s.
  videos and lists   {videos}
  config             {CONFIG}
  checkpoint         {results["checkpoint"]}
  log                {output / "stdout.log"}
  predictions        {output / "test_results.json"}

Next: predict a video, draw its attention, and write a report of the run:""")
    video = results["videos"][0]["path"]
    print_command("predict", output, video)
    print_command("visualize", output, video, "--out", folder / "look")
    print_command("report", output)
    print("""
In the picture of `visualize`, a line shows the centre of each attention. With LARA and the paper's
settings, this line can drift over the background while the line of exact attention follows the
object. A frame of this small model has 16 keys, so attentions with 16 groups of keys (merged, tome,
pooled, eva) equal exact attention.""")
    return 0


def run_command(*words: str) -> int:
    """Run a subcommand of slowfast-lara; after Ctrl-C, wait until it has saved a checkpoint."""
    process = subprocess.Popen([sys.executable, "-m", "slowfast_lara.cli", *words])
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C reaches the subcommand, too
            return process.wait()


def print_command(tool: str, *arguments: object) -> None:
    """Print a command of tools/; Python and the tool have paths relative to the current folder."""
    programs = [os.path.relpath(sys.executable), os.path.relpath(ROOT / "tools" / f"{tool}.py")]
    print("  " + shlex.join([*programs, *map(str, arguments)]))


if __name__ == "__main__":
    parser = CommandParser(description=__doc__)
    parser.add_argument("folder", nargs="?", metavar="FOLDER", default="runs/quickstart")
    sys.exit(main(Path(parser.parse_args().folder)))
