"""The subcommands of `slowfast-lara` as functions of their arguments; each returns an exit code."""

from __future__ import annotations

from functools import partial

from slowfast_lara.cli import main


def _call(name: str, argv: list[str]) -> int:
    return main([name, *argv])


approximation_error = partial(_call, "approximation-error")
benchmark = partial(_call, "benchmark")
configs = partial(_call, "configs")
data = partial(_call, "data")
demo = partial(_call, "demo")
export = partial(_call, "export")
predict = partial(_call, "predict")
report = partial(_call, "report")
run = partial(_call, "run")
swap = partial(_call, "swap")
visualize = partial(_call, "visualize")
