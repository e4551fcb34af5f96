"""`python -m slowfast_lara.cli`: the same as `slowfast-lara`."""

import sys

from slowfast_lara.cli import main

sys.exit(main())
