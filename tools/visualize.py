#!/usr/bin/env python3
"""Pictures of attention: python tools/visualize.py --help"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["visualize", *sys.argv[1:]]))
