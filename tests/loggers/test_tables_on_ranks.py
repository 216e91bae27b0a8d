"""Loggers on several ranks: one set of files, with the global rows."""

import csv
import json
from pathlib import Path

import pytest
from helpers import make_data, make_learner

from learnerkit import CSVLogger, DataLoaders, JSONLogger, distributed, mae


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
