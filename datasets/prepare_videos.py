#!/usr/bin/env python3
"""Transcode videos for fast reading: python datasets/prepare_videos.py VIDEOS OUT"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "prepare", *sys.argv[1:]]))
