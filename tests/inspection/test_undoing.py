"""What was tried out leaves no trace: weights, optimizer, gradients and random streams are exactly what they were."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from helpers import make_classes, make_learner, same_weights, weights
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from learnerkit import Callback, CheckpointError, DataLoaders
from learnerkit.inspection.undoing import move_to_device, trial, unchanged


class Network(nn.Module):
    """With every kind of tensor that a module can have."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.tied = self.head
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.hidden = self.hidden + 1  # another tensor each time
        self.count += 1
        return self.tied(torch.relu(self.norm(self.body(x))))


def learner(opt_func=AdamW, fitted=True, **kwargs):
    dls = DataLoaders(DataLoader(make_classes(16), 4, shuffle=True), DataLoader(make_classes(8), 4), device="cpu")
    learn = make_learner(dls, Network(), nn.CrossEntropyLoss(), opt_func=opt_func, lr=0.05, **kwargs)
    if fitted:
        learn.fit(1)
    return learn


def facts(learn):
    """Everything that training changes."""
    opt = learn.opt and learn.opt.state_dict()
    grads = {name: p.grad for name, p in learn.model.named_parameters()}
    needs = {name: p.requires_grad for name, p in learn.model.named_parameters()}
    tensors = dict(learn.model.named_parameters()) | dict(learn.model.named_buffers())
    seeds = torch.get_rng_state(), random.getstate(), np.random.get_state()
    loss = dict(learn.loss_func.named_buffers())
    return copy.deepcopy((tensors, opt, grads, needs, seeds, loss))


def same(a, b):
    if isinstance(a, torch.Tensor | np.ndarray):
        return a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def disturb(learn):
    """Train, and change what training alone would not."""
    with learn.no_logging():
        learn.fit(2, 0.3)
    learn.model.head.weight.grad = torch.ones_like(learn.model.head.weight)
    learn.model.body.requires_grad_(False)
    learn.opt.param_groups[0]["extra"] = 1
    random.random()
    np.random.rand()
    torch.rand(1)


@pytest.mark.parametrize("error", [None, ValueError])
@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.parametrize("opt_func", [AdamW, lambda params, lr: SGD(params, lr, momentum=0.9)])
@pytest.mark.parametrize("wd", [None, 0.1])
def test_unchanged_puts_everything_back(opt_func, fitted, wd, error):
    learn = learner(opt_func, fitted, wd=wd)
    learn.model.body.weight.grad = torch.full_like(learn.model.body.weight, 0.5)
    tensors = [id(t) for t in (*learn.model.parameters(), *learn.model.buffers())]
    groups, opt, before = learn.opt and learn.opt.param_groups, learn.opt, facts(learn)
    try:
        with unchanged(learn):
            disturb(learn)
            assert not same(before, facts(learn))
            if error:
                raise error
    except ValueError:
        assert error
    assert same(before, facts(learn))
    assert learn.opt is opt
    assert groups is None or groups is learn.opt.param_groups
    assert [id(t) for t in (*learn.model.parameters(), *learn.model.buffers())] == tensors


class Wide(SGD):
    """Sums up what it does in float64, which torch's own loading would make float32."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            total = self.state[p].setdefault("total", torch.zeros_like(p, dtype=torch.float64))
            total.add_(p.grad, alpha=1 / 3)
        super().step()


def test_an_optimizers_state_is_given_back_in_place_and_in_its_type():
    learn = learner(Wide)
    totals = [learn.opt.state[p]["total"] for p in learn.opt.param_groups[0]["params"]]
    before = copy.deepcopy(totals)
    with unchanged(learn):
        learn.fit(1)
        assert not torch.equal(before[0], totals[0])
    found = [learn.opt.state[p]["total"] for p in learn.opt.param_groups[0]["params"]]
    assert all(a is b and torch.equal(b, c) for a, b, c in zip(totals, found, before, strict=True))


class Lookahead(SGD):
    """Has tensors and a count as attributes."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.n = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.n += 1
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            p.copy_(slow.lerp_(p, 0.5))


