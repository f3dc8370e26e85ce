"""`python -m shardfn` is `shardfn`."""

import sys

from shardfn.cli import main

sys.exit(main())
