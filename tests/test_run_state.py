"""The state of a run: what it holds, and that a learner to which it is given goes on exactly."""

import copy
import io
import random

import numpy as np
import pytest
import torch
from helpers import make_data, make_learner, make_model, mostly_slow, raises, same_weights
from random_jobs import PermutedWithState, StreamWithState
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from learnerkit import (
    EMA,
    Callback,
    CancelTrainException,
    CheckpointCallback,
    CheckpointError,
    DataLoaders,
    EarlyStoppingCallback,
    GradientAccumulation,
    Learner,
    distributed,
)
from learnerkit.values import same


class Counting(Callback):
    """Has a state without a word about it, and changes the loss by it."""

    def __init__(self, share=0.01):
        super().__init__()
        self.share = share
        self.steps, self.seen = 0, []
        self.mean = torch.zeros(())

    def before_fit(self):
        self.steps = 0

    def before_train(self):
        self.seen.clear()

    def after_loss(self):
        if self.training:
            self.learn.loss_grad = self.learn.loss_grad * (1 + self.share * self.steps)

    def after_step(self):
        self.steps += 1
        self.seen.append(self.train_iter)
        self.mean = 0.9 * self.mean + self.learn.loss


class Taking(Callback):
    """Takes the learner's state at an event, the n-th time that it comes."""

    order = 20_000

    def __init__(self, event, n):
        super().__init__(**{event: Taking.take})
        self.run_valid = False
        self.left, self.file = n, io.BytesIO()

    def take(self):
        self.left -= 1
        if not self.left:
            torch.save(self.learn.state_dict(), self.file)

    @property
    def state(self):
        return torch.load(io.BytesIO(self.file.getvalue()), weights_only=True)


def make(seed=0, **kwargs):
    torch.manual_seed(seed)
    train = DataLoader(make_data(22), 4, shuffle=True)
    dls = DataLoaders(train, DataLoader(make_data(8, seed=1), 4), device="cpu")
    cbs = [Counting(), EMA(decay=0.9), *kwargs.pop("cbs", [])]
    return make_learner(
        dls,
        make_model(dropout=0.2, seed=seed),
        opt_func=lambda params, lr: SGD(params, lr, momentum=0.9),
        cbs=cbs,
        **kwargs,
    )


PLACES = {"after_batch": 8, "after_train": 2, "after_epoch": 1, "before_fit": 1, "before_epoch": 2}


@pytest.mark.parametrize("event", mostly_slow(PLACES, "after_batch", "before_fit"))
def test_a_fit_goes_on_from_a_state_that_was_taken_in_another(event):
    taking = Taking(event, PLACES[event])
    first = make(cbs=[taking])
    first.fit_one_cycle(3, 0.1)
    again = make(seed=1)
    again.load_state_dict(taking.state)
    again.fit_one_cycle(3, 0.1)
    assert same_weights(first.model, again.model)
    assert same_weights(first.ema.model, again.ema.model)
    assert again.recorder.values[-1][:-1] == first.recorder.values[-1][:-1]
    assert again.recorder.losses == first.recorder.losses
    for name in ("steps", "seen", "mean"):
        assert getattr(again.counting, name) == getattr(first.counting, name)
    for learn in (first, again):  # the schedule has given the momentum back
        torch.manual_seed(2)
        learn.fit(1, 0.1)
    assert same_weights(first.model, again.model)


@pytest.mark.parametrize("data", ["a sampler", "a stream"])
@pytest.mark.parametrize(("event", "n", "fits"), [("before_fit", 2, 1), ("after_epoch", 1, 2)], ids=["start", "end"])
def test_a_state_from_the_start_or_end_of_a_fit_has_the_place_of_data_with_a_state(data, event, n, fits):
    def make(*cbs):
        rows = make_data(12)
        stream = DataLoader(StreamWithState(*rows.tensors), 4)
        train = stream if data == "a stream" else DataLoader(rows, 4, sampler=PermutedWithState(12))
        return make_learner(DataLoaders(train, device="cpu"), cbs=cbs)

    taking = Taking(event, n)
    first, again = make(taking), make()
    first.fit(1)
    first.fit(1)
    again.load_state_dict(taking.state)
    for _ in range(fits):  # where the first of two was to end only, it does so
        again.fit(1)
    assert again.recorder.losses == first.recorder.losses


