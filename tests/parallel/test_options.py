"""What DistributedCallback's options do, and what a step costs, on two processes."""

import os
import warnings
from collections import Counter

import pytest
import torch
from helpers import mostly_slow, mostly_soak, raises, step_gradient
from helpers import weights_on_ranks as weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, distributed
from learnerkit.utils import unwrap

pytestmark = pytest.mark.ranks(2)

N = 2


class Branches(nn.Module):
    """A network with a branch that takes part in the loss only when asked to."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 6), nn.Linear(4, 6)
        self.head = nn.Linear(6, 1)
        self.with_spare = False

    def forward(self, x):
        return self.head(torch.tanh(self.used(x) + (self.spare(x) if self.with_spare else 0)))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.d = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.d(torch.tanh(self.g(x)))


def make_learner(model=None, n=30, bs=4, cbs=None, cls=Learner):
    torch.manual_seed(3)
    x = torch.randn(n, 4, dtype=torch.float64)
    dls = DataLoaders.from_datasets(TensorDataset(x, x.sum(1, keepdim=True).sin()), bs=bs, device="cpu")
    model = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) if model is None else model).double()
    return cls(dls, seeded(model), nn.MSELoss(), opt_func=lambda p, lr: torch.optim.SGD(p, lr, 0.9), lr=0.05, cbs=cbs)


def seeded(model):
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.4)
    return model


def trained(model=None, epochs=1, cbs=None, alone=False, **options):
    """A learner after a fit, and the warnings of it."""
    learn = make_learner(model, cbs=cbs)
    with warnings.catch_warnings(record=True) as caught, learn.no_logging():
        warnings.simplefilter("always")
        if alone:
            learn.fit(epochs)
        else:
            with learn.distrib_ctx(split_batches=True, **options):
                learn.fit(epochs)
    return learn, [str(w.message) for w in caught]


def same(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


# What a step costs


class Collectives(TorchDispatchMode):
    """Counts them, those of DDP's reducer as well."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def collectives(steps, epochs, accumulated=1, learner=make_learner, **options):
    """The collectives of a fit, and the buckets of its DDP."""
    buckets, norms = [], []

    def look(cb):
        sizes = step_gradient(cb.learn).ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        buckets.append(len(sizes.split(",")))

    cbs = [Callback(after_train=look), Callback(before_step=lambda cb: norms.append(1))]
    learn = learner(deep(), n=steps * accumulated * N * 2 - 1, bs=2)  # the last batch is uneven
    cbs += [GradientAccumulation(n_batches=accumulated)] if accumulated > 1 else []
    with learn.distrib_ctx(**options), learn.no_logging(), Collectives() as found:
        learn.fit(epochs, cbs=cbs)
    assert len(norms) == steps * epochs
    return found.counts, buckets[-1]


def deep():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)), nn.Linear(4, 1))


def ddp_buckets(**options):
    """The buckets that DDP itself makes of the same network."""
    model = DDP(deep().double(), **options)
    for _ in range(3):
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    return len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))


@pytest.mark.parametrize(
    ("accumulated", "options"),
    mostly_soak(
        [(1, {}), (3, {}), (1, {"bucket_cap_mb": 0.0004}), (2, {"bucket_cap_mb": 0.0004})],
        (1, {}), (2, {"bucket_cap_mb": 0.0004}),
    ),
    ids=["plain", "accumulated", "buckets", "buckets-accumulated"],
)  # fmt: skip
def test_a_step_costs_one_reduction_of_each_bucket(accumulated, options):
    few, _ = collectives(4, 1, accumulated, **options)
    many, buckets = collectives(9, 1, accumulated, **options)
    assert many - few == {"allreduce_.default": 5 * buckets}, (many - few, buckets)
    assert few.keys() == many.keys()
    assert buckets == ddp_buckets(**options)
    assert (buckets > 2) == bool(options), buckets


def with_buffer(model, **sizes):
    model.register_buffer("sent", torch.zeros(1))
    return make_learner(model, **sizes)


