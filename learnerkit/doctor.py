"""The command ``python -m learnerkit.doctor``, which checks the machines of a run before it."""

import sys

from learnerkit.preflight.machines import main

if __name__ == "__main__":
    sys.exit(main())
