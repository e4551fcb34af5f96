#!/usr/bin/env python3
"""Where attention goes: python tools/visualize.py --help"""

import sys

from slowfast_lara.cli.visualize import main

if __name__ == "__main__":
    sys.exit(main())
