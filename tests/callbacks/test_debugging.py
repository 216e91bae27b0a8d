"""ShortEpochCallback and OverfitBatch: fits cut short, and batches learnt by heart. Profiler: its trace."""

import json
from contextlib import suppress
from functools import partial

import psutil
import pytest
import torch
from helpers import (
    OwnLoss,
    Seen,
    Wrapped,
    end_workers,
    make_classes,
    make_data,
    make_dls,
    make_learner,
    make_model,
    mostly_slow,
    raising,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from learnerkit import Callback, CheckpointCallback, DataLoaders, GradientAccumulation, Learner
from learnerkit.callbacks.debugging import OverfitBatch, Profiler, ShortEpochCallback


class Stream(IterableDataset):
    def __init__(self, n=40):
        self.n = n

    def __iter__(self):
        yield from zip(*make_data(self.n).tensors, strict=True)


class Items(Dataset):
    """Samples that workers fetch one by one."""

    def __len__(self):
        return 400

    def __getitem__(self, i):
        return torch.full((4,), float(i)), torch.zeros(1)


def fit(cbs, dls=None, epochs=1, **kwargs):
    seen = Seen()
    learn = make_learner(dls or make_dls(40, 20, 4), **kwargs)
    learn.fit(epochs, cbs=[seen, *cbs])
    return learn, seen


# Short epochs


@pytest.mark.parametrize(("kwargs", "train", "valid"), [
    ({"n": 3}, 3, 3), ({"pct": 0.3}, 3, 2), ({"pct": 0.001}, 1, 1), ({"pct": 1}, 10, 5), ({"n": 99}, 10, 5),
    ({"n": 2, "short_valid": False}, 2, 5),
])  # fmt: skip
def test_an_epoch_reads_its_first_batches(kwargs, train, valid):
    whole = fit([])[1]
    seen = fit([ShortEpochCallback(**kwargs)], epochs=2)[1]
    assert seen.lengths == [(True, train), (False, valid)] * 2
    assert all(map(torch.equal, seen.train, whole.train[:train] * 2))
    assert len(seen.train) == 2 * train
    assert all(map(torch.equal, seen.valid, whole.valid[:valid] * 2))
    assert len(seen.valid) == 2 * valid
    assert seen.done == pytest.approx([(i + 1) / (2 * train) for i in range(2 * train)])


def test_schedules_and_the_last_group_fit_the_short_epoch():
    learn, seen = make_learner(make_dls(40, 20, 4)), Seen()
    learn.fit_one_cycle(1, cbs=[seen, ShortEpochCallback(n=5), GradientAccumulation(n_batches=3)])
    assert seen.done[-1] == 1
    assert seen.steps == 2
    assert len(learn.recorder.lrs) == 5


def test_a_short_epoch_that_was_read_in_another_process_is_followed_by_the_same_samples(tmp_path):
    def trained(folder, stops=False):
        rows = TensorDataset(torch.arange(24.0)[:, None], torch.zeros(24, 1))
        dls = DataLoaders.from_datasets(rows, bs=4, device="cpu", generator=torch.Generator().manual_seed(3))
        batches = []
        note = Callback(before_batch=lambda cb: batches.append(cb.xb[0].flatten().tolist()))
        stop = raising("before_batch", KeyError(), when=lambda cb: stops and cb.learn.epoch == 1)
        saves = CheckpointCallback(tmp_path / folder, every=1, resume=True)
        with suppress(KeyError):
            make_learner(dls, nn.Linear(1, 1), lr=1e-3).fit(2, cbs=[ShortEpochCallback(n=2), saves, stop, note])
        return batches

    whole = trained("whole")
    assert len(whole) == 4
    assert trained("stopped", stops=True)[:2] == whole[:2]
    assert trained("stopped") == whole[2:]


def test_other_readings_are_whole():
    learn, seen = make_learner(make_dls(40, 20, 4), cbs=ShortEpochCallback(n=1)), Seen()
    learn.validate(cbs=seen)
    assert len(seen.valid) == 5
    assert len(learn.get_preds()[0]) == 20
    inner = []

    def predict(cb):
        if cb.training:
            dl = cb.dl
            inner.append(len(cb.learn.get_preds()[0]))
            assert cb.dl is dl
            assert len(dl) == 1

    learn.fit(1, cbs=Callback(after_batch=predict, order=30))
    assert inner == [20]
    assert learn.dl is None


def test_the_loader_is_back_after_training_and_after_errors():
    dls = make_dls(40, 20, 4)
    for short in (ShortEpochCallback, OverfitBatch):
        learn = make_learner(dls)
        learn.fit(1, cbs=short(n=2))
        assert learn.dl is None
        with pytest.raises(KeyError):
            learn.fit(1, cbs=[short(n=2), raising("after_loss", KeyError())])
        assert learn.dl is None
        learn.fit(1)
        assert len(learn.recorder.losses) == 10


def test_loaders_without_length_need_a_number_of_batches():
    dls = DataLoaders(DataLoader(Stream(), 4), device="cpu")
    assert len(fit([ShortEpochCallback(n=3)], dls)[1].train) == 3
    with pytest.raises(ValueError, match=r"pct=0.5.*has no length; say how many to read by n="):
        fit([ShortEpochCallback(0.5)], dls)


@pytest.mark.parametrize("kwargs", [{}, {"n": 1, "pct": 0.5}])
def test_a_short_epoch_takes_a_share_or_a_number(kwargs):
    with pytest.raises(TypeError, match="give one of them"):
        ShortEpochCallback(**kwargs)


@pytest.mark.parametrize("make", [
    partial(ShortEpochCallback, 0), partial(ShortEpochCallback, 1.5), partial(ShortEpochCallback, n=0),
    partial(ShortEpochCallback, "a"), partial(ShortEpochCallback, n=1.5),
    partial(OverfitBatch, 0), partial(OverfitBatch, 0.5),
])  # fmt: skip
def test_numbers_of_batches_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="got"):
        make()


