"""What travels between the kernel and its workers, tried in one process: a learner there, and what a call changes."""

import random
import threading
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from helpers import halves, make_data, make_learner, make_model, mostly_soak, raising
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import LBFGS, SGD, AdamW

from learnerkit import EMA, SWA, Callback, DataLoaders, Hook, Learner, Metric, ReduceLROnPlateau
from learnerkit.notebook import pickling, transfer
from learnerkit.utils import unwrap


def sent(*objects, known=()):
    """The objects as they are read from a file, and the list of what is not copied on the way back, here and there."""
    pickler = pickling.make_pickler(pickling.numbered(known))
    pickler.dump(objects)
    met = list(pickler.met.values())
    pickler.dump(met)
    file, path = pickler.save()
    with file:
        return *pickling.read(path, list(known), 2, mapped=True), met


def carried_out(learn, method, *args, **kwargs):
    """Have a copy of the learner carry out a method, as a worker does, and bring back what that has changed."""
    file, path, shared = transfer.send(transfer.Call(learn, method, args, kwargs, {}), None)
    with file:
        received = transfer.receive(path, print)
        error = result = None
        try:
            result = method(received.call.learn, *received.call.args, **received.call.kwargs)
        except Exception as e:
            error = e
        file, path, _ = transfer.send_back(received, result)
        with file:
            result = transfer.bring_back(path, learn, shared)
    if error is not None:
        raise error
    return result


@pytest.fixture(autouse=True)
def own_options(monkeypatch):
    monkeypatch.setattr(transfer, "set_options", lambda options: None)  # those of this process


def test_tensors_and_objects_that_are_one_stay_one():
    model = nn.Linear(3, 2)
    model.weight.tag = "its own"
    view = model.bias.detach()[1:]
    (holder, again, part), there, here = sent({"model": model, "weights": [model.weight]}, model, view)
    assert holder["model"] is again is not model
    assert holder["weights"][0] is again.weight
    assert isinstance(again.weight, nn.Parameter)
    assert (again.weight.requires_grad, again.weight.tag, part.requires_grad) == (True, "its own", False)
    assert [type(x) for x in here] == [type(x) for x in there]
    assert there[[x is model for x in here].index(True)] is again
    with torch.no_grad():
        again.bias[1] = 7.0
    assert part.item() == 7.0
    assert model.bias[1] != 7.0


def test_what_the_reader_has_already_is_its_own():
    model, lock = nn.Linear(3, 2), object()
    (holder, found), _, _ = sent([model], lock, known=[model, lock])
    assert holder[0] is model
    assert found is lock


def test_parameters_without_a_shape_keep_their_type():
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()).double()
    ((there,), *_) = sent(model)
    for own in (model, there):
        own(torch.ones(3, 4, dtype=torch.float64))
    described = [[(t.dtype, t.shape) for t in (*m.parameters(), *m.buffers())] for m in (model, there)]
    assert described[0] == described[1]


def plain(x):
    """A state in values that can be compared, without times."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.tolist()
    if isinstance(x, dict):
        return {
            k: plain(v)
            for k, v in x.items()
            if not (k in ("time", "_table", "history") or (k == "epoch" and type(v) is not int))
        }
    return [plain(v) for v in x] if isinstance(x, list | tuple) else x


class Growing(nn.Module):
    """Has buffers and attributes that a forward pass changes, and one that is not part of its state dict."""

    def __init__(self):
        super().__init__()
        self.layer, self.steps, self.sizes = nn.Linear(4, 1), 0, []
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("bank", torch.zeros(0))
        self.register_buffer("last", torch.zeros(4), persistent=False)

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.sizes.append(len(x))
            self.seen = torch.cat([self.seen, x[:1, 0]])
            self.bank.data = torch.cat([self.bank, x[:1, 1]])
            self.last.copy_(x[0])
        return self.layer(x)


class Rows(Metric):
    """Counts rows, and how often it was computed."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.add_state("rows", 0.0)

    def update(self, pred, *targets):
        self.rows += len(pred)

    def compute(self):
        self.runs += 1
        return self.rows


