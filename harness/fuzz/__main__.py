"""`python -m harness.fuzz`."""

import sys

from harness.fuzz.command import main

if __name__ == "__main__":
    sys.exit(main())
