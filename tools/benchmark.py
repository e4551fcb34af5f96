"""Measure speed and memory: see `--help`."""

import sys

from slowfast_lara.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
