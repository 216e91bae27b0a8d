"""The program that ends what the ranks have started when their launcher is killed, which cannot do it any more.

The kernel ends the ranks themselves (see rank_main.py), but not the programs that a script has started. Each rank is
the leader of a process group, to which these belong, and one guard for all ranks of a launcher knows the groups: they
are its arguments. It is in a separate session, so that what is sent to the launcher's group does not reach it.
"""

import os
import signal
import sys


def main() -> None:
    """Wait until the launcher is gone, and kill the groups that are left."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # a job manager may send them to all processes
        signal.signal(signum, signal.SIG_IGN)
    groups = set(sys.argv[1:])
    for line in sys.stdin:  # This group has ended, and its number may be used again.
        groups.discard(line.strip())
    for group in groups:  # the pipe is closed: the launcher has ended
        try:
            os.killpg(int(group), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # The group has no process left.
            pass


if __name__ == "__main__":
    main()
