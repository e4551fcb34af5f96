#!/usr/bin/env python3
"""Train and test the paper's attentions: python tools/compare_attention.py --help"""

import sys

from slowfast_lara.cli.compare_attention import main

if __name__ == "__main__":
    sys.exit(main())
