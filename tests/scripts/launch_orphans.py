"""Have two ranks wait, one of them with a forked DataLoader worker and a forked child, until somebody kills them."""

import os
import time

if os.environ["RANK"] == "0":
    from torch.utils.data import DataLoader

    if os.fork() == 0:
        time.sleep(60)
    batches = iter(DataLoader(list(range(1000)), num_workers=1, multiprocessing_context="fork"))
    next(batches)
print("ready", flush=True)
time.sleep(60)
