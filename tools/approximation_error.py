"""Mean squared error of every estimator to exact attention, over its samples."""

from __future__ import annotations

import argparse
import sys

from slowfast_lara.benchmark import approximation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    approximation.add_arguments(parser)
    args = parser.parse_args()
    try:
        errors = approximation.run(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(errors.table())
    if args.out:
        errors.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
