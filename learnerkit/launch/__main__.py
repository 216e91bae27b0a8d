"""``python -m learnerkit.launch``."""

import sys

from learnerkit.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
