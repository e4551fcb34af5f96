#!/usr/bin/env python3
"""Write lists of Kinetics: python datasets/build_kinetics_lists.py VIDEOS OUT --train FILE"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "lists-kinetics", *sys.argv[1:]]))