@pytest.mark.parametrize("learner", mostly_slow([make_learner, with_buffer], with_buffer))
@pytest.mark.slow
def test_micro_batches_cost_no_collectives(learner):
    """Three times as many micro-batches for as many steps take as many collectives."""
    assert collectives(4, 2, 2, learner)[0] == collectives(4, 2, 6, learner)[0]


def test_accumulation_outside_the_context_takes_means_too():
    """Each process then trains by itself, and its steps are means as well."""
    found = []
    for n, bs in ((1, 12), (3, 4)):
        learn = make_learner(bs=bs)
        with warnings.catch_warnings(), learn.no_logging():
            warnings.filterwarnings("ignore", message=".* each train a whole copy")
            learn.fit(1, cbs=GradientAccumulation(n_batches=n))
        found.append(weights(learn))
    assert same(*found)


# Parameters that take no part


def test_r37_unused_parameters_are_found_and_named():
    alone, _ = trained(Branches(), alone=True)
    expected = weights(alone)

    ways = []
    look = Callback(after_train=lambda cb: ways.append(type(step_gradient(cb.learn)).__name__))
    learn = make_learner(Branches(), cbs=look)
    learn.lr = 0.05

    def told(epochs=1, **options):
        with warnings.catch_warnings(record=True) as caught, learn.no_logging():
            warnings.simplefilter("always")
            with learn.distrib_ctx(split_batches=True, **options):
                learn.fit(epochs)
        found = [str(w.message) for w in caught if "find_unused_parameters" in str(w.message)]
        assert distributed.is_main() or not found
        return found if distributed.is_main() else None

    message = "find_unused_parameters=True was chosen: the loss does not depend on spare.weight, spare.bias"
    assert told() in (None, [message])
    assert same(weights(learn), expected)
    learn.model.spare.requires_grad_(False)
    assert told() in (None, [])
    learn.model.spare.requires_grad_(True)
    learn.model.with_spare = True
    assert told() in (None, [])
    learn.model.with_spare = False
    assert told() in (None, [message])
    assert told(find_unused_parameters=True) in (None, [])
    assert ways == ["Deferred", "Overlapped", "Overlapped", "Deferred", "Deferred"]
    before = weights(learn)
    with raises(RuntimeError, "spare.weight, spare.bias", "freeze them"):
        told(find_unused_parameters=False)
    assert torch.equal(weights(learn), before)
    learn.model.spare.requires_grad_(False)
    told(find_unused_parameters=False)
    assert not torch.equal(weights(learn), before)


def test_torchs_own_warning_of_unused_parameters_is_not_printed(tmp_path):
    """It comes from C++, where all parameters are used after all."""
    file = tmp_path / f"stderr-{distributed.rank()}"
    before = os.dup(2)
    with file.open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    model = Branches()
    model.with_spare = True
    trained(model, find_unused_parameters=True)
    trained(Branches())
    os.dup2(before, 2)
    os.close(before)
    assert "find_unused_parameters=True was specified in DDP constructor" not in file.read_text()


def test_r37_parameters_unused_in_a_later_batch_are_named():
    """Used in the first batch, unused in a later one: DDP's error comes with the names."""

    class Drop(Callback):
        def before_batch(self):
            unwrap(self.learn.model).with_spare = self.iter < 2

    learn = make_learner(Branches(), cbs=Drop())
    with learn.distrib_ctx(), learn.no_logging(), raises(RuntimeError, "spare.weight, spare.bias"):
        learn.fit(1)


class Thaw(Callback):
    """Trains the head first, then everything, then without the branch."""

    def before_epoch(self):
        model = unwrap(self.learn.model)
        model.used.requires_grad_(self.epoch > 0)
        model.spare.requires_grad_(self.epoch == 1)
        model.with_spare = True


@pytest.mark.slow
def test_parameters_may_be_frozen_between_epochs():
    alone, _ = trained(Branches(), 3, Thaw(), alone=True)
    expected = weights(alone)
    for cbs in ([Thaw()], [Thaw(), GradientAccumulation(n_batches=1)]):
        learn, told = trained(Branches(), 3, cbs)
        assert same(weights(learn), expected)
        assert not told


