"""Small models, data and callbacks for the tests."""

import multiprocessing
import sys
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from rank_pool import Results
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    DataLoaders,
    Learner,
    distributed,
)
from learnerkit.events import Event
from learnerkit.state import TRANSIENT

# From Python 3.14 on each worker of a loader would import torch for itself.
multiprocessing.set_forkserver_preload(["torch"])

ROOT = Path(__file__).parents[1]

# Data, models, learners


def mostly_slow(values, *quick, slow=None):
    """The values of a parameter, or tuples of those of several, of which all but some are for `pytest -m slow`.

    If `slow` is given, those are, and the others are for `pytest -m soak`.
    """

    def marked(value):
        mark = pytest.mark.slow if slow is None or value in slow else pytest.mark.soak
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)

    return [value if value in quick else marked(value) for value in values]


def mostly_soak(values, *kept):
    """The values of a parameter, of which all but some are for `pytest -m soak`."""
    return mostly_slow(values, *kept, slow=())


def make_data(n=8, n_in=4, n_out=1, seed=0):
    """Random inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, n_in, generator=generator), torch.randn(n, n_out, generator=generator))


def make_classes(n=8, n_in=4, classes=3, seed=0):
    """Random inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, n_in, generator=generator), torch.randint(classes, (n,), generator=generator))


def make_dls(train=8, valid=4, bs=4, data=make_data, **kwargs):
    """Plain torch loaders in dataset order; `valid=None`: no validation."""
    others = [] if valid is None else [DataLoader(data(valid, seed=1), bs)]
    return DataLoaders(DataLoader(data(train), bs), *others, device="cpu", **kwargs)


def padded(batch):
    """Collate rows of inputs and of classes of any length: the longest of the batch is the length of all."""
    x, y = zip(*batch, strict=True)
    return nn.utils.rnn.pad_sequence(x, True), nn.utils.rnn.pad_sequence(y, True, padding_value=-100)


class Unsized:
    """A loader without length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def make_model(n_in=4, n_out=1, dropout=0.0, seed=0):
    """A small network, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(n_in, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, n_out))


def halves(model):
    """The parameters of each layer of `make_model`'s network: two groups."""
    return [list(model[0].parameters()), list(model[3].parameters())]


class OwnLoss(nn.Module):
    """Makes its own loss."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x, labels):
        pred = self.body(x)
        return {"logits": pred, "loss": nn.functional.mse_loss(pred, labels)}


class KeepsGradients(Learner):
    """Sets gradients to zero rather than remove them."""

    def _zero_grad(self):
        self.opt.zero_grad(set_to_none=False)


class OwnBackward(Learner):
    """Has a backward pass of its own, as it is often written."""

    def _backward(self):
        self.loss_grad.backward()


class TwoOpts(Learner):
    """With an optimizer for each layer of `make_model`'s network."""

    def create_opt(self):
        self.opt = {
            "first": SGD(self.model[0].parameters(), lr=self.lr, momentum=0.9),
            "last": AdamW(self.model[3].parameters(), lr=self.lr),
        }


class TwoAndOne(Learner):
    """With two optimizers, of one group and of two."""

    def create_opt(self):
        first, last = self.model[0], self.model[3]
        return {"a": SGD(first.parameters(), 1.0), "b": AdamW([{"params": [last.weight]}, {"params": [last.bias]}])}


def make_learner(dls=None, model=None, loss_func=None, cls=Learner, **kwargs):
    """A learner: by default two training batches, one of validation, MSE and SGD."""
    kwargs = {"opt_func": torch.optim.SGD, "lr": 0.1} | kwargs
    return cls(dls or make_dls(), model or make_model(), loss_func or nn.MSELoss(), **kwargs)


def step_gradient(learn):
    """What makes the gradient of the step of several batches, or ranks, that is under way; `None`: nothing does."""
    return learn._gradient  # the only place in the tests that knows its name


def end_workers(dls):
    """End persistent workers now, as the end of the loaders would."""
    dls._twins.clear()


def weights(model):
    """A copy of all weights and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def weights_on_ranks(learn):
    """The weights, which are the same on all ranks; a fit has left no gradients and no autocast behind."""
    found = torch.cat([p.detach().reshape(-1) for p in learn.model.parameters()])
    assert all(torch.equal(found, other) for other in distributed.all_gather(found)), "ranks have parted"
    assert isinstance(learn, KeepsGradients) or all(p.grad is None for p in learn.model.parameters())
    assert not torch.is_autocast_enabled("cpu")
    return found


def alone_and_together(make, use, **options):
    """What `use(learn)` leaves on one process and, with these options, on all together: (learner, result) of each."""
    found = []
    for together in (False, True):
        learn = make()
        with learn.no_logging(), warnings.catch_warnings():
            warnings.simplefilter("error" if together else "ignore")  # one of several processes that trains alone
            with learn.distrib_ctx(split_batches=True, **options) if together else nullcontext():
                found.append((learn, use(learn)))
    return found


def read_report(text):
    """(mark, text) of each topic in the report of a check: the lines of several findings in one, and the last line."""
    *lines, verdict = text.splitlines()
    found, topic = {}, ""
    for line in lines:
        if line[:2] not in ("ok", "??", "!!", "--", "  "):  # gloo's, on torch 2.10
            continue
        mark, topic = (line[:2], line[4:16].strip()) if line[:2].strip() else ("", topic)
        earlier = found.get(topic, (mark, ""))
        found[topic] = (earlier[0], f"{earlier[1]} {line[16:].strip()}".strip())
    return found, verdict


def same_weights(a, b):
    """Whether two models, or copies of weights, are equal bit by bit."""
    a, b = (x.state_dict() if isinstance(x, nn.Module) else x for x in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def spy(log, label=None, events=Event, **kwargs):
    """A callback that writes every event it hears into `log`, with its label if it has one."""

    def write(event):
        return lambda cb: log.append(str(event) if label is None else (label, str(event)))

    return Callback(**{event: write(event) for event in events}, **kwargs)


class Seen(Callback):
    """The batches of training and of validation, how many were announced, and the shares of training done."""

    order = 20

    def __init__(self):
        super().__init__()
        self.train, self.valid, self.lengths, self.done, self.steps = [], [], [], [], 0

    def before_batch(self):
        (self.train if self.training else self.valid).append(self.xb[0].clone())
        if self.iter == 0:
            self.lengths.append((self.training, self.n_iter))

    def after_step(self):
        self.steps += 1

    def after_batch(self):
        if self.training:
            self.done.append(self.pct_train)


def raising(event, error, when=lambda cb: True, **kwargs):
    """A callback that raises `error` at an event, once; `when` says at which occurrence."""
    done = []

    def hook(cb):
        if not done and when(cb):
            done.append(True)
            raise error

    return Callback(**{event: hook}, **kwargs)


def notes(error):
    """The notes of an exception."""
    return list(getattr(error, "__notes__", []))


@contextmanager
def raises(error, *parts):
    """Like pytest.raises: each part must be in the error's message or notes, to the letter."""
    with pytest.raises(error) as caught:
        yield
    text = "\n".join([str(caught.value), *notes(caught.value)])
    assert all(part in text for part in parts), text


