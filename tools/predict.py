#!/usr/bin/env python3
"""Most likely classes of videos: python tools/predict.py --help"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["predict", *sys.argv[1:]]))