class Packed(torch.Tensor):
    """A tensor made of another one, whose `to` shares it, as that of torchao's optimizer states does on the CPU."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape)

    def __init__(self, values):
        self.values_inside = values

    def __tensor_flatten__(self):
        return ["values_inside"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, settings, shape, stride):
        return cls(parts["values_inside"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            args[0].values_inside.copy_(args[1].values_inside)
            return args[0]
        assert func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default)
        return cls(args[0].values_inside)


class PackedSGD(SGD):
    """Counts its steps in a packed tensor."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("steps", Packed(torch.zeros(3))).values_inside.add_(1)


def test_a_state_made_of_other_tensors_is_put_back():
    learn = learner(PackedSGD)
    counts = [state["steps"].values_inside for state in learn.opt.state.values()]
    before = counts[0].clone()
    with unchanged(learn):
        learn.fit(1)
        assert counts[0].sum() > before.sum()
    assert all(torch.equal(count, before) for count in counts)


def test_attributes_of_an_optimizer_are_put_back():
    learn = learner(Lookahead)
    slow, before, n = [*learn.opt.slow], copy.deepcopy(learn.opt.slow), learn.opt.n
    with unchanged(learn):
        learn.fit(1)
        assert learn.opt.n > n
    assert learn.opt.n == n
    assert all(a is b and torch.equal(b, c) for a, b, c in zip(slow, learn.opt.slow, before, strict=True))


def test_training_goes_on_as_if_nothing_had_been():
    losses = []
    for tried in (False, True):
        torch.manual_seed(4)
        learn = learner()
        if tried:
            with unchanged(learn):
                disturb(learn)
        learn.fit(2)
        losses.append((learn.recorder.losses, learn.recorder.values))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("given", [lambda loss: loss, lambda loss: loss.forward, lambda loss: partial(loss.forward)])
def test_a_loss_with_weights_is_moved_and_put_back_too(given):
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    learn = make_learner(
        DataLoaders(DataLoader(make_classes(8), 4), device="cpu"), nn.Sequential(nn.Linear(4, 3)), given(loss)
    )
    with unchanged(learn):
        loss.weight.mul_(2)
    assert loss.weight.tolist() == [1, 1, 1]
    learn.dls = DataLoaders(DataLoader(make_classes(8), 4), device="meta")
    move_to_device(learn)
    assert loss.weight.is_meta


def test_a_list_around_a_loss_function_is_put_back():
    queue = [torch.zeros(4, 1)]

    def loss(pred, target):
        queue.append(pred.detach())
        return nn.functional.mse_loss(pred, target) + torch.cat(queue).mean()

    learn = make_learner(loss_func=loss)
    with unchanged(learn):
        learn.fit(1)
    assert len(queue) == 1
    learn.check()  # also with steps on tensors without values
    learn.fit(1)
    assert all(type(t) is torch.Tensor for t in queue)


def test_the_loaders_and_the_model_that_a_callback_replaces_are_put_back():
    class Later(Callback):
        def before_epoch(self):
            if self.epoch == 1:
                self.learn.dls = DataLoaders(DataLoader(make_classes(8), 4), device="cpu")
                self.learn.model = copy.deepcopy(self.model)

    learn = learner(cbs=Later())
    dls, model = learn.dls, learn.model
    learn.lr_find(num_it=10, show_plot=False)
    assert learn.dls is dls
    assert learn.model is model


class Shuffled(Sampler):
    """Draws from a random generator of its own, which may be of any kind, and shuffles what it shuffled before.

    The generator is found; of the rest it tells by `state_dict`.
    """

    def __init__(self, n, kind):
        self.rows, self.epoch = list(range(n)), 0
        self.array = np.arange(n)
        self.draw = {"python": random.Random, "numpy": np.random.default_rng, "legacy": np.random.RandomState}[kind](0)

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        self.epoch += 1
        self.draw.shuffle(self.rows)
        self.draw.shuffle(self.array)
        return iter([(a + b + self.epoch) % len(self) for a, b in zip(self.rows, self.array.tolist(), strict=True)])

    def state_dict(self):
        return {"rows": list(self.rows), "array": self.array.copy(), "epoch": self.epoch}

    def load_state_dict(self, state):
        self.rows, self.array, self.epoch = list(state["rows"]), state["array"].copy(), state["epoch"]


