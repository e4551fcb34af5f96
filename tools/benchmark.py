#!/usr/bin/env python3
"""Speed and memory: python tools/benchmark.py --help"""

import sys

from slowfast_lara.cli.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
