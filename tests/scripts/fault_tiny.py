"""One sample for two ranks, with drop_last off and on; each rank prints what came of it, as a line of JSON."""

import json
import os
import time
import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import DataLoaders, Learner, mae


def trial(bs: int, drop_last: bool) -> dict:
    """Train and evaluate on the one sample."""
    data = TensorDataset(torch.ones(1, 4), torch.ones(1, 1))
    found, began = {"rank": os.environ["RANK"], "bs": bs, "drop_last": drop_last, "error": ""}, time.monotonic()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            dls = DataLoaders.from_datasets(data, data, bs=bs, drop_last=drop_last, device="cpu")
            learn = Learner(dls, nn.Linear(4, 1), nn.MSELoss(), metrics=mae)
            with learn.no_logging(), learn.distrib_ctx():
                learn.fit(2)
                found["told after"] = time.monotonic() - began
                with torch.no_grad():
                    exact = (learn.model(data[0][0]) - 1).abs().item()
                found["counted"] = len(learn.get_preds()[0])
                found["exact"] = abs(learn.validate()[1] - exact) < 1e-6
        except ValueError as error:
            found |= {"error": str(error), "told after": time.monotonic() - began}
    return found | {"warnings": [str(warning.message) for warning in seen]}


torch.optim.SGD([torch.ones(1)])  # torch imports its compiler with the first optimizer, which is no part of the trials
for bs, drop_last in ((4, False), (4, True), (1, False), (1, True)):
    os.write(1, json.dumps(trial(bs, drop_last)).encode() + b"\n")  # in one piece, whatever the other rank prints
