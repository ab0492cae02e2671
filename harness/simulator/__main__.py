"""`python -m harness.simulator`."""

import sys

from harness.simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