@pytest.mark.parametrize("persistent", mostly_slow([False, True], True))
@pytest.mark.parametrize("cb", [partial(ShortEpochCallback, n=2), partial(OverfitBatch, 2)])
def test_workers_end_with_the_short_reading(cb, persistent):
    dl = DataLoader(Items(), 4, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork")
    alive, before = [], set(psutil.Process().children())  # a pool of ranks, for one

    def look(c):
        new = set(psutil.Process().children()) - before
        alive.append(sum("resource_tracker" not in " ".join(p.cmdline()) for p in new))

    learn, seen = fit([cb(), Callback(after_train=look)], DataLoaders(dl, device="cpu"), epochs=2)
    assert [x[0, 0].item() for x in seen.train[:2]] == [0, 4]
    assert [x[0, 0].item() for x in seen.train[-2:]] == [0, 4]
    assert alive == [2 * persistent] * 2
    end_workers(learn.dls)


# One batch over and over


@pytest.mark.parametrize("n", [1, 3])
def test_every_step_sees_the_first_batches(n):
    torch.manual_seed(3)
    data = make_data(40)
    dls = DataLoaders.from_datasets(data, make_data(20), bs=4, device="cpu")
    whole = fit([], dls)[1]
    torch.manual_seed(3)
    seen = fit([OverfitBatch(n)], dls, epochs=2)[1]
    expected = (whole.train[:n] * 10)[:10] * 2
    assert len(seen.train) == 20
    assert all(map(torch.equal, seen.train, expected))
    assert all(map(torch.equal, seen.valid, whole.valid * 2))
    assert seen.lengths == [(True, 10), (False, 5)] * 2


def test_a_healthy_model_learns_the_batch_by_heart():
    overfit = OverfitBatch()
    learn, _ = fit([overfit], epochs=30)
    assert learn.recorder.values[-1][0] < 0.05 * learn.recorder.values[0][0]
    assert overfit.state_dict()["own"] == []


class Noisy(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.rand(4), torch.zeros(1)


@pytest.mark.filterwarnings("ignore:the first batch")
def test_the_batch_is_kept_as_it_was_read_whatever_is_done_to_it():
    def spoil(cb):
        if cb.training:
            cb.xb[0].zero_()

    learn, seen = fit([OverfitBatch(), Callback(before_batch=spoil, order=30)], DataLoaders(DataLoader(Noisy(), 4)))
    assert len(seen.train) == 3
    assert all(torch.equal(x, seen.train[0]) for x in seen.train)
    assert seen.train[0].any()


def test_a_loader_without_length_is_read_to_know_its_end():
    _, seen = fit([OverfitBatch(2)], DataLoaders(DataLoader(Stream(20), 4), device="cpu"), epochs=2)
    a, b = seen.train[:2]
    assert all(map(torch.equal, seen.train, [a, b, a, b, a] * 2))
    assert len(seen.train) == 10


def test_a_loader_that_gives_nothing_is_told_as_without_the_callback():
    class Nothing(Stream):
        def __len__(self):
            return 8

    with pytest.raises(ValueError, match="the training loader gave no batches in epoch 0"):
        fit([OverfitBatch()], DataLoaders(DataLoader(Nothing(0), 4), device="cpu"))


def test_batches_of_another_number_of_ranks_are_not_taken_in_silence():
    learn = make_learner(cbs=OverfitBatch())
    with pytest.warns(UserWarning, match="2 ranks have kept batches that 1 cannot divide"):
        learn.overfit_batch.load_state_dict({"n": 1, "ranks": [{"own": []}] * 2})


def test_both_callbacks_together_take_mapping_batches():
    batches = [{"x": torch.full((2, 4), float(i)), "labels": torch.ones(2, 1)} for i in range(6)]
    dls = DataLoaders(batches, device="cpu")
    learn, batches = Learner(dls, OwnLoss(), opt_func=torch.optim.SGD, loss_weight="samples"), []
    note = Callback(before_batch=lambda cb: batches.append(cb.xb[0]["x"][0, 0].item()))
    learn.fit(2, cbs=[OverfitBatch(), ShortEpochCallback(n=3), note])
    assert batches == [0] * 6


def test_short_epochs_work_with_data_parallel(two_gpus):
    kinds = []
    learn = make_learner(make_dls(40, 20, 4)).to_parallel()
    seen = Seen()
    learn.fit(
        1,
        cbs=[
            seen,
            ShortEpochCallback(n=2),
            Callback(after_batch=lambda cb: kinds.append(isinstance(cb.model, Wrapped))),
        ],
    )
    assert len(seen.train) == 2
    assert set(kinds) == {True}
    assert learn.check()
    assert type(learn.model) is nn.Sequential
    learn = make_learner(make_dls(8, 4, 4, data=make_classes), make_model(n_out=2), nn.CrossEntropyLoss()).to_parallel()
    assert not learn.check()


# Profiler


def steps_of(path):
    return [e["name"] for e in json.loads(path.read_text())["traceEvents"] if "ProfilerStep" in str(e.get("name"))]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.10
@pytest.mark.slow  # the profiler's first start takes seconds
def test_a_trace_has_the_chosen_steps_and_an_error_leaves_what_was_recorded(tmp_path, capsys):
    tracing = Profiler(tmp_path / "traces", steps=(2, 4), record_shapes=True)
    learn = make_learner(make_dls(12, bs=4), cbs=tracing)
    learn.fit(2)
    assert steps_of(tracing.path) == [f"ProfilerStep#{i}" for i in (2, 3, 4)]
    assert (
        f"the trace of the steps from 2 to 4, counted from 0, is in {tmp_path / 'traces' / 'fit0-rank0.pt.trace.json'}"
        in (capsys.readouterr().out)
    )
    fails = Callback(before_step=lambda cb: 1 / 0 if cb.train_iter == 2 else None)
    with pytest.raises(ZeroDivisionError):
        learn.fit(2, cbs=fails)
    assert tracing.path.name == "fit1-rank0.pt.trace.json"
    assert steps_of(tracing.path)[0] == "ProfilerStep#2"
    assert "the trace of the steps from 2 to the end of the fit is in " in capsys.readouterr().out
    learn.remove_cb(tracing)
    learn.fit(1, cbs=Profiler(tmp_path, steps=(1, 1)))  # another one can start
    assert steps_of(tmp_path / f"fit{learn.n_fits - 1}-rank0.pt.trace.json") == ["ProfilerStep#1"]
    with pytest.warns(match="no step was recorded: the fit has read fewer than 21 training batches"):
        learn.fit(1, cbs=Profiler(tmp_path, steps=(20, 30)))
    learn.validate(cbs=tracing)
    with pytest.raises(ValueError, match="another profiler of torch"):
        learn.fit(1, cbs=[Profiler(tmp_path, steps=(1, 1)), Profiler(tmp_path, steps=(2, 2))])
    with torch.profiler.profile() as whole, pytest.raises(ValueError, match="another profiler of torch"):
        learn.fit(1, cbs=Profiler(tmp_path, steps=(1, 1)))
    assert len(whole.events()) > 0
    learn.fit(1, cbs=Profiler(tmp_path, steps=(1, 1)))


def test_the_steps_of_a_trace_are_checked():
    for steps in ((0, 3), (3, 2), (2.5, 3), 10):
        with pytest.raises((TypeError, ValueError), match="steps"):
            Profiler(steps=steps)
