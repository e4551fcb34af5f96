#!/usr/bin/env python3
"""Error of each attention to exact attention: python tools/approximation_error.py --help"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["approximation-error", *sys.argv[1:]]))
