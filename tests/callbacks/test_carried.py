"""State from batch to batch: against a loop by hand, with validation, masks, checkpoints and bad input."""

import pytest
import torch
from carried_jobs import ROWS, SIZE, Hidden, Net, batches, learner
from helpers import mostly_slow, same_weights
from resume_jobs import Killed, _KillBefore
from torch import nn
from torch.nn import functional as F

from learnerkit import Callback, CarriedState, CheckpointCallback, DataLoaders, Learner, ValidateEvery


def fit(learn, epochs=2):
    with learn.no_logging():
        learn.fit(epochs)
    return learn


def by_hand(learn, train, valid=(), epochs=2, keeps=lambda i, state: state):
    """The same in a loop of torch's; the losses of validation."""
    model, opt, found = learn.model, torch.optim.SGD(learn.model.parameters(), 0.1), []
    for _ in range(epochs):
        state = other = None
        for i, (x, y) in enumerate(train):
            pred, state = model(x, keeps(i, state))
            state = tuple(part.detach() for part in state)
            F.mse_loss(pred, y).backward()
            opt.step()
            opt.zero_grad()
        losses = []
        for x, y in valid:
            with torch.no_grad():
                pred, other = model(x, other)
                losses.append(F.mse_loss(pred, y).item())
        found.append(sum(losses) / max(1, len(losses)))
    return found


@pytest.mark.parametrize("time_first", [True, False])
def test_it_is_the_loop_by_hand(time_first):
    train, valid = batches(5, time_first=time_first), batches(3, 4, seed=1, time_first=time_first)
    hand, learn = (learner(train, valid, time_first=time_first) for _ in range(2))
    expected = by_hand(hand, train, valid)
    fit(learn)
    assert same_weights(hand.model, learn.model)
    assert [row[1] for row in learn.recorder.values] == pytest.approx(expected, rel=1e-12)
    assert not learn.model._forward_hooks
    assert not learn.model._forward_pre_hooks


def test_a_summary_begins_with_a_fresh_state_and_changes_none():
    learn, plain = learner(batches(5)), fit(learner(batches(5)), 1)
    assert [layer.output for layer in learn.summary().layers][-1] == f"4 x {ROWS} x 1"
    fit(learn, 1)
    state = learn.hidden.state_dict()["own"]["state"]
    learn.summary()
    assert learn.hidden.state_dict()["own"]["state"] is state
    assert same_weights(plain.model, learn.model)
    assert not learn.model._forward_hooks


def test_validation_and_predictions_leave_the_state_of_training_alone():
    train, valid = batches(5), batches(3, 4, seed=1)
    plain = fit(learner(train))
    predicts = Callback(after_step=lambda cb: cb.learn.get_preds())
    learn = learner(train, valid, [Hidden(dim=1), ValidateEvery(2), predicts])
    fit(learn)
    assert same_weights(plain.model, learn.model)
    first, again = learn.get_preds()[0], learn.get_preds()[0]
    assert torch.equal(first, again)  # each begins anew
    with torch.no_grad():
        alone, state = [], None
        for x, _ in valid:
            pred, state = learn.model(x, state)
            alone.append(pred.movedim(1, 0))
    torch.testing.assert_close(first, torch.cat(alone))


class Episodes(Hidden):
    """Rows 1 and 4 begin anew at batch 2, all of them at batch 4."""

    def before_batch(self):
        if self.training and self.iter == 2:
            self.restart(torch.tensor([False, True, False, False, True, False]))
        if self.training and self.iter == 4:
            self.restart()


class After(Hidden):
    """The same, said at the end of the batch before."""

    order = 13

    def after_loss(self):
        if self.training and self.iter == 1:
            self.restart(torch.tensor([False, True, False, False, True, False]))
        if self.training and self.iter == 3:
            self.restart()


@pytest.mark.parametrize("kind", [Episodes, After])
def test_rows_begin_anew_where_a_mask_says_so(kind):
    def keeps(i, state):
        if i == 2:
            state = tuple(part.clone() for part in state)
            for part in state:
                part[:, [1, 4]] = 0
        return None if i == 4 else state

    train = batches(5)
    hand, learn = learner(train), learner(train, cbs=[kind(dim=1)])
    by_hand(hand, train, keeps=keeps)
    fit(learn)
    assert same_weights(hand.model, learn.model)


def test_a_state_may_outlive_its_epoch_and_its_fit():
    train = batches(4)
    long, short = learner(train * 3), learner(train, cbs=[Hidden(dim=1, reset="never")])
    fit(long, 1)
    fit(short, 2)
    with short.no_logging():
        short.lr_find(num_it=10, show_plot=False)
    fit(short, 1)
    assert same_weights(long.model, short.model)


