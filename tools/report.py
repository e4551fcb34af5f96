#!/usr/bin/env python3
"""Report of a run as one HTML file: python tools/report.py RUN_DIR"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
