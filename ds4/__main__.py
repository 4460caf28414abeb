"""`python -m ds4` is the command `ds4`."""

import sys

from ds4.cli import main

sys.exit(main())
