"""`python -m harness.chaos`."""

import sys

from harness.chaos.command import main

if __name__ == "__main__":
    sys.exit(main())
