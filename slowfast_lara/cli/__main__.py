"""`python -m slowfast_lara.cli`: the console command without its script."""

import sys

from slowfast_lara.cli import main

sys.exit(main())
