#!/usr/bin/env python3
"""Training and testing: python tools/run_net.py --cfg FILE.yaml [KEY VALUE ...]"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