@pytest.mark.parametrize("kind", ["python", "numpy", "legacy"])
def test_a_sampler_remembers_nothing_of_it(kind):
    orders = []
    for tried in (False, True):
        sampler = Shuffled(16, kind)
        loader = DataLoader(make_classes(16), 4, sampler=sampler)
        learn = make_learner(DataLoaders(loader, device="cpu"), Network(), nn.CrossEntropyLoss())
        if tried:
            with unchanged(learn):
                disturb_data(learn)
        orders.append((list(sampler), list(sampler)))
    assert orders[0] == orders[1]


def disturb_data(learn):
    for _ in range(3):
        list(learn.dls.train)


class Noise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.rand(4) + i, 0


def test_workers_that_persist_have_drawn_nothing():
    def draw(tried):
        torch.manual_seed(5)
        loader = DataLoader(Noise(), 4, num_workers=1, persistent_workers=True)
        learn = make_learner(DataLoaders(loader, device="cpu"), Network(), nn.CrossEntropyLoss())
        if tried:
            with unchanged(learn):
                disturb_data(learn)
        assert learn.dls.train is loader
        learn.dls = None  # a loader in a cycle, which the garbage collector has to find, waits 5 s for its worker
        return torch.cat([x for _ in range(2) for x, _ in loader])

    assert torch.equal(draw(False), draw(True))


class Keeps(nn.Module):
    """With what a module may keep beside its parameters, of which a call changes everything."""

    def __init__(self):
        super().__init__()
        self.body, hidden = nn.Linear(4, 3), nn.Linear(2, 2)
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("after", torch.zeros(1))
        self.register_buffer("computed", torch.ones(1, requires_grad=True) * 2)
        self.rows, self.replaced, self.same = torch.zeros(2, 3), torch.zeros(3), torch.zeros(1)
        self.counts, self.hidden, self.pointer = {"at": [0]}, [hidden], 0
        self.draw, self.graph = np.random.default_rng(0), torch.eye(2).to_sparse()
        with torch.inference_mode():
            self.sealed = torch.ones(1)  # which nobody can write

    def forward(self, x):
        with torch.no_grad():
            self.body.weight.data = self.body.weight.data * 0.5
            self.body.bias.requires_grad_(False).mul_(2)
            self.hidden[0].weight.mul_(2)
            self.computed.mul_(2)
        del self.assigned
        self.register_buffer("assigned", torch.ones(2))
        self.register_buffer("more", torch.ones(2))
        self.rows[0] += 1
        self.replaced = self.replaced + 1
        self.counts["at"].append(1)
        self.counts["more"] = self.pointer = self.pointer + 1
        self.latest = self.draw.random()
        return self.body(x)


class Centre:
    """A loss that is no module, and counts."""

    calls = 0

    def __call__(self, pred, target):
        self.calls += 1
        return nn.functional.cross_entropy(pred, target)


@pytest.mark.parametrize("undone", [unchanged, lambda learn: trial(learn, learn.model)])
def test_a_module_is_put_back_whole(undone):
    model = Keeps()
    dls = DataLoaders(DataLoader(make_classes(8), 4), device="cpu")
    learn = make_learner(dls, model, Centre())

    def state():
        tensors = [*model.parameters(), *model.hidden[0].parameters(), *model.buffers(), model.rows, model.replaced]
        found = [(id(t), t.tolist(), t.requires_grad) for t in tensors]
        names = [name for name, _ in model.named_buffers()]
        counted = (
            copy.deepcopy(model.counts),
            model.pointer,
            vars(learn.loss_func).copy(),
            model.draw.bit_generator.state,
        )
        return found, names, counted, list(vars(model))

    before = state()
    with undone(learn):
        learn.loss_func(model(torch.ones(2, 4)), torch.tensor([0, 1]))
        assert state() != before
    assert state() == before


class Stream(IterableDataset):
    """Goes on where it was, also in what it reads from."""

    def __init__(self):
        self.reader = {"at": 0}

    def __iter__(self):
        while True:
            self.reader["at"] += 1
            yield torch.full((4,), 0.1 * self.reader["at"]), torch.ones(1)

    def state_dict(self):
        return dict(self.reader)

    def load_state_dict(self, state):
        self.reader = dict(state)


