"""The command ``comera``, as ``python -m comera``."""

import sys

from comera.recipes.cli import main

if __name__ == "__main__":
    sys.exit(main())