def froze(event, n, ranks, **options):
    """What the nth event raises on this rank, where it freezes a layer on some ranks; `''`: nothing."""
    seen = []

    def freeze(cb):
        seen.append(event)
        if len(seen) == n and distributed.rank() in ranks:
            unwrap(cb.learn.model).used.requires_grad_(False)

    try:
        trained(Branches(), 2, Callback(**{event: freeze}), **options)
    except RuntimeError as error:  # PeerError is one
        return str(error)
    return ""


FROZEN = {  # when, and what the rank says that the others do not have frozen it with
    "before the first batch": ("before_epoch", 1, "only some ranks train used.weight, used.bias: freeze the same"),
    "in an epoch": ("before_batch", 3, "rank 1 has frozen or unfrozen used.weight, used.bias, and another rank"),
    "in the first batch": ("after_pred", 1, "rank 1 has frozen or unfrozen used.weight, used.bias, and another rank"),
    "between epochs": ("after_train", 1, "rank 1 has frozen or unfrozen used.weight, used.bias, and another rank"),
}


@pytest.mark.soak
def test_parameters_are_frozen_on_all_ranks_or_on_none():
    for event, n, said in FROZEN.values():
        for options in ({}, {"find_unused_parameters": True}):
            assert froze(event, n, {0, 1}, **options) == ""
            assert said in froze(event, n, {1}, **options), (event, options)


# DDP's own options


DDP_OPTIONS = {
    "gradients as views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "static graph": {"static_graph": True},
    "several": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001, "find_unused_parameters": True},
}


@pytest.mark.parametrize("name", mostly_slow(DDP_OPTIONS, "several"))
@pytest.mark.slow
def test_ddps_own_options_reach_it_and_change_no_number(name):
    options = DDP_OPTIONS[name]
    exact, _ = trained()
    seen = []
    look = Callback(after_train=lambda cb: seen.append(getattr(step_gradient(cb.learn), "ddp", None)))
    learn, told = trained(cbs=look, **options)
    assert same(weights(learn), weights(exact))
    assert not [t for t in told if "find_unused" not in t], told
    assert (seen[0] is None) == ("find_unused_parameters" in options)
    assert all(getattr(seen[0], k, v) == v for k, v in options.items())
    if "static_graph" in options:
        with raises(ValueError, "static_graph=True and GradientAccumulation do not go together"):
            trained(cbs=GradientAccumulation(n_batches=2), **options)
    else:
        exact, _ = trained(cbs=GradientAccumulation(n_batches=3))
        learn, _ = trained(cbs=GradientAccumulation(n_batches=3), **options)
        assert same(weights(learn), weights(exact))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        pytest.param("bf16", 0.01, marks=pytest.mark.soak),
        pytest.param("fp16", 0.001, marks=pytest.mark.slow),
        pytest.param("powersgd", 0.2, marks=pytest.mark.slow),
    ],
)
def test_communication_hooks_come_near_the_exact_numbers(name, near):
    for n in (1, 2):
        plain, _ = trained(epochs=4, cbs=GradientAccumulation(n_batches=n))
        exact, loss = weights(plain), plain.recorder.values[-1][0]
        learn, told = trained(epochs=4, cbs=GradientAccumulation(n_batches=n), comm_hook=name)
        off = (weights(learn) - exact).abs().max()
        assert 1e-9 < off < near, off
        assert learn.recorder.values[-1][0] < 1.2 * loss, (learn.recorder.values[-1], loss)
        expected = f"comm_hook={name!r} rounds the gradients: the numbers are not those of one process any more"
        assert told == ([expected] if distributed.is_main() else []), told


def test_an_unknown_communication_hook_is_refused():
    with raises(ValueError, "comm_hook='int8'; it takes None, 'bf16', 'fp16', 'powersgd'"):
        make_learner().distrib_ctx(comm_hook="int8")


# Several networks


@pytest.mark.slow
def test_callbacks_see_several_networks_as_they_are():
    exact, _ = trained(Pair())
    inside = []
    look = Callback(after_step=lambda cb: inside.append((type(cb.learn.model), type(cb.learn.model.g))))
    learn, told = trained(Pair(), cbs=look, wrap=("g", "d"))
    assert set(inside) == {(Pair, nn.Linear)}
    assert same(weights(learn), weights(exact))
    learn, _ = trained(Pair(), wrap=("g", "d"), comm_hook="bf16")
    assert 1e-9 < (weights(learn) - weights(exact)).abs().max() < 0.02


