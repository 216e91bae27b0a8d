"""learn.check(memory=...) says whether a batch fits, and an error of a full memory what would make it fit."""

import gc
import re
import weakref

import pytest
import torch
from helpers import make_learner, raises, read_report
from torch import nn

from learnerkit import (
    ActivationCheckpointing,
    Callback,
    DataLoaders,
    GradientAccumulation,
    Learner,
    MixedPrecision,
    SplitBatch,
)
from learnerkit.preflight import memory
from learnerkit.preflight.memory import bytes_of
from learnerkit.preflight.prediction import predict_memory

MB = 2**20


def learner(model=None, bs=64, blocks=2, **kwargs):
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(blocks)]
    batch = torch.randn(bs, 10, 64), torch.randn(bs, 10, 64)
    return Learner(
        DataLoaders([batch] * 2, [batch], device="cpu"), model or nn.Sequential(*blocks), nn.MSELoss(), **kwargs
    )


def said(capsys, learn, well, memory=None):
    """(mark, text) of the memory."""
    assert learn.check(memory=memory) is well
    return read_report(capsys.readouterr().out)[0]["memory"]


GIVEN = {"24GiB": 24 * 2**30, "24 GB": 24 * 10**9, "1.5MiB": 3 * 2**19, " 3MB ": 3 * 10**6, 5: 5, None: None}


@pytest.mark.parametrize("given", GIVEN)
def test_memory_is_a_text_with_a_unit_or_a_number_of_bytes(given):
    assert bytes_of(given) == GIVEN[given]


@pytest.mark.parametrize("given", ["24", "24 G", "GiB", "-1GiB", "0MB", 0, -5, ""])
def test_another_text_or_number_is_refused_before_a_step(given):
    learn = make_learner()
    with raises(ValueError, f"got memory={given!r}; it is a number above 0 with one of the units GiB, GB, MiB, MB"):
        learn.check(memory=given)


@pytest.mark.parametrize("given", [2.5, True, b"24GiB"])
def test_another_type_is_refused(given):
    with raises(TypeError, f"got memory={given!r}; it is a text such as '24GiB'"):
        make_learner().check(memory=given)


def test_a_batch_that_fits_is_shown_with_its_parts(capsys):
    learn = learner()
    found = predict_memory(learn)
    mark, text = said(capsys, learn, True, "24GiB")
    assert mark == "ok"
    assert re.match(r"64 samples take \S+ MB: parameters 258 KB, gradients 258 KB, optimizer 517 KB, activations", text)
    assert f"up to {found.largest(24 * 2**30):,} fit in 24GiB (8 % assumed for fragmentation)" in text
    assert "fit in" in said(capsys, learn, True)[1]  # the memory of this machine
    assert said(capsys, learner(bs=1), True, "24GiB")[1].startswith("1 sample takes ")


