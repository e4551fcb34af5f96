#!/usr/bin/env python3
"""Train and test the paper's attentions: python tools/compare_attention.py [--ablation]"""

import sys
from pathlib import Path

from slowfast_lara.study.command import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
