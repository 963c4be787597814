"""`python -m octablox` is `octablox`."""

import sys

from octablox.cli import main

if __name__ == "__main__":
    sys.exit(main())