def test_a_batch_that_does_not_fit(capsys, monkeypatch):
    learn = learner(blocks=4)
    found = predict_memory(learn)
    room = int(found.at(40) / 0.92) + 1
    mark, text = said(capsys, learn, False, room)
    assert mark == "!!"
    assert "does not fit in" in text
    split = predict_memory(learn, cbs=[GradientAccumulation(n_batches=2)])
    parts = int(re.search(r"SplitBatch\((\d+)\)", text)[1])
    assert split.fits(room, -(-64 // parts))
    assert not split.fits(room, -(-64 // (parts - 1)))
    again = predict_memory(learn, cbs=[ActivationCheckpointing()])
    assert ("ActivationCheckpointing() (" in text) is again.fits(room, 64) is True
    assert "batches of at most 40 (" in text
    monkeypatch.setattr(memory, "memory_of", lambda device: room)
    assert said(capsys, learn, True)[0] == "??"  # it has just run


def test_a_batch_that_split_batch_will_take_in_parts(capsys):
    mark, text = said(capsys, learner(cbs=SplitBatch()), True, "3MB")
    assert mark == "ok"
    assert re.search(r"in 3MB \(8 % assumed for fragmentation\) SplitBatch takes them in \d+ parts", text)


@pytest.mark.slow
def test_what_is_switched_off_does_not_count_and_is_advised(capsys):
    learn = learner(cbs=[SplitBatch(), MixedPrecision("bf16")])
    for cb in (learn.split_batch, learn.mixed_precision):
        cb.run = False
    mark, text = said(capsys, learn, False, "4MB")
    assert mark == "!!"
    assert "SplitBatch(" in text
    assert "learn.to_bf16()" in text


@pytest.mark.slow
def test_a_model_that_nothing_makes_fit_is_told(capsys):
    assert "nothing that is known makes it fit" in said(capsys, learner(nn.Linear(64, 64)), False, 1000)[1]
    wide = learner(nn.Sequential(nn.Linear(64, 5000), nn.Linear(5000, 64)), bs=2)
    static = sum(predict_memory(wide)[:3])
    text = said(capsys, wide, False, static)[1]
    assert "distrib_ctx(shard=True) on 2 ranks" in text
    assert "Checkpointing" not in text


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)

    def forward(self, x):
        if len(x) not in (64, 21, 43):  # another size fails, in real steps, too
            raise ValueError("no such size")
        return self.body(x) if x.sum() < 1e9 else x


def test_what_is_not_predicted_is_not_checked(capsys):
    mark, text = said(capsys, learner(Asks()), True, "24GiB")
    assert mark == "--"
    assert text.startswith("not checked, as what a step needs cannot be predicted: DataDependentOutputException")


class Large(nn.Module):
    """Activations of 16 MB a sample; on real batches above some size the memory is full."""

    most = 8

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.held = None

    def forward(self, x):
        x = self.body(x)
        if type(x.detach()) is torch.Tensor and len(x) > self.most:
            mine = torch.ones(1000)
            Large.held = weakref.ref(mine)
            torch.empty(2**50, dtype=torch.uint8) + mine
        return (x.unsqueeze(-1).expand(-1, -1, -1, 3277) * 1).mean(-1)


def test_a_full_memory_of_the_host_is_explained(monkeypatch):
    monkeypatch.setattr(memory, "memory_of", lambda device: 300 * MB)
    learn = learner(Large())
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        learn.fit(1)
    (note,) = (n for n in caught.value.__notes__ if n.startswith("the memory:"))
    assert re.match(r"the memory: 64 samples take 1\S* GB: parameters 16.2 KB, gradients 16.2 KB, optimizer 3", note)
    assert "activations 16 MB a sample, of 300 MB; it fits with SplitBatch(4) (about 256 MB)" in note
    assert ", or batches of at most 17 (about 272 MB) (errors" in note
    assert "errors.html#out-of-memory" in note
    gc.collect()
    assert Large.held() is None  # though the error still is there
    with pytest.raises(RuntimeError) as caught:
        learn.validate()
    assert "parameters 16.2 KB" in caught.value.__notes__[-1]
    assert "smaller batches" in caught.value.__notes__[-1]


def test_that_of_a_device_is_explained_and_other_errors_are_not():
    class Full(Callback):
        def after_pred(self):
            raise self.error

    learn, full = learner(), Full()
    full.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        learn.fit(1, cbs=full)
    (note,) = (n for n in caught.value.__notes__ if n.startswith("the memory:"))
    assert "which fits in" in note
    full.error = RuntimeError("CUDA error: out of memory of another kind")
    with pytest.raises(RuntimeError) as caught:
        learn.fit(1, cbs=full)
    assert not any(n.startswith("the memory:") for n in getattr(caught.value, "__notes__", ()))


def test_what_the_learner_has_already_is_not_advised():
    class Full(nn.Linear):
        def forward(self, x):
            if self.training == self.trains:
                raise torch.OutOfMemoryError("full")
            return super().forward(x)

    for trains in (True, False):
        for cbs in ([], [SplitBatch(), ActivationCheckpointing("0")]):
            model = nn.Sequential(Full(64, 64))
            model[0].trains = trains
            with pytest.raises(torch.OutOfMemoryError) as caught:
                learner(model, cbs=cbs).fit(1)
            note = caught.value.__notes__[-1]
            assert ("SplitBatch()" in note) is (not cbs)
            assert ("ActivationCheckpointing()" in note) is (trains and not cbs)
            assert "smaller batch" in note


def test_without_a_prediction_the_parts_are_named():
    class Full(Asks):
        def forward(self, x):
            if x.sum() < 1e9:
                raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        learner(Full()).fit(1)
    note = caught.value.__notes__[-1]
    assert "parameters 16.2 KB" in note
    assert "cannot be predicted (DataDependentOutputException" in note
    assert "Try SplitBatch(), ActivationCheckpointing(), learn.to_bf16()" in note