ACTS = {
    "weights": lambda cb: nn.init.ones_(next(cb.model.parameters())),
    "rates": lambda cb: cb.opt.param_groups[0].update(lr=cb.opt.param_groups[0]["lr"] / 2),
    "optimizer": lambda cb: cb.opt.state.clear(),
    "loss": lambda cb: cb.learn.loss_func.scale.mul_(2),
}


class Scaling(nn.MSELoss):
    """Scales a loss by a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, pred, y):
        return self.scale * super().forward(pred, y)


@pytest.mark.slow
@pytest.mark.parametrize("event", ["before_epoch", "before_train"])
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_what_hooks_at_the_start_of_an_epoch_change_is_not_changed_again_in_mid_epoch(act, event):
    taking = Taking("after_batch", 8)
    first, again = (make(cbs=[Callback(**{event: act}), *cbs], loss_func=Scaling()) for cbs in ([taking], []))
    first.fit(3, 0.1)
    again.load_state_dict(taking.state)
    again.fit(3, 0.1)
    assert again.recorder.losses == first.recorder.losses


def test_a_fit_that_is_refused_does_not_lose_the_state():
    taking = Taking("after_batch", 8)
    first = make(cbs=[taking])
    first.fit(3, 0.1)
    again = make(seed=1)
    again.load_state_dict(taking.state)
    with raises(ValueError, "acuracy"):
        again.fit(3, 0.1, cbs=EarlyStoppingCallback(monitor="acuracy"))
    again.fit(3, 0.1)
    assert same_weights(first.model, again.model)
    assert again.recorder.losses == first.recorder.losses


def test_what_is_loaded_between_fits_is_there_at_once():
    first = make()
    first.fit(1, 0.1)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    again = make(seed=1)
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert same_weights(first.model, again.model)
    assert (again.epoch, again.train_iter, again.n_fits) == (first.epoch, first.train_iter, 1)
    assert again.counting.seen == first.counting.seen
    assert again.recorder.values == first.recorder.values
    first.fit(1, 0.05)
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    again.fit(1, 0.05)
    assert same_weights(first.model, again.model)
    assert again.recorder.losses == first.recorder.losses


def test_a_state_from_before_the_first_fit_has_no_optimizer():
    learn = make()
    state = copy.deepcopy(learn.state_dict())
    learn.fit(1, 0.1)
    losses = learn.recorder.losses
    learn.load_state_dict(state)
    learn.fit(1, 0.1)
    assert learn.recorder.losses == losses


def test_a_run_is_rolled_back_in_the_middle_of_a_fit():
    weights = []

    class Rolling(Callback):
        order = 20_000

        def after_batch(self):
            if self.training and self.train_iter == 3:
                self.state = copy.deepcopy(self.learn.state_dict())
            if self.training and self.iter == 5 and not weights:
                weights.append([p.detach().clone() for p in self.model.parameters()])
                self.learn.load_state_dict(self.state)
                weights.append([p.detach().clone() for p in self.model.parameters()])
                assert self.learn.train_iter == 6  # the data go on

    learn = make(cbs=[Rolling()])
    learn.fit(1, 0.1)
    assert not torch.equal(weights[0][0], weights[1][0])
    assert learn.train_iter == 6


def test_a_state_with_missing_parts_is_refused():
    learn = make()
    with raises(CheckpointError, "got a state without model, opt", "learn.load takes files of weights"):
        learn.load_state_dict({})


def test_a_state_of_another_loss_is_refused_and_changes_nothing():
    learn = make()
    learn.loss_func = nn.HuberLoss()
    learn.fit(1)
    state = learn.state_dict()
    learn.loss_func.register_buffer("scale", torch.ones(3))
    learn.fit(1)
    before = copy.deepcopy(learn.opt.state_dict())
    with raises(CheckpointError, "values of the shapes [] beside the model", "this learner [(3,)]", "the same loss"):
        learn.load_state_dict(state)
    assert str(learn.opt.state_dict()) == str(before)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["another loss", "its weight"])
def test_a_run_in_which_a_callback_gives_the_loss_a_weight_goes_on_if_it_has_one_from_the_start(tmp_path, change):
    def give_weight(cb):
        if cb.epoch and change == "its weight":
            cb.loss_func.weight = torch.tensor([1.0, 2.0, 3.0])
        elif cb.epoch:
            cb.learn.loss_func = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))

    def learner(weight=None, **events):
        data = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
        cbs = [Callback(before_epoch=give_weight, **events), CheckpointCallback(tmp_path, every=1, resume=True)]
        dls = DataLoaders.from_datasets(data, None, bs=4, device="cpu")
        return Learner(dls, nn.Linear(4, 3), nn.CrossEntropyLoss(weight=weight), cbs=cbs)

    def stop(cb):
        if (cb.epoch, cb.iter) == (2, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner(torch.ones(3), after_step=stop).fit(3)
    with raises(CheckpointError, "if a callback sets weight= later", "weight=torch.ones(n)"):
        learner().fit(3)
    learn = learner(torch.ones(3))
    learn.fit(3)
    assert (learn.train_iter, learn.loss_func.weight.tolist()) == (9, [1.0, 2.0, 3.0])


class Noisy(TensorDataset):
    """Draws from a generator of its own."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.rng = np.random.default_rng(3)

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + self.rng.random(), y