class Teacher(Callback):
    """Follows the model, which learns from it; made at the start of the first fit, as DINO's."""

    teacher = None
    steps = 0

    def before_fit(self):
        self.teacher = self.teacher or copy.deepcopy(self.model)

    def after_loss(self):
        self.learn.loss_grad = self.learn.loss_grad + (self.pred - self.teacher(self.x)).square().mean() + self.steps

    def after_step(self):
        self.steps += 1
        for own, followed in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            own.data.lerp_(followed.data, 0.5)

    def state_dict(self):
        return {"teacher": self.teacher.state_dict(), "steps": self.steps}

    def load_state_dict(self, state):
        self.teacher.load_state_dict(state["teacher"])
        self.steps = state["steps"]


@pytest.mark.parametrize("before", [0, 1])
def test_what_has_a_state_is_where_it_was(before):
    found = []
    for tried in (False, True):
        dls = DataLoaders(DataLoader(Stream(), 4), device="cpu")
        learn = make_learner(dls, loss_func=nn.MSELoss(), cbs=Teacher())
        with learn.no_logging():
            for _ in range(before):
                learn.fit(n_steps=3)
            if tried:
                assert learn.check()
                learn.lr_find(num_it=10, stop_div=False, show_plot=False, suggest_funcs=())
            assert learn.teacher.steps == 3 * before
            learn.fit(n_steps=3)
        found.append(weights(learn.model))
    assert same_weights(*found)


class Counted(Dataset):
    """Gives each sample with how often samples were read."""

    def __init__(self):
        self.reads = [0]

    def __len__(self):
        return 8

    def __getitem__(self, i):
        self.reads[0] += 1
        return torch.full((4,), 0.01 * self.reads[0]), torch.ones(1)

    def state_dict(self):
        return {"reads": self.reads[0]}

    def load_state_dict(self, state):
        self.reads = [state["reads"]]


def test_a_dataset_with_a_state_and_an_index_is_what_it_was():
    learn = make_learner(DataLoaders(DataLoader(Counted(), 4), device="cpu"))
    with learn.no_logging():
        learn.fit(1)
    assert learn.check()
    assert learn.dls.train.dataset.reads == [8]


class Ends(IterableDataset):
    """A stream whose state after an epoch is its end, from which it would give nothing more."""

    def __init__(self):
        self.at, self.begin = 0, 0

    def __iter__(self):
        self.at, self.begin = self.begin, 0
        while self.at < 8:
            self.at += 1
            yield torch.arange(4.0), torch.ones(1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]


def test_a_stream_that_has_ended_begins_again():
    learn = make_learner(DataLoaders(DataLoader(Ends(), 4), device="cpu"))
    with learn.no_logging():
        learn.fit(1)
        assert learn.check()
        learn.fit(1)
        assert learn.train_iter == 2


class Odd(nn.Module):
    """With buffers that cannot be written to as a whole, or at all."""

    def __init__(self, sealed=False):
        super().__init__()
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.first = nn.Linear(4, 3)
        if sealed:
            with torch.inference_mode():
                self.register_buffer("sealed", torch.ones(1))
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.first(x * self.wide))


def test_a_graph_from_before_a_trial_can_be_differentiated():
    learn = learner()
    loss = learn.model(torch.randn(4, 4)).sum()
    with trial(learn, learn.model), torch.no_grad():
        learn.model(torch.randn(4, 4))
    loss.backward()
    assert learn.model.body.weight.grad.any()


def test_an_expanded_buffer_is_given_back():
    learn = make_learner(DataLoaders(DataLoader(make_classes(8), 4), device="cpu"), Odd(), nn.CrossEntropyLoss())
    wide, before = learn.model.wide, weights(learn.model)
    with unchanged(learn):
        learn.fit(1)
        wide[:1].mul_(3)
    assert same_weights(before, learn.model)
    assert learn.model.wide is wide
    assert wide.stride() == (0,)


def test_a_skeleton_without_values_is_left_alone():
    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            members = [nn.Linear(4, 3) for _ in range(2)]
            self.weight, self.bias = (
                nn.Parameter(torch.stack(ps)) for ps in zip(*map(nn.Module.parameters, members), strict=True)
            )
            self.skeleton = (members[0].to("meta"),)  # in a tuple, so that it is no part of the network

        def forward(self, x):
            def member(weight, bias):
                return torch.func.functional_call(self.skeleton[0], {"weight": weight, "bias": bias}, (x,))

            return torch.vmap(member)(self.weight, self.bias).mean(0)

    learn = make_learner(DataLoaders(DataLoader(make_classes(8), 4), device="cpu"), Ensemble(), nn.CrossEntropyLoss())
    before = weights(learn.model)
    with unchanged(learn):
        learn.fit(1)
    assert same_weights(before, learn.model)


