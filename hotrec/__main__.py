"""``python -m hotrec``: the same program as ``hotrec``."""

import sys

from hotrec.cli import main

if __name__ == "__main__":
    sys.exit(main())