class Mask:
    """A collate function that makes its generator when it is first used, as those of transformers."""

    def __init__(self):
        self.generator = None

    def __call__(self, samples):
        self.generator = self.generator or torch.Generator().manual_seed(5)
        x, y = torch.utils.data.default_collate(samples)
        return x * torch.rand(x.shape, generator=self.generator), y


class Late(TensorDataset):
    """Makes its generator when it first draws."""

    def __init__(self, make, *tensors):
        super().__init__(*tensors)
        self.make, self.rng = make, None

    def __getitem__(self, i):
        self.rng = self.rng or self.make(3)
        x, y = super().__getitem__(i)
        return x + (self.rng.uniform(0, 1) if hasattr(self.rng, "uniform") else torch.rand((), generator=self.rng)), y


class LateFactor(Callback):
    """Multiplies the loss by draws of a generator that it makes when it first draws."""

    def __init__(self, make):
        self.make = make

    def after_loss(self):
        if self.training:
            if not hasattr(self, "own"):
                self.own = self.make(4)
            u = self.own.uniform(0, 1) if hasattr(self.own, "uniform") else torch.rand((), generator=self.own)
            self.learn.loss_grad = self.loss_grad * u


GENERATORS = (
    lambda s: torch.Generator().manual_seed(s), random.Random, np.random.default_rng, np.random.RandomState,
    lambda s: np.random.Generator(np.random.MT19937(s)),
)  # fmt: skip


@pytest.mark.parametrize("make", GENERATORS)
def test_generators_that_are_made_when_they_are_first_used_go_on(make):
    def drawing():
        dls = DataLoaders(DataLoader(Late(make, *make_data(12).tensors), 4), device="cpu")
        return make_learner(dls, cbs=LateFactor(make))

    learn, file = drawing(), io.BytesIO()
    learn.fit(1)
    torch.save(learn.state_dict(), file)
    learn.fit(1)
    again = drawing()
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    again.fit(1)
    assert again.recorder.losses == learn.recorder.losses


class Drawn(IterableDataset):
    """Batches without an end, drawn by generators of its own, of which one is made when it is first used."""

    def __init__(self):
        self.rng, self.late = np.random.default_rng(3), None

    def __iter__(self):
        self.late = self.late or torch.Generator().manual_seed(5)
        while True:
            x = torch.rand(4, 3, generator=self.late)
            yield x, x.sum(1, keepdim=True) + self.rng.random()


class TakingLater(Taking):
    """Another one, which does not get the count of the first."""


class Stops(Callback):
    """Ends each epoch after five batches."""

    def after_batch(self):
        if self.iter == 4:
            raise CancelTrainException


@pytest.mark.parametrize("place", [2, 8])
def test_a_stream_is_read_again_with_its_generators_as_they_were(place):
    def drawing(cbs):
        torch.manual_seed(0)
        dls = DataLoaders(DataLoader(Drawn(), batch_size=None), device="cpu")
        return Learner(dls, nn.Linear(3, 1), nn.MSELoss(), opt_func=SGD, lr=0.1, cbs=[Stops, *cbs])

    whole, taking = drawing([]), Taking("after_batch", place)
    whole.fit(2)
    drawing([taking]).fit(2)
    again, later = drawing([]), TakingLater("after_batch", 1)
    again.load_state_dict(taking.state)
    with pytest.warns(UserWarning, match=f"{place % 5} batches of this epoch are read again"):
        again.fit(2, cbs=later)
    assert same_weights(again.model, whole.model)
    last = drawing([])
    last.load_state_dict(later.state)  # which was taken in the epoch that went on
    with pytest.warns(UserWarning, match=f"{place % 5 + 1} batches of this epoch are read again"):
        last.fit(2)
    assert same_weights(last.model, whole.model)


