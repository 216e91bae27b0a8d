"""DriftCheck: what it compares and what it says; on real ranks in test_drift_on_ranks.py."""

import numpy as np
import pytest
import torch
from helpers import make_learner
from torch import nn

from learnerkit import EMA, Callback, EarlyStoppingCallback, distributed
from learnerkit.learner import Learner
from learnerkit.parallel import DriftCheck
from learnerkit.parallel.drift import describe_drift
from learnerkit.run_state import state_table

# What is compared


class TwoOptimizers(Learner):
    def create_opt(self):
        weights, biases = [self.model[0].weight, self.model[3].weight], [self.model[0].bias, self.model[3].bias]
        outside = nn.Parameter(torch.zeros(2))
        outside.grad = torch.ones(2)
        return {
            "w": torch.optim.AdamW([{"params": weights}, {"params": [outside], "lr": 0.5}], lr=0.1),
            "b": torch.optim.SGD(biases, lr=0.2, momentum=0.9),
        }


def test_the_table_names_all_that_is_compared():
    learn = make_learner(opt_func=torch.optim.AdamW)
    learn.fit(1)
    table = state_table(learn)
    assert table["learning rate of group 0"] == "0.1"
    assert table["betas[1] of group 0"] == "0.999"
    assert table["counter train_iter"] == "2"
    assert table["parameter 0.weight"].startswith("float32 tensor of shape (6, 4) with digest ")
    assert {f"optimizer {key} of 3.bias" for key in ("step", "exp_avg", "exp_avg_sq")} <= table.keys()
    assert not any("params" in name or "splitter" in name for name in table)

    learn = make_learner(cls=TwoOptimizers)
    learn.fit(1, lr=0.1)
    table = state_table(learn)
    assert table["learning rate of group 1 of optimizer 'w'"] == "0.1"
    assert "optimizer 'b' momentum_buffer of 3.bias" in table
    assert "optimizer 'w' exp_avg of parameter 0 of group 1" in table


def test_state_in_lists_is_compared_by_its_entries():
    class Lists(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"old": [p.detach().clone(), None, {"t": 2.5}], "object": object()}

    learn = make_learner(opt_func=Lists)
    learn.fit(1)
    table = state_table(learn)
    assert table["optimizer old[1] of 0.bias"] == "None"
    assert table["optimizer old[2].t of 0.bias"] == "2.5"
    assert table["optimizer old[0] of 0.bias"] == table["parameter 0.bias"]
    assert not any("object" in name for name in table)


def test_statistics_of_a_rank_are_compared_only_before_validation():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)
            self.c = nn.SyncBatchNorm(4)
            self.register_buffer("d", torch.ones(1), persistent=False)

    learn = make_learner()
    learn.model = Model()
    for learn.training, compared in ((True, {"c", "d"}), (False, {"a", "b", "c", "d"})):
        buffers = [name.removeprefix("buffer ") for name in state_table(learn) if "buffer" in name]
        assert {name.split(".")[0] for name in buffers} == compared


def test_the_table_follows_the_state():
    learn = make_learner(opt_func=torch.optim.AdamW)
    learn.fit(1)
    before = state_table(learn)
    assert state_table(learn) == before
    state = learn.opt.state[learn.model[0].bias]
    with torch.no_grad():
        state["step"] += 1
        learn.model[3].weight[0, 0] += 1
    learn.opt.param_groups[0]["lr"] = 0.3
    learn.epoch += 1
    after = state_table(learn)
    assert {name for name in before if before[name] != after[name]} == {
        "learning rate of group 0", "counter epoch", "parameter 3.weight", "optimizer step of 0.bias",
    }  # fmt: skip


class Counting(Callback):
    def __init__(self, steps=0):
        super().__init__()
        self.steps, self.means = steps, np.zeros(2)

    def state_dict(self):
        return {"steps": [self.steps], "means": self.means, "own": {"clock": 1}}


def test_the_state_of_callbacks_is_in_the_table():
    learn = make_learner(cbs=[Counting(), Counting(), EMA(), EarlyStoppingCallback(), Callback()])
    names = [name.removeprefix("callback ") for name in state_table(learn) if name.startswith("callback")]
    assert names == [
        "Counting steps[0]",
        "Counting means",
        "Counting_2 steps[0]",
        "Counting_2 means",
        "EMA n",
        "EMA steps",
    ]


# What is said


def test_the_first_difference_is_told_with_its_ranks_and_the_others():
    a, b = {"x": "1", "y": "2", "z": "3"}, {"x": "1", "y": "7", "z": "8"}
    assert describe_drift([a, b, a]) == "y is 2 on ranks 0, 2 and 7 on rank 1; 2 of 3 entries differ (z)"
    assert describe_drift([b, b, a]).startswith("y is 7 on ranks 0, 1 and 2 on rank 2;")


def test_an_entry_that_one_rank_alone_has_is_told():
    a, b = {"x": "1"}, {"x": "1", "extra": "2"}
    assert describe_drift([a, b]) == "extra is missing on rank 0 and 2 on rank 1; 1 of 2 entries differ"
    assert describe_drift([b, a]) == "extra is 2 on rank 0 and missing on rank 1; 1 of 2 entries differ"


def test_a_callback_that_only_some_ranks_have_is_no_difference():
    a, b = {"x": "1", "callback Log n": "1", "callback Own n": "1"}, {"x": "1", "callback Own n": "1"}
    assert describe_drift([a, b]) == ""
    assert describe_drift([a, b | {"callback Own m": "2"}]).startswith("callback Own m is missing on rank 0 and 2 on")


def test_a_long_list_is_cut():
    text = describe_drift([{f"x{i}": str(r > 0) for i in range(20)} for r in range(30)])
    assert text.startswith("x0 is False on rank 0 and True on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 21 more; 20 of 20")
    assert text.endswith("(x1, x2, x3, x4, x5, x6, x7, x8 and 11 more)")


# The callback


@pytest.fixture
def checks(monkeypatch):
    """The tables that are compared; no rank differs."""
    found = []
    monkeypatch.setattr(distributed, "same_everywhere", lambda table: found.append(dict(table)) or True)
    return found


class Sharded(Learner):
    """Takes one process for one of several."""

    n_ranks = property(lambda self: 2, lambda self, value: None)


@pytest.mark.parametrize(("every", "counts"), [(1, [0, 1, 2, 2, 2, 3, 4, 4]), (3, [2, 2, 2, 4, 4])])
def test_drift_is_checked_after_so_many_steps_and_before_validations(every, counts, checks):
    """After every so many steps of the fit, after an epoch's training, and before its validation."""
    learn = make_learner(cls=Sharded, cbs=DriftCheck(every=every))
    for _ in range(2):
        learn.fit(2)
        learn.validate()
        assert [int(table["counter train_iter"]) for table in checks] == counts  # counted after after_step
        checks.clear()


def test_on_one_process_it_does_nothing(checks):
    learn, alone = make_learner(cbs=DriftCheck(every=1)), make_learner()
    for each in (learn, alone):
        with each.distrib_ctx():
            each.fit(2)
    assert checks == []
    assert learn.recorder.losses == alone.recorder.losses


@pytest.mark.parametrize("every", [0, -1, 1.5, "2", None, True])
def test_every_is_a_whole_number(every):
    with pytest.raises(ValueError, match=r"got every=.*a whole number of optimizer steps, 1 or more"):
        DriftCheck(every=every)
