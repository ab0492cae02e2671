"""`python -m harness.turns`."""

import sys

from harness.turns.command import main

if __name__ == "__main__":
    sys.exit(main())