def results_of(job):
    """A fixture for a module: what a function comes to on each rank, by (number of processes, its argument)."""
    return pytest.fixture(scope="module")(lambda rank_pools: Results(rank_pools, job))


def python():
    """The interpreter for subprocesses."""
    return sys.executable


# A fit by hand

# As the learner makes it; torch's other implementations round differently, on one processor or another.
fused_sgd = partial(SGD, fused=True)


def by_hand(model, loader, epochs, opt, loss_func=F.mse_loss):
    """Train as anyone would without a library."""
    losses = []
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            loss = loss_func(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    return losses


# What is expected to happen


def words(text):
    """The words of a text."""
    return text.split()


TRAIN_BATCH = words("""
    before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch cleanup_batch
""")
VALID_BATCH = words("before_batch after_pred after_loss after_batch cleanup_batch")
TRAIN = ["before_train", *TRAIN_BATCH * 2, "after_train", "cleanup_train"]
VALIDATE = ["before_validate", *VALID_BATCH, "after_validate", "cleanup_validate"]
EPOCH = ["before_epoch", *TRAIN, *VALIDATE, "after_epoch", "cleanup_epoch"]
FIT = ["before_fit", *EPOCH, "after_fit", "cleanup_fit"]
"""An epoch of two training batches and one of validation, as `make_learner` has it."""

EVALUATION = words("before_fit before_epoch") + VALIDATE + words("after_epoch cleanup_epoch after_fit cleanup_fit")

CANCELS = [
    CancelBatchException,
    CancelBackwardException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    CancelEpochException,
    CancelFitException,
]
LEVEL_OF = dict(zip(CANCELS, words("batch backward step train validate epoch fit"), strict=True))


# What a run must leave as it was

COUNTERS = {"n_fits", "epoch", "n_epoch", "start_epoch", "train_iter", "pct_train"}  # how far the last fit came: kept


def state_of(learn):
    """Everything that a run must leave as it was."""
    modules = list(learn.model.modules())
    samplers = [dl.sampler for dl in learn.dls.loaders if isinstance(dl, DataLoader)]
    return {
        "attributes": {
            k: v for k, v in vars(learn).items() if (k[0] != "_" or k in TRANSIENT) and k not in COUNTERS | {"cbs"}
        },
        "model": learn.model,
        "modules": modules,
        "types": [type(m) for m in modules],
        "modes": [m.training for m in modules],
        "loaders": list(learn.dls.loaders),
        "samplers": samplers,
        "generators": [getattr(s, "generator", None) for s in samplers],
        "cbs": list(learn.cbs),
        "flags": [(cb.run, cb.run_train, cb.run_valid, set(vars(cb)) & {"run"}) for cb in learn.cbs],
        "owners": [cb.learn for cb in learn.cbs],
        "gradients": torch.is_grad_enabled(),
    }


def assert_same_state(learn, before, ended_well=False):
    """A run that ended well leaves the model in eval mode; all else is as it was."""
    now = state_of(learn)
    if ended_well:
        assert set(now.pop("modes")) == {False}
        before = {key: value for key, value in before.items() if key != "modes"}
    for key, value in before.items():
        if isinstance(value, dict):
            assert value.keys() == now[key].keys(), key
            assert [k for k in value if value[k] is not now[key][k] and value[k] != now[key][k]] == []
        else:
            assert value is now[key] or value == now[key], key


# Several GPUs, pretended


class Wrapped(nn.DataParallel):
    """DataParallel as it is without GPUs: it calls its module. Stands in for two GPUs."""

    def __init__(self, module, device_ids=None):
        nn.Module.__init__(self)
        self.module, self.device_ids, self.used = module, device_ids, 0

    def forward(self, *args, **kwargs):
        self.used += 1
        return self.module(*args, **kwargs)


class BlockingCopies(TorchDispatchMode):
    """Notes the copies from the host to another device that wait for it; inside a FakeTensorMode no GPU is needed."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        source = args[-1] if func is torch.ops.aten.copy_.default else args[0] if args else None
        if copies and source.device.type == "cpu" != made.device.type and not (kwargs or {}).get("non_blocking"):
            self.found.append(str(func))
        return made


class NoFloat64(TorchDispatchMode):
    """Refuses to make numbers in float64, as MPS does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{func} would be in float64")
        return made
