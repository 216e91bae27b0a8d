"""A run whose checkpoints are in an object store.

    store_run.py URL EPOCHS KILL_AT [--async]

With `KILL_AT` rank 1 is killed in its first attempt, in the middle of its upload of that number. Rank 0 prints a digest
of the weights, and the objects in the store.
"""

import hashlib
import os
import signal
import sys
import threading
import time

import fsspec
import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import CheckpointCallback, DataLoaders, Learner, distributed, load_learner, set_seed
from learnerkit.stores.paths import StorePath

URL, EPOCHS, KILL_AT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
upload, uploads = StorePath.upload, 0


def killed(self, file):
    """Upload, or be killed while the bytes are on their way."""
    global uploads
    uploads += 1
    if uploads == KILL_AT:
        threading.Timer(0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()
        upload(self, file)
        time.sleep(60)
    upload(self, file)


if KILL_AT and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    StorePath.upload = killed

torch.set_num_threads(1)
set_seed(42)
x = torch.randn(128, 8)
model = nn.Sequential(nn.Linear(8, 300), nn.Dropout(0.2), nn.Linear(300, 1))
dls = DataLoaders.from_datasets(TensorDataset(x, x.sum(1, keepdim=True)), bs=16, device="cpu")
learn = Learner(dls, model, nn.MSELoss())
callback = CheckpointCallback(f"{URL}/run", every=3, resume=True, async_save="--async" in sys.argv)
with learn.no_bar(), learn.distrib_ctx():
    learn.fit_one_cycle(EPOCHS, 1e-2, cbs=callback)
saved = learn.save(f"{URL}/weights.safetensors")
learn.load(f"{URL}/weights.safetensors", with_opt=False)
learn.export(f"{URL}/model.pt2")
assert isinstance(load_learner(f"{URL}/model.pt2"), Learner)
if distributed.is_main():
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()
    system, path = fsspec.url_to_fs(URL)
    print("digest", digest, saved)
    print("objects", *sorted(each.removeprefix(f"{path}/") for each in system.find(path)))
