"""What a step needs of the memory on two ranks: DDP has copies of the gradients."""

import contextlib
import io

import pytest
import torch
from helpers import read_report
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, Learner, distributed
from learnerkit.inspection.undoing import held_tensors
from learnerkit.preflight.prediction import Prediction, predict_memory
from learnerkit.torch_internals import LiveBytes

pytestmark = pytest.mark.ranks(2)


class Asks(Callback):
    """Predicts at the first step, and counts the live bytes of those after it."""

    def __init__(self):
        super().__init__()
        self.live, self.found = LiveBytes(), None

    def before_train(self):
        self.live.note(held_tensors(self.learn.model))
        self.live.__enter__()

    def before_batch(self):
        if self.iter == 3 and distributed.rank() == 1:  # the other rank need not come
            self.live.__exit__(None, None, None)
            self.found = predict_memory(self.learn)
            self.live.__enter__()
        if self.iter == 2:  # the first steps compare what the ranks have
            self.live.peak = self.live.now

    def cleanup_train(self):
        self.live.__exit__(None, None, None)


def learner():
    model = nn.Sequential(nn.Linear(30, 400), nn.ReLU(), nn.Linear(400, 10))
    data = TensorDataset(torch.randn(64, 30), torch.randint(10, (64,)))
    return Learner(DataLoaders.from_datasets(data, bs=8, device="cpu"), model, nn.CrossEntropyLoss())


def test_copies_of_gradients_count():
    learn, asks = learner(), Asks()
    with learn.distrib_ctx(), learn.no_logging(), learn.no_bar():
        learn.fit(1, cbs=asks)
    if distributed.rank() == 1:
        assert isinstance(asks.found, Prediction), asks.found
        assert asks.found.peak == pytest.approx(asks.live.peak, rel=0.1)
        assert asks.found.peak > predict_memory(learn).peak + 0.9 * asks.found.gradients


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "1GiB"])
def test_of_a_sharded_model_the_parts_are_named_and_no_peak(given):
    learn = learner()
    with contextlib.redirect_stdout(io.StringIO()) as text, learn.distrib_ctx(shard=True):
        assert learn.check(memory=given)
    if distributed.rank() == 0:
        mark, found = read_report(text.getvalue())[0]["memory"]
        assert mark == ("--" if given else "ok")
        assert "on this rank, of 64.1 KB, 64.1 KB, 128 KB that are divided among 2 ranks" in found
        assert ("is not predicted for a sharded model" in found) is bool(given)


def test_a_batch_that_does_not_fit_on_ranks():
    learn = learner()
    with contextlib.redirect_stdout(io.StringIO()) as text, learn.distrib_ctx():
        assert not learn.check(memory=300_000)
    if distributed.rank() == 0:
        mark, found = read_report(text.getvalue())[0]["memory"]
        assert mark == "!!"
        assert "8 samples take 334 KB" in found
