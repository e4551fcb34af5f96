#!/usr/bin/env python3
"""Write lists of your own videos: python datasets/build_folder_lists.py VIDEOS OUT"""

import sys

from slowfast_lara.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "lists-folder", *sys.argv[1:]]))
