"""The console command: `slowfast-lara SUBCOMMAND ...`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

# Subcommand: the module and function (argv) -> exit code, and what it does. Modules are
# imported only when asked for: `slowfast-lara --help` answers at once.
COMMANDS = {
    "run": ("slowfast_lara.engine.command:main", "train and test a model by a config file"),
    "predict": ("slowfast_lara.seeing.predict:main", "print the likeliest classes of videos"),
    "visualize": ("slowfast_lara.seeing.visualize:main", "draw what trajectory attention sees"),
    "report": ("slowfast_lara.seeing.report:main", "write a run's report as one HTML file"),
    "benchmark": ("slowfast_lara.benchmark.command:main", "measure speed and memory"),
    "approximation-error": (
        "slowfast_lara.benchmark.approximation:main",
        "measure how far each estimator is from exact attention",
    ),
    "compare-attention": (
        "slowfast_lara.cli:compare_attention",
        "train and test every attention on one set (needs a checkout)",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"error: unknown subcommand {name!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    # argparse takes the program's name from here.
    sys.argv[0] = f"slowfast-lara {name}"
    module, function = COMMANDS[name][0].split(":")
    return getattr(importlib.import_module(module), function)(rest)


def compare_attention(argv: Sequence[str]) -> int:
    """Its configs and its tools are no part of the package."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "tools" / "compare_attention.py").is_file():
        print(
            "error: compare-attention needs a checkout, installed by `pip install -e .`",
            file=sys.stderr,
        )
        return 2
    from slowfast_lara.study.command import main as study

    return study(checkout, argv)


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: slowfast-lara SUBCOMMAND ...",
            "",
            *lines,
            "",
            "`slowfast-lara SUBCOMMAND --help` says more.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
