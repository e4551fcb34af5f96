"""The console command: `slowfast-lara SUBCOMMAND ...`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from slowfast_lara import __version__
from slowfast_lara.errors import BAD_INPUT, DONE, print_error

# What each does; the module commands/NAME.py has its main(argv) -> exit code.
COMMANDS = {
    "run": "train and test a model by a config file",
    "predict": "print the likeliest classes of videos",
    "visualize": "draw where the attention goes",
    "demo": "serve a page to play with a trained model",
    "swap": "test a trained model with other attentions in it",
    "export": "write a trained model for other programs: safetensors, torch, ONNX",
    "report": "write a run's report as one HTML file",
    "configs": "list the shipped configs, and write one out to edit",
    "data": "make lists, check videos, make a synthetic set",
    "benchmark": "measure speed and memory",
    "approximation-error": "measure how far each estimator is from exact attention",
    "compare-attention": "train and test every attention on one set",
    "compare-recipes": "fine-tune on few clips by several recipes",
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return DONE if argv else BAD_INPUT
    if argv[0] == "--version":
        print(__version__)
        return DONE
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(COMMANDS)}"
        print_error(f"unknown subcommand {name!r}{hint}")
        return BAD_INPUT
    # argparse takes the program's name from here.
    sys.argv[0] = f"slowfast-lara {name}"
    module = importlib.import_module(f"slowfast_lara.cli.{name.replace('-', '_')}")
    return module.main(rest)


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {meaning}" for name, meaning in COMMANDS.items()]
    head, foot = (
        "usage: slowfast-lara SUBCOMMAND ...",
        "`slowfast-lara SUBCOMMAND --help` says more.",
    )
    return "\n".join([head, "", *lines, "", foot])
