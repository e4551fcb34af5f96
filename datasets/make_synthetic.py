#!/usr/bin/env python3
"""Make a synthetic dataset: python datasets/make_synthetic.py OUT --classes 4"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "synthetic", *sys.argv[1:]]))
