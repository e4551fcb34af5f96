"""Error of every estimator to exact attention: see `--help`."""

import sys

from slowfast_lara.benchmark.approximation import main

if __name__ == "__main__":
    sys.exit(main())
