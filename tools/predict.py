#!/usr/bin/env python3
"""The likeliest classes of videos: python tools/predict.py --help"""

import sys

from slowfast_lara.cli.predict import main

if __name__ == "__main__":
    sys.exit(main())
