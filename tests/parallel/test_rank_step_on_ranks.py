"""The step of several ranks: which files a batch passes."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import make_classes
from torch import nn
from torch.utils.data import DataLoader

import learnerkit
from learnerkit import DataLoaders, Learner
from learnerkit.parallel.loaders import RankLoader

pytestmark = pytest.mark.ranks(2)

PACKAGE = str(Path(learnerkit.__file__).parent)


class Sgd(torch.optim.SGD):
    """SGD that ends the look at the files."""

    def step(self, closure=None):
        sys.setprofile(None)
        return super().step(closure)


def test_a_batch_passes_six_files_between_its_loader_and_the_step(monkeypatch):
    seen = set()

    def look(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.add(frame.f_code.co_filename.removeprefix(f"{PACKAGE}/"))

    batches = RankLoader.__iter__

    def read(self):
        for i, batch in enumerate(batches(self)):
            if i == 2:  # the first batch is looked at more closely
                sys.setprofile(look)
            yield batch
            sys.setprofile(None)

    monkeypatch.setattr(RankLoader, "__iter__", read)
    dls = DataLoaders(DataLoader(make_classes(32), 4), device="cpu")
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    learn = Learner(dls, model, nn.CrossEntropyLoss(), opt_func=Sgd, lr=0.1)
    with learn.no_logging(), learn.distrib_ctx():
        learn.fit(1)
    assert {"learner.py", "parallel/agreement.py", "parallel/rank_step.py"} <= seen
    assert len(seen) <= 6, seen
