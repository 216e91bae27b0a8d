"""Say "ready", wait for a signal, and answer it as the first argument says."""

import os
import signal
import sys
import time
from pathlib import Path

how = sys.argv[1]
heard = []


def tell(line):
    os.write(1, f"{line}\n".encode())  # in one piece, whatever the other ranks print


if how != "plain":  # "save": note the signal and end in order; "deaf": note it and go on; "brief": until it is enough
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda number, frame: heard.append(signal.Signals(number).name))
if how == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
tell("ready")
end = time.monotonic() + 60.0
while time.monotonic() < end and (how == "deaf" or "SIGTERM" not in heard):
    if how == "brief" and Path("enough").exists():
        break
    time.sleep(0.01)
    if how == "save" and heard == ["SIGUSR1"]:
        heard.append("saved")
        tell("saved, going on")
tell(" ".join(["heard", *heard]))
sys.exit(143 if heard else 0)
