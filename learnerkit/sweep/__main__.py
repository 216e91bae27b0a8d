"""``python -m learnerkit.sweep``."""

import sys

from learnerkit.sweep.cli import main

if __name__ == "__main__":
    sys.exit(main())