def test_networks_that_cannot_be_wrapped_are_named():
    with raises(ValueError, "wrap=('g',) leaves out d.weight, d.bias"):
        trained(Pair(), wrap="g")
    with raises(ValueError, "names 'h'; Pair has ['g', 'd']"):
        trained(Pair(), wrap=("g", "h"))


def test_several_networks_that_one_loss_trains_are_accumulated_exactly():
    exact, _ = trained(Pair(), cbs=GradientAccumulation(n_batches=2), alone=True)
    learn, _ = trained(Pair(), cbs=GradientAccumulation(n_batches=2), wrap=("g", "d"))
    assert same(weights(learn), weights(exact))


def test_a_frozen_network_need_not_be_wrapped():
    def frozen():
        model = Pair()
        model.d.requires_grad_(False)
        return model

    alone, _ = trained(frozen(), alone=True)
    learn, _ = trained(frozen(), wrap="g")
    assert same(weights(learn), weights(alone))


class WithNorm(Pair):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(self.g, nn.BatchNorm1d(4))


def test_several_networks_with_batch_norm_train_on_an_uneven_last_batch():
    """The last batch has two samples, which one rank takes; the other one cannot do without samples either."""
    learn, told = trained(WithNorm(), wrap=("g", "d"), sync_bn=False)
    weights(learn)
    assert all(distributed.same_everywhere(b.tolist()) for b in learn.model.buffers())
    assert all(b.isfinite().all() for b in learn.model.buffers())
    assert not told


class Scaled(Learner):
    """Has a `_backward` of its own, and a weighted loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, loss_weight=lambda y: y.abs().sum(), **kwargs)

    def _loss(self):
        weight = self.y.abs()
        self.loss_grad = ((self.pred - self.y) ** 2 * weight).sum() / weight.sum()
        self.loss = self.loss_grad.detach()

    def _backward(self):
        (self.loss_grad * 0.5).backward()


class Halved(Learner):
    def _backward(self):
        (self.loss_grad * 0.5).backward()


@pytest.mark.parametrize("kind", mostly_slow(["Scaled", "Halved"], "Halved"))
def test_a_backward_of_ones_own_gets_the_exact_mean(kind):
    """A rank without data, which runs along, counts nothing."""
    cls, found = globals()[kind], []
    for on_ranks in (False, True):
        learn = make_learner(n=29, cls=cls)  # the last batch has one sample
        if cls is Halved:
            x, y = learn.dls.train_ds.tensors
            learn.dls.train_ds.tensors = x, (y > 0).long().flatten()
            learn.model[-1] = seeded(nn.Linear(8, 2).double())
            learn.loss_func = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 2.0]).double())
        with warnings.catch_warnings(), learn.no_logging():
            warnings.filterwarnings("ignore", message=".* each train a whole copy")
            if on_ranks:
                learn.to_distributed(split_batches=True)
            learn.fit(2)
        found.append((weights(learn), torch.tensor(learn.recorder.values, dtype=torch.float64)))
    assert all(same(a, b) for a, b in zip(*found, strict=True)), found


@pytest.mark.parametrize("options", [{}, {"wrap": ("g", "d")}], ids=["one network", "two networks"])
def test_ddp_does_not_outlive_the_fit(options):
    """Gradients that are computed afterwards stay on their rank, also after an error that somebody kept."""

    class Fail(Callback):
        def after_pred(self):
            raise ZeroDivisionError

    for cbs in (None, Fail()):
        learn, kept = make_learner(Pair(), cbs=cbs), None
        try:
            with learn.distrib_ctx(**options), learn.no_logging():
                learn.fit(1)
        except ZeroDivisionError as e:
            kept = e
        assert (kept is None) == (cbs is None)
        with Collectives() as found:
            learn.model(torch.ones(1, 4, dtype=torch.float64) * distributed.rank()).sum().backward()
        assert not found.counts, (cbs, found.counts)
        assert not distributed.same_everywhere(learn.model.g.weight.grad.tolist())
