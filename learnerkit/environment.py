"""The environment of the processes of one machine that form a run, as torch and its users read it.

It uses the standard library only, so that the launcher starts without importing torch.
"""

import re
import signal
import sys
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def rank_environment(
    environ: Mapping[str, str], number: int, nproc: int, port: int, gpus: str | None = None
) -> dict[str, str]:
    """Return the environment of one rank: a copy without what another launcher may have left in it.

    Args:
        environ: what it is a copy of.
        number, nproc: which rank of how many.
        port: where the store in which they meet listens.
        gpus: CUDA_VISIBLE_DEVICES; `None`: as it is.
    """
    stale = re.compile("TORCHELASTIC_|GROUP_(RANK|WORLD_SIZE)|ROLE_(RANK|WORLD_SIZE|NAME)|NODE_RANK")
    env = {name: value for name, value in environ.items() if not stale.match(name)}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        env.setdefault(name, LOOPBACK_INTERFACE)
    if nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    return env | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served already: rank 0 too only connects to it
        "TORCHELASTIC_RESTART_COUNT": "0",  # older versions of torch look for it then
    }


def signal_name(signum: int) -> str:
    """Return SIGTERM for 15; real-time signals have no names."""
    return signal.Signals(signum).name if signum in iter(signal.Signals) else "real-time signal"


def killed_by(signum: int) -> str:
    """Say in a few words what ended a process that a signal has killed."""
    if signum == signal.SIGKILL:
        return "was killed by signal 9 (SIGKILL), as the kernel does when memory runs out (see dmesg),"
    return f"was killed by signal {signum} ({signal_name(signum)})"
