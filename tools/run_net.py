#!/usr/bin/env python3
"""Train and test: python tools/run_net.py --cfg FILE.yaml [KEY VALUE ...]"""

import sys

from slowfast_lara.cli.run import main

if __name__ == "__main__":
    sys.exit(main())
