#!/usr/bin/env python3
"""Distance from exact attention: python tools/approximation_error.py --help"""

import sys

from slowfast_lara.cli.approximation_error import main

if __name__ == "__main__":
    sys.exit(main())
