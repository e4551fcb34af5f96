#!/usr/bin/env python3
"""Find videos that do not decode: python datasets/check_videos.py OUT.txt LIST.csv ..."""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "check", *sys.argv[1:]]))