class Noting(Callback):
    """Notes each step in a list of the notebook's, and has a new list for each fit."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def after_step(self):
        self.notes.append(self.train_iter)

    def after_fit(self):
        self.row = [len(self.notes)]


def near(pred, target, within):
    return ((pred - target).abs() < within).float().mean()


class Two(Learner):
    """Has two optimizers."""

    def create_opt(self):
        first, second = self.model[0], self.model[3]
        return {"one": SGD(first.parameters(), 0.1, momentum=0.9), "two": AdamW(second.parameters(), 0.01)}


class Heads(Callback):
    """Gives the model a new layer, which it trains, in the first fit."""

    def before_fit(self):
        model = unwrap(self.learn.model)
        if len(model) == 4:
            model.append(nn.Linear(1, 1))
            self.learn.opt.add_param_group({"params": list(model[4].parameters())})


class Replaces(Callback):
    """Puts another model into the learner, and an optimizer for it."""

    def after_fit(self):
        self.learn.model = make_model(seed=5)


class Adversary(Callback):
    """Trains a network of its own, and parameters that are neither in the model nor here alone."""

    def __init__(self, extra):
        super().__init__()
        self.net, self.extra, self.notes, self.kinds = nn.Linear(1, 1), extra, [], {"set": set()}
        self.sgd = SGD([*self.net.parameters(), *extra], 0.1)

    def after_step(self):
        self.sgd.zero_grad()
        (self.net(self.pred.detach()).mean() + self.extra[0].square().sum()).backward()
        self.sgd.step()
        self.notes.append(self.train_iter)
        self.kinds["set"].add(self.epoch)


class Turning(torch.utils.data.Sampler):
    """Turns its order around in the first epoch of all."""

    def __init__(self, n):
        self.order, self.epochs = list(range(n)), 0

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        if not self.epochs:
            self.order.reverse()
        self.epochs += 1
        return iter(self.order)

    def state_dict(self):
        return {"order": list(self.order), "epochs": self.epochs}

    def load_state_dict(self, state):
        self.order, self.epochs = list(state["order"]), state["epochs"]


def lazy():
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))


def shuffled():
    train = torch.utils.data.DataLoader(make_data(16), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    return with_valid(train)


def turning():
    return with_valid(torch.utils.data.DataLoader(make_data(16), 4, sampler=Turning(16)))


def with_valid(train):
    return DataLoaders(train, torch.utils.data.DataLoader(make_data(8, seed=1), 4), device="cpu")


LEARNERS = {
    "plain": {},
    "lazy": {"model": lazy},
    "growing": {"model": Growing},
    "ema": {"cbs": lambda: [EMA(decay=0.9)]},
    "swa": {"cbs": lambda: [SWA(start=0)]},
    "new head": {"cbs": lambda: [Heads()]},
    "two": {"cls": Two},
    "sampler": {"dls": turning},
    "groups": {"splitter": halves, "wd": 0.1},
    "lbfgs": {"opt_func": partial(LBFGS, lr=0.1, max_iter=2)},
    "metric": {"metrics": lambda: {"rows": Rows(), "near": partial(near, within=1.0)}},
    "plateau": {"cbs": lambda: [ReduceLROnPlateau(patience=1, min_delta=9.0)]},
    "replaced": {"cbs": lambda: [Replaces()]},
    "adversary": {"cbs": lambda: [Adversary([nn.Parameter(torch.ones(2))])]},
}


def make(name):
    torch.manual_seed(1)
    given = LEARNERS[name]
    made = {key: given[key]() for key in ("model", "cbs", "metrics", "dls") if key in given}
    defaults = {"dls": shuffled(), "model": make_model(), "opt_func": partial(SGD, momentum=0.9)}
    learn = make_learner(**(defaults | given | made))
    learn.recorder.add_time = False  # the times of two runs may differ
    return learn


def fits(run):
    run(Learner.fit, 2, 0.1)
    found = run(Learner.get_preds), run(Learner.validate)
    with pytest.raises(ZeroDivisionError):
        run(Learner.fit, 1, 0.1, cbs=raising("after_step", ZeroDivisionError, lambda cb: cb.train_iter == 3))
    return found


def tuned(run):
    run(Learner.fine_tune, 1, 0.1)
    return run(Learner.lr_find, num_it=12, show_plot=False)


def assert_as_here(name, runs):
    """A learner whose calls workers carry out is afterwards as one that has carried them out itself."""
    here, there = make(name), make(name)
    model, weight = there.model, next(there.model.parameters())
    torch.manual_seed(2)
    expected, state = runs(lambda method, *args, **kwargs: method(here, *args, **kwargs)), here.state_dict()
    torch.manual_seed(2)
    found = runs(lambda method, *args, **kwargs: carried_out(there, method, *args, **kwargs))
    there_state = there.state_dict()
    assert plain(there_state) == plain(state)
    assert plain(found) == plain(expected)
    if name != "replaced":
        assert there.model is model
        assert next(model.parameters()) is weight or name == "lazy"
    return here, there


@pytest.mark.parametrize("name", mostly_soak(LEARNERS, "lazy", "growing", "adversary"))
def test_a_learner_is_afterwards_as_if_it_had_run_here(name):
    here, there = assert_as_here(name, fits)
    if name == "metric":
        assert there.metrics["rows"].runs == here.metrics["rows"].runs == 3
    if name == "sampler":
        assert vars(there.dls.train.sampler) == vars(here.dls.train.sampler)
    if name == "adversary":
        one, other = here.adversary, there.adversary
        assert plain([*one.net.parameters(), *one.extra]) == plain([*other.net.parameters(), *other.extra])
        assert other.sgd.param_groups[0]["params"][0] is other.net.weight
        assert plain(one.sgd.state_dict()) == plain(other.sgd.state_dict())
        assert (one.notes, one.kinds) == (other.notes, other.kinds)
    other, own = (dict(x.model.named_buffers()) for x in (here, there))
    assert plain(own) == plain(other)  # also those that a state dict has not
    for one, another in zip(here.model.modules(), there.model.modules(), strict=True):
        assert type(one) is type(another)
        assert [vars(one).get(k) for k in ("steps", "sizes")] == [vars(another).get(k) for k in ("steps", "sizes")]


class Annealed:
    """A loss that counts its calls and draws."""

    def __init__(self):
        self.step, self.generators = 0, [random.Random(0), np.random.default_rng(0), torch.Generator()]
        self.first = random.Random(0)

    def __call__(self, pred, y):
        self.step += 1
        self.first.random()
        return F.mse_loss(pred, y) * self.step


def test_a_parametrized_model_trains_there_as_here():
    def learner():
        torch.manual_seed(1)
        model = nn.Sequential(weight_norm(nn.Linear(4, 4)), spectral_norm(nn.Linear(4, 1)))
        return make_learner(dls=shuffled(), model=model, opt_func=partial(SGD, momentum=0.9))

    here, there = learner(), learner()
    kinds = [type(m) for m in there.model.modules()]
    torch.manual_seed(2)
    here.fit(2, 0.1)
    torch.manual_seed(2)
    carried_out(there, Learner.fit, 2, 0.1)
    assert plain(there.model.state_dict()) == plain(here.model.state_dict())
    assert [type(m) for m in there.model.modules()] == kinds
    assert there.model[0].weight.tolist() == here.model[0].weight.tolist()


def test_what_a_loss_counts_and_draws_comes_back():
    losses = Annealed(), Annealed()
    firsts = [loss.first for loss in losses]
    here, there = losses
    make_learner(loss_func=here).fit(1, 0.1)
    learn = make_learner(loss_func=there)
    carried_out(learn, Learner.fit, 1, 0.1)
    assert learn.loss_func is there
    assert there.step == here.step > 0
    assert [loss.first for loss in losses] == firsts
    assert firsts[1].getstate() == firsts[0].getstate() != random.Random(0).getstate()


def test_a_cached_function_of_a_cell_is_sent_with_what_it_calls():
    @lru_cache(maxsize=3)
    def double(n):
        return 2 * n

    double.__module__ = "__main__"
    ((copy,), _, _) = sent(double)
    assert (copy(2), copy(2)) == (4, 4)
    assert copy.cache_info()[:3] == (1, 1, 3)
    assert double.cache_info().currsize == 0
    ((known,), _, _) = sent(cached)
    assert known is cached  # by its name, as a function of a module


@lru_cache
def cached(n):
    return n


class Damaged(Exception):
    def __init__(self, file, line):
        super().__init__(f"{file} is damaged in line {line}")
        self.line = line


class Wrapped(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")


def test_an_error_arrives_as_what_it_is():
    unicode = UnicodeDecodeError("utf-8", b"a", 0, 1, "because")
    for error in (Damaged("a.csv", 3), Wrapped(5), unicode, OSError(2, "gone"), ValueError("x")):
        error.add_note("a note")
        found = pickling.load_error(pickling.dump_error(error))
        assert (type(found), str(found), found.__notes__) == (type(error), str(error), ["a note"])
        assert getattr(found, "line", 0) == getattr(error, "line", 0)
    assert pickling.dump_error(ValueError(threading.Lock())) == b""


@pytest.mark.slow
def test_frozen_layers_and_suggested_rates_come_back():
    here, there = assert_as_here("groups", tuned)
    assert plain(there.recorder.lr_find_curve) == plain(here.recorder.lr_find_curve)
    for learn, run in ((here, Learner.fit), (there, partial(carried_out, there, Learner.fit))):
        learn.freeze()
        run(*([learn] if learn is here else []), 1, 0.1)
    assert not there.model[0].weight.requires_grad
    assert plain(there.state_dict()) == plain(here.state_dict())


class Hooking(Callback):
    """It hears of the layers in a fit, as callbacks of fastai do, and of the first one from its first fit on."""

    lasting = None

    def before_fit(self):
        self.calls = 0
        self.lasting = self.lasting or self.model[0].register_forward_hook(self.count)
        self.handles = [layer.register_forward_hook(self.count) for layer in self.model]

    def count(self, *args):
        self.calls += 1

    def after_fit(self):
        for handle in self.handles:
            handle.remove()


def test_hooks_stay_those_of_their_owners():
    learn = make("plain")
    learn.add_cb(Hooking())
    first, hook = learn.model[0], Hook(learn.model[0])
    for _ in range(2):
        carried_out(learn, Learner.fit, 1, 0.1)
        assert learn.hooking.calls > 0
        assert len(hook.stored) > 1  # of a batch
    learn.model(make_data().tensors[0][:1])
    assert len(hook.stored) == 1
    assert len(first._forward_hooks) == 2
    hook.remove()
    learn.hooking.lasting.remove()
    assert not first._forward_hooks


def test_hooks_of_parameters_and_optimizers_act_in_a_call():
    learn, steps = make("plain"), []
    first, last = learn.model[0], learn.model[-1]
    before = [p.detach().clone() for p in (first.weight, last.weight)]
    handle = first.weight.register_hook(lambda grad: 0 * grad)
    last.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    carried_out(learn, Learner.fit, 1, 0.1)
    assert all(torch.equal(p, q) for p, q in zip((first.weight, last.weight), before, strict=True))
    handle.remove()
    learn.opt.register_step_post_hook(lambda opt, args, kwargs: learn.steps.append(1))
    learn.steps = steps
    carried_out(learn, Learner.fit, 1, 0.1)
    assert not torch.equal(first.weight, before[0])
    assert len(steps) == learn.train_iter


def test_what_a_call_replaces_stays_what_it_was():
    learn, notes = make("plain"), []
    learn.add_cb(Noting(notes))
    carried_out(learn, Learner.fit, 1, 0.1)
    rates, count, row = learn.recorder.lrs, len(notes), learn.noting.row
    carried_out(learn, Learner.fit, 1, 0.2)
    assert set(rates) == {0.1}
    assert set(learn.recorder.lrs) == {0.2}
    assert learn.noting.notes is notes
    assert len(notes) == 2 * count
    assert (row, learn.noting.row) == ([4], [8])


def test_what_cannot_be_pickled_is_named_and_the_rest_comes_back():
    learn, lock = make("plain"), threading.Lock()
    learn.add_cb(Callback(after_fit=lambda cb: setattr(cb, "lock", threading.Lock())))
    with pytest.warns(UserWarning, match=r"could not come back .*: Callback.lock \(cannot be pickled\)"):
        carried_out(learn, Learner.fit, 1, 0.1)
    assert learn.train_iter == 4
    learn.add_cb(Callback(after_fit=lambda cb: lock.locked()))
    with pytest.raises(TypeError, match=r"^learn\.\S+, a lock, cannot be sent|^lock \(used by .*\), a lock, cannot"):
        carried_out(learn, Learner.fit, 1, 0.1)
