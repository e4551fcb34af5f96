"""slowfast-lara report, tools/report.py: a run as one HTML file."""

from __future__ import annotations

import os
from collections.abc import Sequence

from slowfast_lara.cli.shared import OneLineParser, add_classes_argument
from slowfast_lara.errors import printable, run_with_exit_code


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        description="Write a run's report: one HTML file that needs no server and no network.",
        epilog="exit code: 0, or 2 if there is no run to report on.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's OUTPUT_DIR")
    parser.add_argument("--out", metavar="FILE", help="default: RUN_DIR/report.html")
    add_classes_argument(parser)
    args = parser.parse_args(argv)

    def command() -> None:
        from slowfast_lara.files import write_text
        from slowfast_lara.report.sections import report
        from slowfast_lara.runs.folder import read_run

        out = args.out or os.path.join(args.run_dir, "report.html")
        write_text(out, report(read_run(args.run_dir, args.classes)))
        print(printable(out))

    return run_with_exit_code(command)
