#!/usr/bin/env python3
"""Write lists of SSv2: python datasets/build_ssv2_lists.py ANNOTATIONS FOLDER OUT"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "lists-ssv2", *sys.argv[1:]]))
