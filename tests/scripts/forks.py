"""Children forked right after a collective come to life, as the workers of a loader must."""

import os
import sys
import time

from checking import leave, run

from learnerkit import world

FORKS, PATIENCE = int(sys.argv[1]), 10.0


def check_forks():
    for number in range(FORKS):
        for _ in range(3):
            world.all_gather({"a": number})
        child = os.fork()
        if child == 0:
            os._exit(0)
        end = time.monotonic() + PATIENCE
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(child, 9)
                raise AssertionError(f"child {number} did not start")
            time.sleep(0.0002)


if __name__ == "__main__":
    run([check_forks])
    leave()
