"""Jobs for test_sharded_on_ranks.py, which train on shards of a model, and by one process what they have to equal."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from model_jobs import CentreLoss, ignored
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import learnerkit
from learnerkit import Callback, DataLoaders, Learner, distributed, set_seed
from learnerkit.parallel import DriftCheck

CLASSES = 3


def make_data(n: int = 17, seed: int = 0) -> TensorDataset:
    """At 8 samples a batch the last one of 17 has a single sample, so that some ranks have none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 13, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :CLASSES] + 0.3).argmax(1))


class Block(nn.Module):
    """With widths that no number of ranks divides."""

    def __init__(self, width: int = 29, inner: int = 37) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """The blocks are its units; what is before and after them is in none."""

    def __init__(self, block: Callable[..., nn.Module] = Block, n: int = 2, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(13, 29)
        self.blocks = nn.ModuleList(block() for _ in range(n))
        self.head = nn.Linear(29, classes)
        self.double()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Checks(Callback):
    """The model is in shards while it trains, the gradients and the optimizer's state with it."""

    order = 65

    def before_step(self):
        shards = self.learn.shards
        assert (shards is not None) is (distributed.world_size() > 1)
        if shards is None:
            return
        for name, p in self.learn.model.named_parameters():
            assert hasattr(p, "full_tensor") is (p.numel() > 0 < p.ndim), name
            assert p.grad is None or hasattr(p.grad, "full_tensor") is (p.numel() > 0 < p.ndim), name
        for opt in self.learn.opts:
            for p in filter(lambda p: hasattr(p, "full_tensor"), opt.state):
                for key, value in opt.state[p].items():
                    if isinstance(value, torch.Tensor) and value.shape == p.shape and p.ndim:
                        assert hasattr(value, "full_tensor"), key


def learner(model=None, loss=None, cls=Learner, dls=None, n=17, cbs=None, **kwargs) -> Learner:
    """A learner of a `Net`: three batches of training, the last of one sample, and two of validation."""
    dls = dls or DataLoaders.from_datasets(make_data(n), make_data(6, seed=1), bs=8, valid_bs=4, device="cpu")
    kwargs = {"opt_func": partial(optim.SGD, momentum=0.9, weight_decay=0.01), "lr": 0.05} | kwargs
    cbs = [] if cbs is None else list(cbs) if isinstance(cbs, list) else [cbs]
    return cls(dls, Net() if model is None else model, loss or nn.CrossEntropyLoss(), cbs=[Checks(), *cbs], **kwargs)


def twice(learn: Learner) -> Any:
    """Train two epochs."""
    learn.fit(2)


class Job(NamedTuple):
    """What makes a learner, what is done with it in the context, and the context's options."""

    make: Callable[[], Learner]
    use: Callable[[Learner], Any]
    options: dict[str, Any]


JOBS: dict[str, Job] = {}


def job(name: str, use: Callable[[Learner], Any] = twice, **options: Any) -> Callable:
    """Register a function that makes a learner."""

    def register(make: Callable[[], Learner]) -> Callable[[], Learner]:
        JOBS[name] = Job(make, use, options)
        return make

    return register


def done(job: Job, options: dict[str, Any] | None) -> dict[str, Any]:
    """What a job comes to on this rank, with all others (with the options of the context) or alone (`None`)."""
    set_seed(42)
    if options is None:
        with distributed.alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each process trains alone here, which is meant
            return results(job, job.make())
    learn = job.make()
    before = dict(learn.model.named_parameters()), hooks(learn.model), [type(m) for m in learn.model.modules()]
    with learn.distrib_ctx(**{"split_batches": True, "timeout": 20, "sync_bn": False} | options | job.options):
        found = results(job, learn)
    after = dict(learn.model.named_parameters()), hooks(learn.model), [type(m) for m in learn.model.modules()]
    assert learn.shards is None
    assert before[0].keys() == after[0].keys()
    assert all(p is after[0][name] for name, p in before[0].items())
    assert before[1:] == after[1:]
    return found


def hooks(model: nn.Module) -> dict:
    """Everything that runs with a module or its parameters."""
    of_modules = {
        (name, key): dict(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key.endswith("hooks")
    }
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return of_modules | {
        (name, kind): dict(getattr(p, kind) or {}) for name, p in model.named_parameters() for kind in kinds
    }


def results(job: Job, learn: Learner) -> dict[str, Any]:
    """The numbers of a learner after a job's use."""
    with learn.no_logging(), learn.no_bar():
        found = job.use(learn)
    state = {f"model.{k}": v for k, v in learn.model.state_dict().items()}
    if isinstance(learn.loss_func, nn.Module):
        state |= {f"loss.{k}": v for k, v in learn.loss_func.state_dict().items()}
    recorder = getattr(learn, "recorder", SimpleNamespace(losses=0, values=0, lrs=0, hps=0))
    return {
        "found": found,
        "state": {k: v.clone() for k, v in state.items()},
        "opts": [copy.deepcopy(opt.state_dict()["state"]) for opt in learn.opts],
        "losses": recorder.losses,
        "values": recorder.values,
        "lrs": recorder.lrs,
    }


def equal(found: Any, expected: Any, where: str) -> None:
    """Compare nested values."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10, equal_nan=True, msg=lambda m: f"{where}: {m}")


def check(name: str) -> None:
    """On all ranks a job comes to what it comes to on one process; every rank must reach this."""
    one = JOBS[name]
    alone, together = done(one, None), done(one, {"shard": True})
    for key, value in alone.items():
        equal(together[key], value, f"{name}, {key}")
    everyone = distributed.all_gather(together)
    for rank, other in enumerate(everyone):
        torch.testing.assert_close(
            together, other, rtol=0, atol=0, equal_nan=True, msg=lambda m, r=rank: f"{name}, rank {r}: {m}"
        )


# Optimizers

OPTIMIZERS = {
    "SGD": partial(optim.SGD, momentum=0.9, nesterov=True), "Adam": partial(optim.Adam, amsgrad=True),
    "AdamW": optim.AdamW, "NAdam": optim.NAdam, "RAdam": optim.RAdam, "Adamax": optim.Adamax,
    "Adagrad": optim.Adagrad, "Adadelta": optim.Adadelta, "RMSprop": partial(optim.RMSprop, momentum=0.5),
    "ASGD": optim.ASGD, "AdamW, foreach": partial(optim.AdamW, foreach=True, fused=False),
    "Adam, single": partial(optim.Adam, foreach=False, fused=False),
}  # fmt: skip


def two_fits(learn):
    learn.fit(1, wd=0.1)
    learn.fit_one_cycle(1, slice(0.003, 0.02))


for name, opt in OPTIMIZERS.items():

    def make(opt=opt):
        return learner(opt_func=opt, lr=0.01, splitter=parts)

    job(f"optimizer {name}", two_fits)(make)


def parts(model):
    return [list(model.first.parameters()), list(model.blocks.parameters()), list(model.head.parameters())]


# Models


@job("plain", lambda learn: (learn.fit(2), learn.get_preds(), learn.validate()), reshard_after_forward=False)
def _():
    return learner(metrics=[learnerkit.accuracy, learnerkit.perplexity])


@job("fewer rows than ranks")
def _():
    class Thin(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(29, 1), nn.Linear(1, 29)

        def forward(self, x):
            return x + self.up(self.down(x).tanh())

    return learner(Net(Thin), opt_func=optim.AdamW, cbs=[learnerkit.EMA(0.5), learnerkit.GradientClip(0.1)])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(13, 29)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(29, 29)
        self.back = nn.Linear(13, 29)
        self.back.weight = self.first.weight
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.head = self.last
        self.double()

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return (self.head(self.last(h)) @ self.back.weight)[:, :CLASSES]


@job("tied weights and shared modules")
def _():
    return learner(Tied(), opt_func=optim.AdamW, lr=0.01)


class Odd(nn.Module):
    """A block with parameters of all kinds."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.spins = nn.Parameter(torch.randn(29, dtype=torch.float64))
        self.spare = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.block(x) * self.scale + self.spins


@job("0-dim and empty parameters")
def _():
    model = Net(Odd)
    model.total = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    model.register_forward_hook(lambda m, x, y: y * m.total)
    return learner(model, opt_func=optim.AdamW, cbs=[learnerkit.EMA(0.5), learnerkit.GradientClip(0.1)])


class Turn(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(29, 29, dtype=torch.complex128) / 6)

    def double(self):
        return self

    def forward(self, x):
        return x + (x.to(self.w.dtype) @ self.w).abs()


@job("complex parameters")
def _():
    class Turned(Net):
        def double(self):
            for m in (self.first, self.head):
                m.double()
            return self

    return learner(Turned(Turn), opt_func=optim.SGD)


@job("parametrized modules")
def _():
    def block():
        block = Block()
        parametrizations.weight_norm(block.up)
        parametrizations.spectral_norm(block.down)
        return block

    model = Net(block)
    parametrizations.orthogonal(model.first)
    return learner(model)


@job("old weight_norm")
def _():
    def block():
        block = Block()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(block.up)
        return block

    return learner(Net(block))


class Noisy(Net):
    """Buffers: BatchNorm's, and one that is not in the state."""

    def __init__(self):
        super().__init__(lambda: nn.Sequential(nn.Linear(29, 37), nn.BatchNorm1d(37), nn.Linear(37, 29)))
        self.register_buffer("table", torch.linspace(0, 1, 29, dtype=torch.float64), persistent=False)

    def forward(self, x):
        return super().forward(x) + self.table.sum() / 29


def still(cb):
    for m in cb.model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.eval()


@job("buffers")
def _():
    return learner(Noisy(), cbs=Callback(before_batch=still))


@job("a view as output of a unit, and an operation in place after it")
def _():
    class Viewed(Block):
        def forward(self, x):
            return super().forward(x).view(-1, 29)[:, :]

    class InPlace(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
                x += 1
                x.mul_(0.5)
            return self.head(x)

    return learner(InPlace(Viewed))


# Freezing


def frozen_between(learn):
    learn.freeze()
    learn.fit(1)
    learn.unfreeze()
    learn.fit(1)
    learn.freeze_to(1)
    learn.fit(1)


@job("frozen and unfrozen between fits", frozen_between)
def _():
    return learner(splitter=parts, opt_func=optim.AdamW)


@job("fine_tune", lambda learn: learn.fine_tune(1, 0.01))
def _():
    return learner(splitter=parts, opt_func=optim.AdamW)


class FreezePart(Callback):
    """Freezes by what it finds in the model now, or by the parameters that it took before the fit."""

    def __init__(self, event, holds, then, part="blocks"):
        super().__init__(**{event: lambda cb: cb.act()})
        self.holds, self.then, self.part, self.event = holds, then, part, event

    def before_fit(self):
        self.held = list(getattr(self.model, self.part).parameters())
        for p in self.held:
            p.requires_grad_(not self.then)

    def act(self):
        at = (
            self.epoch == 1
            if "epoch" in self.event or "train" in self.event
            else self.training and self.train_iter == 4
        )
        if at:
            for p in self.held if self.holds else getattr(self.model, self.part).parameters():
                p.requires_grad_(self.then)

    def after_fit(self):
        for p in getattr(self.model, self.part).parameters():
            p.requires_grad_(True)


for event in ("before_epoch", "before_batch"):
    for holds in (False, True):
        for then in (False, True):
            for part in ("first", "blocks"):

                def make(event=event, holds=holds, then=then, part=part):
                    return learner(cbs=FreezePart(event, holds, then, part), opt_func=optim.AdamW)

                what = "unfrozen" if then else "frozen"
                job(f"{part} {what} in {event}{', by parameters that are held' if holds else ''}")(make)


# Callbacks of the library

CALLBACKS: dict[str, Callable[[], Any]] = {
    "clip by norm": lambda: learnerkit.GradientClip(0.05),
    "clip each": lambda: learnerkit.GradientClip(0.02, each=True),
    "clip each by the greatest": lambda: learnerkit.GradientClip(0.002, norm_type=float("inf"), each=True),
    "clip by value": lambda: learnerkit.GradientClip(max_value=0.003),
    "clip by another norm": lambda: learnerkit.GradientClip(0.5, norm_type=1.0),
    "clip by the greatest": lambda: learnerkit.GradientClip(0.01, norm_type=float("inf")),
    "EMA": lambda: learnerkit.EMA(0.5),
    "SWA": lambda: learnerkit.SWA(start=0.3),
    "n_batches": lambda: learnerkit.GradientAccumulation(n_batches=2),
    "n_samples": lambda: learnerkit.GradientAccumulation(n_samples=12),
    "accumulated and clipped": lambda: [learnerkit.GradientAccumulation(n_batches=2), learnerkit.GradientClip(0.05)],
    "ValidateEvery": lambda: learnerkit.ValidateEvery(2),
    "DriftCheck": lambda: DriftCheck(every=1),
}  # fmt: skip

for name, cbs in CALLBACKS.items():

    def make(cbs=cbs):
        return learner(cbs=cbs(), metrics=learnerkit.accuracy, opt_func=optim.AdamW, lr=0.01)

    job(name)(make)


@job("EMA of a module", lambda learn: (learn.fit(2), list(learn.model.state_dict().values())))
def _():
    model = Net()
    model.teacher = copy.deepcopy(model.blocks)
    for p in model.teacher.parameters():
        p.requires_grad_(False)
    return learner(model, cbs=learnerkit.EMA(0.5, module=model.teacher, of=model.blocks))


def found_rate(learn):
    found = learn.lr_find(num_it=12, show_plot=False)
    learn.fit(1)
    return list(found)


@job("lr_find", found_rate)
def _():
    return learner()


def checked(learn):
    assert learn.check()
    learn.fit(1)


@job("check", checked)
def _():
    return learner()


# Losses


@job("a loss with parameters")
def _():
    loss = CentreLoss()
    cbs = [learnerkit.GradientClip(0.1), learnerkit.EMA(0.5)]
    return learner(loss=loss, splitter=lambda m: [list(m.parameters()), list(loss.parameters())], cbs=cbs)


@job("a loss with parameters, clipped each and accumulated, with a scaler")
def _():
    loss = CentreLoss()
    cbs = [learnerkit.GradientClip(0.1, each=True), learnerkit.GradientAccumulation(n_batches=2)]
    cbs.append(learnerkit.MixedPrecision("fp16"))  # Autocast leaves numbers of 64 bits as they are.
    return learner(loss=loss, splitter=lambda m: [list(m.parameters()), list(loss.parameters())], cbs=cbs)


@job("loss_weight")
def _():
    def loss(pred, y):
        return F.cross_entropy(pred, y, ignore_index=1)

    return learner(loss=loss, loss_weight=lambda y: (y != 1).sum())


@job("a first batch that counts nothing")
def _():
    return learner(cbs=ignored(0))


@job("a sum")
def _():
    return learner(loss=nn.CrossEntropyLoss(reduction="sum"), lr=0.01)


@job("a loss of the model's weights")
def _():
    def penalise(cb):
        if cb.training:
            cb.learn.loss_grad = cb.loss_grad + 0.1 * sum((p**2).sum() for p in cb.model.head.parameters())

    return learner(cbs=Callback(after_loss=penalise))


# Data


class Stream(IterableDataset):
    """Gives each rank its own part by itself: the last one has more."""

    def __iter__(self):
        assert get_worker_info() is None
        x, y = make_data(17).tensors
        rank, n = distributed.rank(), distributed.world_size()
        first = 5 * rank
        last = 17 if rank == n - 1 else first + 5
        yield from zip(x[first:last], y[first:last], strict=True)


# Unused parameters


class Branches(Net):
    """A part that only some samples use, one that none uses, and units of which a batch may leave out all."""

    def __init__(self, never=True):
        super().__init__(n=4)
        if never:
            self.spare = nn.Linear(2, 2).double()

    def forward(self, x):
        which = (x[:, 0] > 0.8).long() + 2 * (x[:, 1] > 0).long()
        h = self.first(x)
        out = torch.zeros_like(h)
        for i, block in enumerate(self.blocks):
            mine = which == i
            # All units are called, as ranks that gather together must do; the samples of others have no part.
            part = block(h)
            if mine.any():
                out = out + part * mine[:, None]
        return self.head(out)


@job("parts that one rank alone uses")
def _():
    return learner(Branches(), opt_func=optim.AdamW)


@job("parts that one rank alone uses, accumulated and clipped")
def _():
    return learner(
        Branches(),
        opt_func=optim.AdamW,
        cbs=[learnerkit.GradientAccumulation(n_batches=2), learnerkit.GradientClip(0.1)],
    )


class Sometimes(Learner):
    """Leaves a part out in one batch of the second epoch."""

    def _forward(self):
        h = self.model.first(self.x)
        self.pred = self.model.head(h)


@job("a part left out later", find_unused_parameters=True)
def _():
    class Later(Net):
        calls = 0

        def forward(self, x):
            h = self.first(x)
            one, two = self.blocks[0](h), self.blocks[1](h)
            self.calls += self.training
            return self.head(one + (two if self.calls < 4 or not self.training else 0))

    return learner(Later(), opt_func=optim.AdamW)


# Evaluation


class Talks(Net):
    """Has a method that calls the units as often as the sample asks for."""

    @torch.no_grad()
    def generate(self, x, times):
        x = self.first(x)
        for _ in range(times):
            for block in self.blocks[: 1 + times % 2]:
                x = block(x)
        return self.head(x).sum().item()


class GenerateInside(Callback):
    """Generates in validation, on each rank another number of times; what comes out is of the samples alone."""

    def before_fit(self):
        self.said = []

    def after_pred(self):
        if not self.training:
            times = 1 + distributed.rank() + self.iter
            assert isinstance(self.model.generate(self.xb[0], times), float)
            self.said.append(self.model.generate(torch.ones(1, 13, dtype=torch.float64), 2))


@job("a method that calls the units differently often on each rank")
def _():
    return learner(Talks(), cbs=GenerateInside(), metrics=learnerkit.accuracy)


class PredictInside(Callback):
    """Validates and predicts in the middle of training, with batches that other ranks have not."""

    def after_batch(self):
        if self.training and self.train_iter in (2, 4):
            self.said.append(self.learn.validate())
            data = make_data(5 if distributed.world_size() == 1 else 5, seed=4)
            self.said.append(self.learn.get_preds(dl=DataLoader(data, 2))[0])

    def before_fit(self):
        self.said = []


@job(
    "validate and get_preds in a fit",
    lambda learn: (learn.fit(2), next(cb.said for cb in learn.cbs if isinstance(cb, PredictInside))),
)
def _():
    return learner(cbs=PredictInside())


# Hooks


class Hooked(Callback):
    """Hooks of modules and parameters."""

    def before_fit(self):
        self.heard = []
        block = self.model.blocks[0]
        self.handles = [
            block.register_forward_hook(lambda m, x, y: y * 1.1),
            block.up.register_forward_pre_hook(lambda m, x: (x[0] * 0.9,)),
            block.register_full_backward_hook(lambda m, gi, go: (gi[0] * 1.2,)),
            self.model.head.register_full_backward_pre_hook(lambda m, go: (go[0] * 0.8,)),
        ]

    def cleanup_fit(self):
        for handle in self.handles:
            handle.remove()


@job("hooks of modules")
def _():
    return learner(cbs=Hooked())


@job("a hook of a parameter")
def _():
    learn = learner()
    learn.model.blocks[0].up.weight.register_hook(lambda grad: grad * 0.5)
    return learn


def half(p):
    p.grad.mul_(0.5)


@job("a hook of a parameter after accumulation")
def _():
    learn = learner()
    learn.model.blocks[0].up.weight.register_post_accumulate_grad_hook(half)
    return learn


@job("moved to where it is")
def _():
    return learner(cbs=Callback(before_batch=lambda cb: cb.model.to("cpu")))


@job("offload", offload=True)
def _():
    return learner(opt_func=optim.AdamW)


@job("Compile")
def _():
    return learner(cbs=learnerkit.Compile(backend="eager"))


class AsksForSamples(Net):
    """Cannot run on nothing, and says so in the middle of its forward pass."""

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        return self.head(self.blocks[1](x * (x.flatten()[0].item() < 1e9)))


@job("a model that cannot run on nothing")
def _():
    return learner(AsksForSamples())


# Passes of the learner's own


class Networks(nn.Module):
    """A generator and a critic, each a unit; the output is the critic's opinion on what is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.generator = nn.Sequential(nn.Linear(5, 11), nn.ReLU(), nn.Linear(11, 8), nn.Sigmoid()).double()
        self.critic = nn.Sequential(nn.Linear(8, 11), nn.LeakyReLU(0.2), nn.Linear(11, 1)).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))  # whole on every rank

    def forward(self, real, noise):
        return self.critic(self.generator(noise) * self.scale)


def says(logits, real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


class GAN(Learner):
    """Two losses, each with a pass of its own in `_backward`; the parts are called by themselves."""

    def create_opt(self):
        model = self.model
        made = [*model.generator.parameters(), model.scale]
        return {"critic": optim.Adam(model.critic.parameters()), "generator": optim.SGD(made, momentum=0.9)}

    def _forward(self):
        _, noise = self.xb
        self.made = self.model.generator(noise) * self.model.scale
        self.pred = self.model.critic(self.made)

    def _loss(self):
        real, _ = self.xb
        self.critic_loss = says(self.model.critic(real), 1) + says(self.model.critic(self.made.detach()), 0)
        self.loss_grad = says(self.pred, 1)
        self.loss = self.loss_grad.detach()

    def _backward(self):
        self.loss_grad.backward()
        self.opt["critic"].zero_grad()
        self.critic_loss.backward()


class GANInStep(GAN):
    """The critic's loss and step, and then the generator's pass."""

    def _loss(self):
        super()._loss()
        self.loss_grad = self.critic_loss

    def _backward(self):
        Learner._backward(self)

    def _step(self):
        self.opt["critic"].step()
        self.opt["generator"].zero_grad()
        if self.iter % 2 == 0:
            says(self.model.critic(self.made), 1).backward()
            self.opt["generator"].step()


def gan(cls):
    generator = torch.Generator().manual_seed(2)
    real, noise = (torch.randn(17, n, generator=generator, dtype=torch.float64) for n in (8, 5))
    dls = DataLoaders.from_datasets(TensorDataset(real, noise), bs=8, n_inp=2, device="cpu")
    return cls(dls, Networks(), loss_weight="samples", cbs=Checks())


for cls in (GAN, GANInStep):
    job(f"a {cls.__name__} of two units", shard=["generator", "critic"])(partial(gan, cls))
    job(f"a {cls.__name__} with one network in a unit", shard=["critic"])(partial(gan, cls))
