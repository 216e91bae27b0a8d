"""DriftCheck on several ranks, of which one comes to differ."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import EMA, Callback, DataLoaders, Learner, distributed
from learnerkit.parallel import DriftCheck
from learnerkit.utils import unwrap

pytestmark = [pytest.mark.ranks(2, soak=[3]), pytest.mark.filterwarnings("ignore:sync_bn|.*each train a whole copy")]

N = distributed.world_size()
REST = "rank 0" if N == 2 else f"ranks {', '.join(str(r) for r in range(N) if r != 1)}"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu()) * self.scale


def make_learner(cbs, **kwargs):
    torch.manual_seed(3)
    x = torch.randn(16 * N, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    dls = DataLoaders.from_datasets(data, data, bs=4, device="cpu")
    return Learner(dls, Model(), nn.CrossEntropyLoss(), lr=0.01, cbs=cbs, **kwargs)


def fit(event=None, change=None, every=2, epochs=1, **kwargs):
    """Fit; on rank 1 alone make one change at the second occurrence of an event. Returns the error's text."""
    seen = []

    def hook(cb):
        seen.append(event)
        if len(seen) == 2 and distributed.rank() == 1:
            with torch.no_grad():
                change(cb.learn)

    spoil = [Callback(**{event: hook}, order=20)] if event else []
    learn = make_learner([*spoil, DriftCheck(every=every)], **kwargs)
    found = None
    try:
        with learn.distrib_ctx(), learn.no_logging():
            learn.fit(epochs)
    except RuntimeError as e:
        found = str(e)
    assert distributed.same_everywhere(found), distributed.all_gather(found)
    return found


def parts(text):
    """When, and what differs."""
    when, what = text.removeprefix("DriftCheck: ranks differ after ").split("): ", 1)
    return when + ")", what.split(". Ranks drift apart")[0]


@pytest.mark.slow
def test_batch_norms_statistics_differ_between_steps_which_is_no_drift():
    apart = []
    look = Callback(after_batch=lambda cb: apart.append(distributed.all_gather(cb.model.training and mean(cb.learn))))
    learn = make_learner([look, EMA(), DriftCheck(every=1)])  # of the statistics each rank has an average of its own
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(2)
    assert any(len(set(map(str, each))) > 1 for each in apart)
    assert fit(opt_func=torch.optim.SGD) is None


def test_the_order_of_a_states_entries_does_not_count():
    assert fit("after_step", reorder, every=1) is None


def test_outside_of_the_context_each_process_trains_for_itself():
    learn = make_learner([DriftCheck(every=1)])
    with learn.no_logging():
        learn.fit(1, cbs=Callback(after_step=lambda cb: nudge(learn.model.last.bias, by=distributed.rank())))


def test_without_the_check_a_fit_warns_once_of_weights_that_differ():
    spoil = Callback(
        after_backward=lambda cb: nudge(unwrap(cb.learn.model).last.bias.grad, by=distributed.rank() << 16)
    )
    learn = make_learner([spoil])
    with warnings.catch_warnings(record=True) as caught, learn.distrib_ctx(), learn.no_logging():
        warnings.simplefilter("always")
        learn.fit(2)
    told = [str(w.message) for w in caught if "the ranks no longer have the same weights" in str(w.message)]
    assert len(told) == (distributed.rank() == 0)


def reorder(learn):
    """Loading can change the order of a state's entries; their values are the same."""
    for state in learn.opt.state.values():
        entries = list(state.items())
        state.clear()
        state.update(reversed(entries))


def mean(learn):
    return unwrap(learn.model).norm.running_mean.tolist()


def nudge(t, by=1):
    """Change the last bits of one element."""
    with torch.no_grad():
        t.reshape(-1)[-1:].view(torch.int32).add_(by)


@pytest.mark.ranks(2, slow=[3])
def test_a_weight_that_differs_in_its_last_bit():
    when, what = parts(fit("after_step", lambda learn: nudge(unwrap(learn.model).first.weight)))
    assert when == "step 2 (epoch 0)"
    assert what.startswith("parameter first.weight is float32 tensor of shape (6, 4) with digest "), what
    assert f" on {REST} and float32 tensor of shape (6, 4) with digest " in what or N > 2, what
    assert f" on {REST} and " in what, what
    assert what.split("; ")[0].endswith(" on rank 1"), what
    assert what.split("; ")[1].startswith("1 of "), what


def test_a_learning_rate_that_differs_is_told():
    def change(learn):
        learn.opt.param_groups[0]["lr"] = 0.25

    when, what = parts(fit("before_step", change))
    assert when == "step 2 (epoch 0)"
    assert what.startswith(f"learning rate of group 0 is 0.01 on {REST} and 0.25 on rank 1; 7 of "), what
    assert what.endswith("(parameter first.weight, parameter first.bias, parameter norm.weight, parameter norm.bias, "
                         "parameter last.weight, parameter last.bias)"), what  # fmt: skip


def test_an_optimizers_state_that_differs_is_told():
    found = fit("after_step", lambda learn: nudge(learn.opt.state[unwrap(learn.model).last.bias]["exp_avg"]))
    assert parts(found)[1].startswith("optimizer exp_avg of last.bias is float32 tensor of shape (2,)"), found


@pytest.mark.slow
def test_a_change_after_the_last_step_that_was_due_is_seen_when_training_ends():
    """A change after the last step that was due is seen once training ends."""
    # Not by the last bit alone, which the two steps that follow may round away.
    found = fit("after_step", lambda learn: nudge(unwrap(learn.model).last.bias, by=2**16), every=100)
    assert parts(found)[0] == "step 4 (epoch 0)"
    assert "parameter last.bias is" in found
    # And what is changed between training and validation, before that.
    found = fit("before_validate", lambda learn: nudge(unwrap(learn.model).last.bias), every=100, epochs=2)
    assert parts(found)[0] == "step 8 (epoch 1)"


def test_buffers_that_differ_are_told():
    # BatchNorm's own are compared where they have just been made equal.
    found = fit("before_validate", lambda learn: nudge(unwrap(learn.model).norm.running_mean), epochs=2)
    assert parts(found)[0] == "step 8 (epoch 1)"
    assert parts(found)[1].startswith("buffer norm.running_mean is"), found
    found = fit("after_step", lambda learn: nudge(unwrap(learn.model).scale))
    assert parts(found)[0] == "step 2 (epoch 0)"
    assert parts(found)[1].startswith("buffer scale is"), found


def test_a_counter_that_differs_and_a_parameter_of_one_rank_alone():
    def count(learn):
        learn.train_iter += 1

    found = fit("before_step", count)
    assert f"counter train_iter is 1 on {REST} and 2 on rank 1; 1 of " in found, found

    def extend(learn):
        unwrap(learn.model).register_parameter("extra", nn.Parameter(torch.zeros(1)))

    found = fit("after_step", extend)
    assert f"parameter extra is missing on {REST} and float32 tensor of shape (1,)" in found, found