class Named(nn.Module):
    """Takes keywords, and a state that is a dict with a number for all rows."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)

    def forward(self, x, state):
        new = self.body(torch.cat([x, state["h"]], 1)).tanh()
        return new[:, :1], {"h": new, "seen": state["seen"] + 1}


def test_a_summary_in_mid_fit_leaves_the_callback_to_this_fit():
    learn = learner(cbs=[Hidden(dim=1), Callback(before_train=lambda cb: str(cb.learn.summary()))])
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        learn.fit(1)
    assert not learn.model._forward_hooks


class Dict(CarriedState):
    def start(self, n):
        return {"h": torch.zeros(n, 2), "seen": torch.zeros(())}


def test_a_batch_of_keywords_gets_it_by_its_name():
    train = [{"x": torch.randn(3, 1), "labels": torch.randn(3, 1)} for _ in range(4)]
    carried = Dict()
    learn = Learner(DataLoaders(train, device="cpu"), Named(), nn.MSELoss(), cbs=carried)
    fit(learn, 1)
    assert carried.state_dict()["own"]["state"]["seen"] == 4


def test_a_second_forward_pass_of_a_batch_begins_as_the_first():
    seen = []

    def again(cb):
        if cb.training:
            first = cb.pred.detach()
            cb.learn._forward()
            seen.append(torch.equal(first, cb.pred.detach()))

    twice = fit(learner(cbs=[Hidden(dim=1), Callback(after_pred=again)]))
    assert same_weights(fit(learner()).model, twice.model)
    assert seen == [True] * 10


def test_a_callback_may_call_the_model_with_a_state_of_its_own():
    def look(cb):
        pred, state = cb.model(cb.x, Hidden(dim=1).start(ROWS))
        assert pred.shape[:2] == (4, ROWS)
        assert len(state) == 2

    assert same_weights(fit(learner()).model, fit(learner(cbs=[Hidden(dim=1), Callback(after_step=look)])).model)


@pytest.mark.parametrize("stop", mostly_slow([1, 3, 5, 7], 3, 7))
@pytest.mark.filterwarnings("ignore:.*read again and dropped")  # as a list of batches on one process is
def test_a_resumed_run_goes_on_with_it(stop, tmp_path):
    def make(*cbs):
        train, valid = batches(5), batches(3, 4, seed=1)
        return learner(train, valid, [Hidden(dim=1), CheckpointCallback(tmp_path, every=1, resume=True), *cbs])

    whole = fit(learner(batches(5), batches(3, 4, seed=1)))
    with pytest.raises(Killed):
        fit(make(_KillBefore(stop)))
    assert same_weights(whole.model, fit(make()).model)


def test_the_states_of_two_ranks_are_joined_on_one():
    carried = Hidden(dim=1)
    learn = learner(cbs=[carried])
    whole = tuple(torch.randn(2, ROWS, SIZE, dtype=torch.float64) for _ in range(2))
    ranks = [{"state": tuple(part[:, a:b] for part in whole)} for a, b in ((0, 4), (4, ROWS))]
    carried.load_state_dict({"ranks": ranks})
    assert all(map(torch.equal, carried.state_dict()["own"]["state"], whole))
    carried.load_state_dict({"ranks": [{"state": None}] * 2})
    assert carried.state_dict()["own"]["state"] is None
    assert learn.hidden is carried


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 1)

    def forward(self, x, state):
        return self.body(x)


def test_what_cannot_be_right_is_refused():
    for given in ({"dim": -1}, {"dim": True}, {"reset": "fit"}):
        with pytest.raises(ValueError, match="got (dim|reset)="):
            Hidden(**given)
    with pytest.raises(ValueError, match=r"carried has 6 rows, and the batch 5: .*drop_last=True"):
        fit(learner([*batches(2), *batches(1, 5)]))
    with pytest.raises(ValueError, match=r"carried has 2 rows, and the batch 6: .*counted in dimension 0"):
        fit(learner(cbs=[Hidden()]))
    with pytest.raises(NotImplementedError, match="has no method `start`"):
        fit(learner(cbs=[CarriedState()]))
    learn = learner()
    learn.model = Bare().double()
    with pytest.raises(ValueError, match="it returns a pair"):
        fit(learn)
    learn.model = nn.DataParallel(Net().double())
    with pytest.raises(ValueError, match="use a process for each device"):
        fit(learn)