class Jitter(Callback):
    def __init__(self, generator):
        self.generator = generator

    def after_loss(self):
        if self.training:
            self.learn.loss_grad = self.loss_grad * torch.rand((), generator=self.generator)


def test_generators_of_data_and_of_arguments_go_on():
    def drawing():
        data = Subset(Noisy(*make_data(12).tensors), range(12))
        dls = DataLoaders(DataLoader(data, 4, collate_fn=Mask()), device="cpu")
        return make_learner(dls, cbs=Jitter(torch.Generator().manual_seed(7)))

    learn = drawing()
    learn.fit(1)
    state = copy.deepcopy(learn.state_dict())
    learn.fit(1)
    again = drawing()
    again.load_state_dict(state)
    again.fit(1)
    assert again.recorder.losses == learn.recorder.losses


def test_an_argument_of_a_callback_is_the_scripts():
    learn = make()
    state = learn.state_dict()
    own = state["rank"]["callbacks"]["Counting"]
    assert own["values"].keys() == {"steps", "seen", "mean"}
    assert "share" not in own["values"]


def test_an_attribute_that_cannot_be_saved_is_left_out():
    learn = make()
    learn.counting.loop, learn.counting.wide = [1], torch.zeros(2**26 + 1)
    learn.counting.loop.append(learn.counting.loop)
    learn.counting.model, learn.counting.weight = learn.model, next(learn.model.parameters())
    assert learn.state_dict()["rank"]["callbacks"]["Counting"]["values"].keys() == {"steps", "seen", "mean"}


def test_an_expanded_tensor_gives_way_to_what_it_became():
    class Rates(Callback):
        def __init__(self):
            self.rates = torch.ones(1).expand(3)

        def after_step(self):
            self.rates = self.rates + torch.arange(3)

    learn, again = make_learner(cbs=Rates()), make_learner(cbs=Rates())
    learn.fit(1)
    again.load_state_dict(copy.deepcopy(learn.state_dict()))
    assert torch.equal(again.rates.rates, learn.rates.rates)


def test_a_list_that_the_user_holds_stays_the_callbacks():
    learn = make()
    seen, state = learn.counting.seen, copy.deepcopy(learn.state_dict())
    learn.fit(1)
    assert seen
    learn.load_state_dict(state)
    assert learn.counting.seen is seen
    assert seen == []


def test_states_of_other_callbacks_are_put_back_with_accumulation():
    taking = Taking("after_batch", 8)
    kwargs = {"cbs": [taking, GradientAccumulation(n_batches=2), EarlyStoppingCallback(patience=5)]}
    first = make(**kwargs)
    first.fit(3, 0.1)
    again = make(seed=1, cbs=[GradientAccumulation(n_batches=2), EarlyStoppingCallback(patience=5)])
    again.load_state_dict(taking.state)
    again.fit(3, 0.1)
    assert same_weights(first.model, again.model)


@pytest.mark.parametrize("event", ["before_train", "before_batch", "after_pred", "after_step", "before_validate"])
def test_no_state_is_taken_where_nothing_could_go_on_from_it(event):
    learn = make(cbs=[Taking(event, 1)])
    with raises(RuntimeError, "learn.state_dict() was called", "in before_fit, after_batch"):
        learn.fit(1)


def test_no_state_is_taken_inside_of_a_step_of_several_batches():
    learn = make(cbs=[Taking("after_batch", 1), GradientAccumulation(n_batches=2)])
    with raises(RuntimeError, "optimizer step of several batches"):
        learn.fit(1)


@pytest.mark.ranks(2)
def test_on_ranks_a_fit_goes_on_from_the_states_that_they_have_taken():
    taking = Taking("after_batch", 4)
    first, again = make(cbs=[taking]), make(seed=1)
    with first.distrib_ctx():
        first.fit_one_cycle(3, 0.1)
    again.load_state_dict(taking.state)
    with again.distrib_ctx():
        again.fit_one_cycle(3, 0.1)
    assert same_weights(first.model, again.model)
    assert again.recorder.losses == first.recorder.losses
    assert again.counting.seen == first.counting.seen
    mine, others = taking.state, distributed.all_gather(taking.state)
    assert all(same(mine[name], other[name]) for other in others for name in mine if name not in ("rank", "callbacks"))