def test_a_sealed_buffer_is_given_back():
    learn = make_learner(DataLoaders(DataLoader(make_classes(8), 4), device="cpu"), Odd(True), nn.CrossEntropyLoss())
    sealed, before = learn.model.sealed, weights(learn.model)
    with unchanged(learn):
        learn.fit(1)
        with torch.inference_mode():
            sealed.add_(1)
    assert same_weights(before, learn.model)
    assert learn.model.sealed is sealed


@pytest.mark.parametrize("before", [0, 1])
def test_what_cannot_be_given_back_does_not_stop_the_rest(before):
    class Refusing(Callback):
        steps = 0

        def after_step(self):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            raise OSError("no")

    learn = learner(fitted=before, cbs=Refusing())
    opt, before = learn.opt, facts(learn)
    with pytest.raises(CheckpointError, match=r"Refusing.load_state_dict\(\) did not take"), unchanged(learn):
        learn.fit(1)
    assert learn.opt is opt
    assert same(before[:4], facts(learn)[:4])


def test_a_lazy_module_must_have_its_shape_first():
    learn = make_learner(model=nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)))
    with (
        pytest.raises(ValueError, match=r"0\.weight of Sequential has no shape.*learn\.validate\(\)"),
        unchanged(learn),
    ):
        pass
    learn.validate()
    with unchanged(learn):
        learn.fit(1)


def test_the_random_streams_of_all_devices_are_kept(monkeypatch):
    """DataParallel's replicas draw on their own devices."""
    states = {0: "a", 1: "b", 2: "c"}

    class Devices:
        device_count = staticmethod(lambda: 3)
        get_rng_state = staticmethod(states.get)
        set_rng_state = staticmethod(lambda state, i: states.update({i: state}))

    learn = learner(fitted=False)
    move_to_device(learn)
    learn.dls._device = torch.device("cuda", 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Devices)
    with unchanged(learn):
        states.update({0: "x", 1: "y", 2: "z"})
    assert states == {0: "a", 1: "b", 2: "c"}


def lazy_learner(**kwargs):
    return make_learner(model=nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 1)), **kwargs)


def test_lazy_layers_get_their_shapes_before_the_optimizer_is_made():
    shapes = []

    def opt_func(params, lr):
        shapes.extend(p.shape for group in params for p in group["params"])
        return SGD(params, lr)

    learn = lazy_learner(opt_func=opt_func)
    with learn.no_logging():
        learn.fit_one_cycle(1, wd=0.1)
    assert shapes[0] == (3, 4)
    assert learn.model[0].weight.shape == (3, 4)
    learn = lazy_learner()
    with learn.no_logging():
        learn.lr_find(num_it=10, stop_div=False, show_plot=False, suggest_funcs=())
    assert len(lazy_learner().get_preds()[0]) == 4


def test_a_batch_for_lazy_layers_is_not_lost_to_training():
    seen, data = [], make_classes(8)
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    first = next(iter(loader))[0]
    loader.generator.manual_seed(3)
    look = Callback(before_batch=lambda cb: cb.training and seen.append(cb.x.clone()))
    model = nn.Sequential(nn.LazyLinear(3), nn.Dropout(0.5))
    learn = make_learner(DataLoaders(loader, device="cpu"), model, nn.CrossEntropyLoss(), cbs=look)
    with learn.no_logging():
        learn.fit(1)
    assert torch.equal(seen[0], first)
    assert learn.xb == ()


def test_lazy_layers_that_cannot_get_their_shapes_are_named():
    class Odd(nn.LazyLinear):
        def forward(self, x):
            raise TypeError("of another shape")

    with pytest.raises(ValueError, match=r"^weight has no shape.*\(TypeError: of another shape\); run the model on a"):
        make_learner(model=Odd(3)).fit(1)
    once = iter([(torch.ones(2, 4), torch.ones(2, 1))])
    with pytest.raises(ValueError, match="the loader can be read only once; run the model on a batch before the fit"):
        make_learner(DataLoaders(once, device="cpu"), nn.LazyLinear(1)).fit(1)
