"""Loggers on several ranks: one set of files, with the global rows."""

import csv
import json
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import make_data, make_learner, raising
from torch.utils.data import IterableDataset

from learnerkit import (
    Callback,
    CancelBatchException,
    CheckpointCallback,
    CSVLogger,
    DataLoaders,
    GradientAccumulation,
    JSONLogger,
    ValidateEvery,
    distributed,
    mae,
)


@pytest.mark.ranks(2, soak=[3])
def test_rank_0_alone_writes_and_its_rows_are_global(tmp_path):
    dls = DataLoaders.from_datasets(make_data(22), make_data(7, seed=1), bs=4, device="cpu")
    learn = make_learner(dls, metrics=mae, cbs=[CSVLogger(), JSONLogger()], path=tmp_path / str(distributed.rank()))
    with learn.distrib_ctx():
        learn.fit(2)
    distributed.barrier()  # until rank 0 has closed its files
    assert [path.name for path in Path(tmp_path).iterdir()] == ["0"]
    recorder = learn.recorder
    with Path(tmp_path, "0", "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    config, *records = map(json.loads, Path(tmp_path, "0", "history.jsonl").read_text().splitlines())
    assert [float(row["valid_loss"]) for row in rows] == [row[1] for row in recorder.values]
    assert config["config"]["ranks"] == distributed.world_size()
    assert [r["step"] for r in records if "epoch" not in r] == list(range(1, recorder.iters[-1] + 1))
    assert [r["mae"] for r in records if "epoch" in r] == [row[2] for row in recorder.values]


@pytest.mark.ranks(2, soak=[3])
@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_steps_that_are_cancelled_are_not_there_and_the_others_rise(tmp_path, who):
    dls = DataLoaders.from_datasets(make_data(20), make_data(7, seed=1), bs=4, device="cpu")

    def cancel(cb):
        if cb.training and cb.iter in (0, 3) and (who == "all" or distributed.is_main()):
            raise CancelBatchException

    cbs = [JSONLogger(), ValidateEvery(2), Callback(before_batch=cancel, order=70)]
    learn = make_learner(dls, metrics=mae, cbs=cbs, path=tmp_path)
    with learn.distrib_ctx(split_batches=True):
        learn.fit_one_cycle(2, 0.1)
    distributed.barrier()  # until rank 0 has closed its file
    _, *records = map(json.loads, Path(tmp_path, "history.jsonl").read_text().splitlines())
    steps = [r["step"] for r in records if "epoch" not in r]
    rows = [r["step"] for r in records if "epoch" in r]
    if who == "all":
        assert (steps, rows) == ([1, 2, 3, 4, 5, 6], [1, 2, 3, 3, 5, 6])  # as on one process
        assert [r["lr"] for r in records if "epoch" not in r] == learn.recorder.lrs == learn.recorder.hps["lr"]
    else:
        assert (steps, rows) == ([1, 2, 3, 6, 7, 8], [2, 4, 5, 6, 8, 10])
    assert rows == learn.recorder.iters


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(make_data(8))


@pytest.mark.ranks(2)
def test_an_empty_batch_that_ends_an_accumulated_step_is_no_step(tmp_path):
    dls = DataLoaders.from_datasets(Stream(), bs=2, device="cpu")
    learn = make_learner(dls, cbs=[JSONLogger(), GradientAccumulation(n_batches=3)], path=tmp_path)
    with learn.distrib_ctx():
        learn.fit(2)
    distributed.barrier()  # until rank 0 has closed its file
    _, *records = map(json.loads, Path(tmp_path, "history.jsonl").read_text().splitlines())
    assert [r["step"] for r in records] == [1, 2, 2, 3, 4, 4]


@pytest.mark.filterwarnings("ignore:.*read again and dropped")
@pytest.mark.ranks(2)
def test_it_is_none_either_where_a_run_goes_on_behind_it(tmp_path):
    for stops in (True, False):
        dls = DataLoaders.from_datasets(Stream(), make_data(4), bs=2, device="cpu")
        cbs = [JSONLogger(), GradientAccumulation(n_batches=3), CheckpointCallback(tmp_path / "run", 1, resume=True)]
        stop = raising("before_validate", ZeroDivisionError, lambda cb, stops=stops: stops and cb.epoch == 1)
        learn = make_learner(dls, cbs=[*cbs, stop], path=tmp_path)
        with suppress(ZeroDivisionError), learn.distrib_ctx():
            learn.fit(2)
        distributed.barrier()  # until rank 0 has closed its file
    _, *records = map(json.loads, Path(tmp_path, "history.jsonl").read_text().splitlines())
    assert [r["step"] for r in records] == [1, 2, 2, 3, 4, 4]
