#!/usr/bin/env python3
"""A run as one HTML file: python tools/report.py RUN_DIR"""

import sys

from slowfast_lara.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
