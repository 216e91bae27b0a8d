"""ParallelCallback: on fewer than two GPUs, and, where a machine has them, on several."""

import warnings

import pytest
import torch
from conftest import make_dls, make_learner
from torch import nn

from learnerkit import Callback, ParallelCallback, unwrap


def test_with_fewer_than_two_gpus_it_says_so_once_and_trains(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    learn, alone = make_learner(), make_learner()
    alone.fit(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with learn.parallel_ctx() as inner:
            assert inner is learn
            learn.fit(1)
            learn.fit(1)
    assert len([w for w in caught if "DataParallel needs two GPUs" in str(w.message)]) == 1
    assert not any(isinstance(cb, ParallelCallback) for cb in learn.cbs)
    assert learn.recorder.history


def test_to_and_detach():
    learn = make_learner()
    assert any(isinstance(cb, ParallelCallback) for cb in learn.to_parallel([0, 1]).cbs)
    assert not any(isinstance(cb, ParallelCallback) for cb in learn.detach_parallel().cbs)


def test_a_gpu_twice_is_refused():
    with pytest.raises(ValueError, match=r"device_ids=\[0, 0\]"):
        ParallelCallback([0, 0])


class Wrapped(nn.DataParallel):
    """DataParallel as it is without GPUs: it calls its module. Stands in for two GPUs."""

    def __init__(self, module, device_ids=None):
        nn.Module.__init__(self)
        self.module, self.device_ids, self.used = module, device_ids, 0

    def forward(self, *args, **kwargs):
        self.used += 1
        return self.module(*args, **kwargs)


@pytest.fixture
def two_gpus(monkeypatch):
    """As if there were two GPUs, for the wrapping alone."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("learnerkit.parallel.data_parallel.can_split", lambda device, ids: True)
    monkeypatch.setattr(nn, "DataParallel", Wrapped)


def test_the_model_is_wrapped_for_the_fit_and_saved_plain(two_gpus, tmp_path):
    learn, seen = make_learner(path=tmp_path), []
    model = learn.model

    def look(cb):
        seen.append(type(cb.model))
        cb.learn.save("inside")

    with learn.parallel_ctx():
        learn.fit(1, cbs=Callback(after_batch=look))
        assert learn.model is model
        learn.save("after")
    assert set(seen) == {Wrapped}
    for name in ("inside", "after"):
        weights = torch.load(tmp_path / "models" / f"{name}.pth", weights_only=True)["model"]
        assert weights.keys() == model.state_dict().keys()
    make_learner(path=tmp_path).load("inside")
    assert unwrap(Wrapped(model)) is model


def test_the_model_is_unwrapped_after_an_error(two_gpus):
    def fail(cb):
        raise KeyboardInterrupt

    learn = make_learner()
    model = learn.model
    with learn.parallel_ctx(), pytest.raises(KeyboardInterrupt):
        learn.fit(1, cbs=Callback(after_pred=fail))
    assert learn.model is model
    learn.fit(1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one():
    one, two = (make_learner(make_dls(device="cuda:0")) for _ in range(2))
    one.fit(2)
    with two.parallel_ctx():
        two.fit(2)
    torch.testing.assert_close(two.recorder.values, one.recorder.values, rtol=1e-5, atol=1e-5)
