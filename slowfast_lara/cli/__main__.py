"""Makes `python -m slowfast_lara.cli` equivalent to `slowfast-lara`."""

import sys

from slowfast_lara.cli import main

sys.exit(main())
