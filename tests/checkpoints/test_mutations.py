"""A checkpoint of which one value has another type, and a manifest that fits it: refused, or of no consequence."""

import copy
import json
import os
import shutil
from contextlib import suppress

import pytest
import torch
from checkpoint_files import resign, write_manifest
from helpers import make_dls, make_learner
from resume_jobs import Kill, Killed

from learnerkit import CheckpointCallback, CheckpointError, CSVLogger, EarlyStoppingCallback, mae

FILES = ("state.json", "rank0.json", "manifest.json")
OTHERS = [None, True, 2.5, "x", [], {"x": 1}]


def places(value, at=()):
    """(where, what) of all values in JSON; of a list the first and the last item."""
    keys = value if isinstance(value, dict) else {0, len(value) - 1} if isinstance(value, list) and value else ()
    for key in keys:
        yield (*at, key), value[key]
        yield from places(value[key], (*at, key))


def others(value, at):
    """Values of other types; a number may be whole or not, and that of a tensor which is a step stand for itself."""
    for other in OTHERS:
        numbers = {type(value), type(other)} <= {int, float}
        if type(other) is not type(value) and not numbers and not (at[-1] == "step" and other == 2.5):
            yield other


def trained(folder, *cbs):
    """The model after a fit with some of the library's callbacks, which may be killed, or go on from there."""
    own = [CSVLogger(folder / "h.csv"), EarlyStoppingCallback("train_loss", patience=9)]
    learn = make_learner(make_dls(8, 4, 2), metrics=mae, opt_func=torch.optim.AdamW, wd=0.1)
    with learn.no_logging(), learn.no_bar(), suppress(Killed):
        learn.fit_one_cycle(1, 0.1, cbs=[CheckpointCallback(folder, every=1, keep=1, resume=True), *own, *cbs])
    return learn.model.state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "share", [pytest.param(40, id="some", marks=pytest.mark.slow), pytest.param(1, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("file", FILES)
def test_a_value_of_another_type_is_refused_or_of_no_consequence(file, share, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "killed", Kill(2))
    (checkpoint,) = (tmp_path / "killed").glob("fit*")
    content = json.loads((checkpoint / file).read_text())
    changes = [(at, other) for at, value in places(content) if at != ("sha256",) for other in others(value, at)]
    assert len(changes) > 60
    refused = 0
    for at, other in changes[:: share + (share > 1 and len(changes) % share == 0)]:
        changed = copy.deepcopy(content)
        part = changed
        for key in at[:-1]:
            part = part[key]
        part[at[-1]] = other
        folder = tmp_path / "changed"
        shutil.copytree(tmp_path / "killed", folder)
        if file == "manifest.json":
            write_manifest(folder / checkpoint.name, changed)
        else:
            (folder / checkpoint.name / file).write_text(json.dumps(changed))
            resign(folder / checkpoint.name)
        try:
            found = trained(folder)
            assert all(torch.equal(value, found[name]) for name, value in whole.items()), (at, other)
        except CheckpointError as e:
            assert checkpoint.name in str(e), (at, other)  # noqa: PT017 - a few changes make no difference
            refused += 1
        except Exception as e:
            raise AssertionError(f"{at}: {other!r}") from e
        shutil.rmtree(folder)
    assert refused
