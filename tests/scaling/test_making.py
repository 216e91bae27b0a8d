"""Making a scaling report on one process: what it finds, what it leaves, and what it refuses."""

import json
import time
from dataclasses import replace

import pytest
import torch
from helpers import assert_same_state, make_data, make_dls, make_learner, raises, state_of
from scaling_jobs import Counts
from scaling_jobs import make_learner as job
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import Callback, CancelBatchException, DataLoaders, ScalingReport
from learnerkit.values import tensors_in


def everything(learn):
    """What a report may not change, as copies."""
    tensors = [t.clone() for t in tensors_in([learn.model.state_dict(), *(opt.state_dict() for opt in learn.opts)])]
    return [*tensors, torch.get_rng_state(), torch.tensor([len(learn.recorder.losses)])]


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.slow), True])
def test_everything_is_as_it_was(fails, capsys):
    learn = make_learner(dls=make_dls(train=40), model=None, cbs=Counts(), opt_func=torch.optim.AdamW)
    with learn.no_logging():
        learn.fit(1)
    learn.counts.limit = 13 if fails else 10**9
    before, state, count = everything(learn), state_of(learn), learn.counts.batches
    if fails:
        with raises(OSError, "the disk is full"):
            learn.scaling_report(4)
    else:
        learn.scaling_report(4)
    assert_same_state(learn, state)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(learn), strict=True))
    assert (learn.counts.batches, len(learn.counts.seen)) == (count, count)


@pytest.mark.slow
def test_it_says_where_the_time_goes_and_can_be_read_again(capsys):
    report = job().scaling_report(4, advice=False)
    said = capsys.readouterr().out
    assert said.strip() == str(report).strip()
    assert "1 process on cpu: a step of 8 samples takes" in said
    assert "free input would save" in said
    assert "cpu: a step of 1 sample takes" in str(replace(report, samples=1.0))
    assert [row["part"] for row in report.table][-2:] == ["the rest", "a step"]
    assert sum(row["rank 0"] for row in report.table[:-1]) == pytest.approx(report.table[-1]["rank 0"], rel=1e-6)
    assert ScalingReport.from_json(report.to_json()) == report
    assert list(json.loads(report.to_json())["parts"]) == list(report.parts)
    assert "+0%" in report.compare(report)


@pytest.mark.slow
def test_slow_input_is_seen_and_workers_help(capsys):
    learn = job("dataset", rank=0)
    learn.dls.train.dataset.seconds = 0.1  # far more than a busy machine adds to a step
    report = learn.scaling_report(4, forecast=False)
    assert max(report.parts, key=lambda name: report.parts[name]) == "waiting for input"
    assert report.without["input"] < 0.5 * report.seconds
    assert "every rank waits for input" in str(report)
    assert [what for what, gain in report.helps if what.startswith("num_workers") and gain > 0.3], report.helps


class SlowStream(IterableDataset):
    def __iter__(self):
        for row in zip(*make_data(60).tensors, strict=True):
            time.sleep(0.003)
            yield row


def test_slow_input_is_seen_of_a_loader_without_length():
    learn = make_learner(DataLoaders(DataLoader(SlowStream(), 4), device="cpu"))
    report = learn.scaling_report(4, advice=False, forecast=False, show=False)
    assert report.without["input"] < 0.5 * report.seconds


def test_a_slow_callback_is_named():
    report = job("callback", rank=0).scaling_report(4, advice=False, forecast=False, show=False)
    assert 0.03 <= report.parts["callback SleepyCallback"][0] < 0.09  # others may use this machine
    assert "callback SleepyCallback takes " in str(report)


def test_what_cannot_be_reported_is_refused():
    with raises(ValueError, "n_steps=1", "2 or more"):
        make_learner().scaling_report(1)
    batches = iter([(torch.ones(2, 4), torch.ones(2, 1))] * 9)
    with raises(ValueError, "is an iterator", "can be read only once"):
        make_learner(dls=DataLoaders(batches, device="cpu")).scaling_report()
    with raises(RuntimeError, "scaling_report was called during 'fit'"):
        make_learner(cbs=Callback(before_epoch=lambda cb: cb.learn.scaling_report())).fit(1)
    with raises(ValueError, "an epoch must have 2 steps or more"):
        make_learner(dls=make_dls(train=4)).scaling_report(2)

    def cancel(cb):
        if cb.iter % 2:
            raise CancelBatchException

    learn = make_learner(dls=make_dls(train=32), cbs=Callback(before_batch=cancel))
    with raises(ValueError, "if it has, callbacks cancel batches: give a larger n_steps"):
        learn.scaling_report(2)
    assert learn.scaling_report(8, advice=False, forecast=False, show=False).samples == 4


def test_trying_ends_in_time(capsys):
    start = time.monotonic()
    report = job("dataset", rank=0).scaling_report(3, forecast=False, seconds=0.01)
    assert report.tried == []
    assert any("not tried any more after 0.01 s: num_workers=2" in note for note in report.notes)
    assert time.monotonic() - start < 60
