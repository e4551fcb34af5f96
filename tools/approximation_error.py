#!/usr/bin/env python3
"""Approximation error of each attention: python tools/approximation_error.py --help"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["approximation-error", *sys.argv[1:]]))
