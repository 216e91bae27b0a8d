"""Two ranks wait, with a forked DataLoader worker, a forked child and another program, until they are killed."""

import os
import subprocess
import time

if os.environ["RANK"] == "0":
    from torch.utils.data import DataLoader

    if os.fork() == 0:
        time.sleep(60)
    batches = iter(DataLoader(list(range(1000)), num_workers=1, multiprocessing_context="fork"))
    next(batches)
else:
    subprocess.Popen(["sleep", "60"])
os.write(1, b"ready\n")
time.sleep(60)
