"""The doctor where something is wrong. Argument: what; the launcher starts this in place of the doctor itself."""

import os
import socket
import sys
import time
from types import SimpleNamespace

from learnerkit.preflight import facts, machines

RANK = int(os.environ["RANK"])


def other_machine(folder):
    """Rank 1 is on a machine of its own, in `folder`, where everything differs, and the all-reduce is wrong."""
    from learnerkit.preflight import joint_checks, local_checks

    socket.gethostname = lambda: f"host{RANK}\x1b[2J"
    if RANK == 1:
        os.chdir(folder)
        local_checks.__version__ = "0.0.9"
        os.sched_getaffinity = lambda pid: 1 / 0
        ahead = SimpleNamespace(**vars(time))
        ahead.time = lambda: time.time() + 5
        joint_checks.time = ahead
    import torch.distributed as dist

    reduce = dist.all_reduce

    def off_by_one(x):
        reduce(x)
        x += RANK

    dist.all_reduce = off_by_one


def no_torch():
    if RANK == 1:
        sys.modules["torch"] = None


def silent():
    """Rank 1 does not come."""
    if RANK == 1:
        machines.introduce = lambda rank: time.sleep(600)
    else:
        facts.Board.seconds = 3.0


def alone_in_the_dark():
    """Nobody listens where the ranks are to meet."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    import torch.distributed  # noqa: F401 - it serves the store at the port that is set now

    facts.REACH_SECONDS = 2.0
    os.environ["MASTER_PORT"] = "9"


def stuck(topic):
    """Rank 1 does not come back from `topic`."""
    if topic == "all-reduce":
        facts.Board.seconds = 3.0
    from learnerkit.preflight.joint_checks import JOINT

    if RANK == 1:
        JOINT[topic] = (lambda _: time.sleep(600), *JOINT[topic][1:])
    elif topic == "file system":
        facts.Board.gather = told(facts.Board.gather)


def told(gather):
    def gather_and_tell(board, topic, *args):
        if topic == "looked":
            print("looking", flush=True)
        return gather(board, topic, *args)

    return gather_and_tell


def fails(topic):
    """A check of rank 1 fails."""
    from learnerkit.preflight.joint_checks import JOINT

    if RANK == 1:
        JOINT[topic] = (lambda _: [][1], *JOINT[topic][1:])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    sys.exit(machines.examine())
