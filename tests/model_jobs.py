"""Jobs with models, losses and optimizers of many kinds, for test_model_jobs.py: the same on any number of ranks."""

import warnings
from collections import namedtuple
from dataclasses import asdict, dataclass
from functools import partial

import torch
from helpers import OwnBackward
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from learnerkit import Callback, CancelBatchException, DataLoaders, GradientAccumulation, Learner, distributed, set_seed

CLASSES = 3


def make_data(n: int = 17, seed: int = 0, inputs: int = 5) -> TensorDataset:
    """At 8 samples a batch the last one of 17 has a single sample, so that some ranks have none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :CLASSES] + 0.3).argmax(1))


def make_loaders(n: int = 17, **kwargs) -> DataLoaders:
    return DataLoaders.from_datasets(make_data(n), make_data(6, seed=1), bs=8, valid_bs=4, device="cpu", **kwargs)


def mlp(*sizes: int) -> nn.Sequential:
    """Layers with an activation between them."""
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


momentum = partial(SGD, momentum=0.9, weight_decay=0.01)


def learner(model: nn.Module | None = None, loss=None, cls=Learner, dls=None, **kwargs) -> Learner:
    kwargs = {"opt_func": momentum, "lr": 0.1} | kwargs
    return cls(dls or make_loaders(), model or mlp(5, 7, CLASSES), loss or nn.CrossEntropyLoss(), **kwargs)


JOBS: dict = {}
"""What makes the learner of a job, by name."""

OPTIONS: dict = {}
"""What a job gives `distrib_ctx`, by name."""


def job(name: str, **options):
    """Register a function that makes a learner."""

    def register(make):
        JOBS[name], OPTIONS[name] = make, options
        return make

    return register


# Losses with parameters


class CentreLoss(nn.Module):
    """Pulls the outputs of each class to a centre that is trained, too."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.arange(CLASSES * CLASSES, dtype=torch.float64).reshape(CLASSES, CLASSES) / 9)

    def forward(self, pred, y):
        return F.cross_entropy(pred, y) + ((pred - self.centres[y]) ** 2).sum(1).mean()


class Weighted(nn.Module):
    """Two losses by weights that are trained."""

    def __init__(self):
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, pred, y):
        first, second = F.cross_entropy(pred, y), (pred**2).mean()
        return (torch.stack([first, second]) * (-self.logs).exp() + self.logs).sum()


@job("loss with parameters, in the splitter")
def _():
    loss = CentreLoss()
    return learner(loss=loss, splitter=lambda m: [list(m.parameters()), list(loss.parameters())])


@job("loss with parameters, weighing two")
def _():
    loss = Weighted()
    return learner(loss=loss, splitter=lambda m: [list(m.parameters()), list(loss.parameters())], opt_func=AdamW)


@job("loss with parameters, in an optimizer of its own")
def _():
    class Own(Learner):
        def create_opt(self):
            return {"model": SGD(self.model.parameters(), lr=0.1), "loss": SGD(self.loss_func.parameters(), lr=0.3)}

    return learner(loss=CentreLoss(), cls=Own)


@job("loss with parameters, trained by a callback")
def _():
    loss = CentreLoss()
    opt = SGD(loss.parameters(), lr=0.3)

    class Train(Callback):
        def after_step(self):
            opt.step()
            opt.zero_grad()

    return learner(loss=loss, cbs=Train())


@job("loss with parameters that nothing trains")
def _():
    return learner(loss=CentreLoss())


@job("loss with parameters, accumulated")
def _():
    loss = CentreLoss()
    cbs = GradientAccumulation(n_batches=2)
    return learner(loss=loss, splitter=lambda m: [list(m.parameters()), list(loss.parameters())], cbs=cbs)


@job("loss with parameters, and a first batch that is cancelled")
def _():
    def leave(cb):
        if cb.training and cb.train_iter == 0:
            raise CancelBatchException

    loss, cbs = CentreLoss(), Callback(before_batch=leave)
    return learner(loss=loss, splitter=lambda m: [list(m.parameters()), list(loss.parameters())], cbs=cbs)


@job("loss function with a parameter")
def _():
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss(pred, y):
        return F.cross_entropy(pred * scale, y)

    return learner(loss=loss, splitter=lambda m: [list(m.parameters()), [scale]])


@job("parameters of the loss inside the model")
def _():
    model = mlp(5, 7, CLASSES)
    model.register_parameter("scale", nn.Parameter(torch.ones(CLASSES, dtype=torch.float64)))
    return learner(model, loss=lambda pred, y: F.cross_entropy(pred * model.scale, y))


# Losses made of more than the output


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.second = mlp(5, 6, 6), mlp(6, CLASSES), mlp(6, 2)

    def forward(self, x):
        self.features = self.body(x)
        return self.head(self.features)

    def score(self, x):
        return self.second(self.body(x))


class AuxiliaryLoss(Learner):
    def _loss(self):
        super()._loss()
        self.loss_grad = self.loss_grad + (self.model.second(self.model.features) ** 2).mean()
        self.loss = self.loss_grad.detach()


@job("auxiliary loss in _loss")
def _():
    return learner(Parts(), cls=AuxiliaryLoss)


@job("forward by parts")
def _():
    class ByParts(Learner):
        def _forward(self):
            features = self.model.body(self.x)
            self.pred = self.model.head(features)
            self.aux = self.model.second(features)

        def _loss(self):
            self.loss_grad = F.cross_entropy(self.pred, self.y) + (self.aux**2).mean()
            self.loss = self.loss_grad.detach()

    return learner(Parts(), cls=ByParts)


class Score(Callback):
    """Adds a loss of its own, by a method of the model."""

    def after_loss(self):
        if self.training:
            self.learn.loss_grad = self.loss_grad + (self.model.score(self.x) ** 2).sum(1).mean()


@job("callback's loss by a method of the model")
def _():
    return learner(Parts(), cbs=Score())


@job("callback's loss by a method of the model, accumulated")
def _():
    return learner(Parts(), cbs=[Score(), GradientAccumulation(n_batches=2)])


@job("callback's loss by a method of the model, find_unused", find_unused_parameters=True)
def _():
    return learner(Parts(), cbs=Score())


@job("callback's loss of a parameter")
def _():
    def penalise(cb):
        if cb.training:
            cb.learn.loss_grad = cb.loss_grad + 0.1 * (cb.model.second[0].weight ** 2).sum()

    return learner(Parts(), cbs=Callback(after_loss=penalise))


def penalise(cb):
    if cb.training:
        cb.learn.loss_grad = cb.loss_grad + 0.1 * sum((p**2).sum() for p in cb.model.parameters())


@job("callback's loss of the model's weights")
def _():
    return learner(cbs=Callback(after_loss=penalise))


def own_pass(event, loss):
    """A callback that makes a backward pass of its own at an event, if it trains."""
    return Callback(**{event: lambda cb: loss(cb).backward()})


def of_weights(cb):
    return 0.1 * sum((p**2).sum() for p in cb.model.parameters())


def of_data(cb):
    return (cb.model.score(cb.x) ** 2).sum(1).mean()


def of_whole_model(cb):
    return (cb.model(cb.x * 1.1) ** 2).sum(1).mean()


@job("callback's own backward pass")
def _():
    return learner(cbs=own_pass("after_backward", of_weights))


@job("callback's own backward pass before the loss's")
def _():
    return learner(Parts(), cbs=own_pass("before_backward", of_data))


@job("callback's own backward pass of the whole model before the loss's")
def _():
    return learner(cbs=own_pass("before_backward", of_whole_model))


@job("callback's own backward pass of the whole model, said before", find_unused_parameters=True)
def _():
    return learner(cbs=own_pass("before_backward", of_whole_model))


@job("callback's own backward pass of the data")
def _():
    return learner(Parts(), cbs=own_pass("after_backward", of_data))


@job("callback's own backward pass of the data, whole model")
def _():
    return learner(cbs=own_pass("before_step", of_whole_model))


@job("learner with a second optimizer")
def _():
    class Own(Learner):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.critic = mlp(CLASSES, 1)
            self.critic_opt = SGD(self.critic.parameters(), lr=0.1)

        def _loss(self):
            super()._loss()
            self.loss_grad = self.loss_grad + (self.critic(self.pred) ** 2).mean()

        def _step(self):
            super()._step()
            self.critic_opt.step()
            self.critic_opt.zero_grad()

    return learner(cls=Own)


@job("another model from the second epoch on")
def _():
    class Replace(Callback):
        def before_epoch(self):
            if self.epoch == 1:
                torch.manual_seed(3)
                self.learn.model = mlp(5, 4, CLASSES)
                self.learn.opt = SGD(self.learn.model.parameters(), lr=0.1)

    return learner(cbs=Replace())


@job("callback calls the model a second time")
def _():
    class Twice(Callback):
        def after_loss(self):
            if self.training:
                self.learn.loss_grad = self.loss_grad + ((self.model(self.x * 1.1) - self.pred) ** 2).sum(1).mean()

    return learner(cbs=Twice())


@job("callback with an optimizer of its own")
def _():
    class Adversary(Callback):
        def __init__(self):
            super().__init__()
            self.net = mlp(CLASSES, 1)
            self.own = SGD(self.net.parameters(), lr=0.1)

        def after_loss(self):
            if self.training:
                self.learn.loss_grad = self.loss_grad + (self.net(self.pred) ** 2).mean()

        def after_step(self):
            self.own.step()
            self.own.zero_grad()

    return learner(cbs=Adversary())


# The model as callbacks see it


@job("the model's attributes")
def _():
    class Look(Callback):
        def before_batch(self):
            model = self.model
            assert isinstance(model, Parts)
            assert model.head[0].out_features == CLASSES
            assert model.score(torch.ones(1, 5, dtype=torch.float64)).shape == (1, 2)
            assert [name.split(".")[0] for name, _ in model.named_children()] == ["body", "head", "second"]
            assert "head.0.weight" in model.state_dict()
            assert "head.0.weight" in dict(model.named_parameters())
            assert model.get_submodule("head.0") is model.head[0]
            model.temperature = self.iter
            model.load_state_dict(model.state_dict())

        def after_pred(self):
            if self.training:
                assert self.learn.model.temperature == self.iter
                model = getattr(self.model, "module", self.model)
                assert model.temperature == self.iter

    class Both(AuxiliaryLoss):
        pass

    return learner(Parts(), cbs=Look(), cls=Both)


@job("a Sequential's items")
def _():
    class Look(Callback):
        def before_batch(self):
            assert isinstance(self.model, nn.Sequential)
            assert len(self.model) == 3
            assert self.model[0].in_features == 5
            assert [type(layer) for layer in self.model] == [nn.Linear, nn.Tanh, nn.Linear]
            assert len(list(self.model.children())) == 3
            assert bool(self.model)

    return learner(cbs=Look())


@job("a callback's average of the weights")
def _():
    class Average(Callback):
        def before_fit(self):
            self.mean = {k: v.clone() for k, v in self.model.state_dict().items()}

        def after_step(self):
            for k, v in self.model.state_dict().items():
                self.mean[k].lerp_(v, 0.3)

        def before_validate(self):
            self.kept = {k: v.clone() for k, v in self.model.state_dict().items()}
            self.model.load_state_dict(self.mean)

        def after_validate(self):
            self.model.load_state_dict(self.kept)

    return learner(cbs=Average())


@job("torch's AveragedModel")
def _():
    class Average(Callback):
        def before_fit(self):
            self.ema = torch.optim.swa_utils.AveragedModel(self.model)

        def after_step(self):
            self.ema.update_parameters(self.model)

        def before_validate(self):
            self.kept, self.learn.model = self.model, self.ema.module

        def after_validate(self):
            self.learn.model = self.kept

    return learner(cbs=Average())


# Optimizers that call the model several times a step


class Closure(Learner):
    """Hands the optimizer a closure."""

    def _step(self):
        def closure():
            self.opt.zero_grad()
            self._forward()
            self._loss()
            self.loss_grad.backward()
            return self.loss_grad

        self.opt.step(closure)


@job("LBFGS")
def _():
    return learner(cls=Closure, opt_func=partial(torch.optim.LBFGS, max_iter=4), wd=None)


@job("LBFGS with a line search")
def _():
    opt = partial(torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")
    return learner(cls=Closure, opt_func=opt)


@job("LBFGS with a sum")
def _():
    return learner(
        cls=Closure, opt_func=partial(torch.optim.LBFGS, max_iter=3), lr=0.02, loss=nn.CrossEntropyLoss(reduction="sum")
    )


@job("a closure for SGD")
def _():
    return learner(cls=Closure)


@job("a closure with _backward")
def _():
    class Own(Learner):
        def _step(self):
            def closure():
                self._zero_grad()
                self._forward()
                self._loss()
                self._backward()
                return self.loss

            self.opt.step(closure)

    return learner(cls=Own, opt_func=partial(torch.optim.LBFGS, max_iter=3))


@job("a closure with a _backward of its own")
def _():
    class Own(OwnBackward, Closure):
        """Both."""

    return learner(cls=Own, opt_func=partial(torch.optim.LBFGS, max_iter=3))


class SAM(Optimizer):
    """Sharpness-aware minimisation as it is usually written."""

    def __init__(self, params, lr=0.1, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.detach().clone()
            p += p.grad * 0.05 / (norm + 1e-12)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.state:
            if "old" in self.state[p]:
                p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class TwoSteps(Learner):
    def _step(self):
        self.opt.first_step()
        self._forward()
        self._loss()
        self.loss_grad.backward()
        self.opt.second_step()


@job("SAM in two steps")
def _():
    return learner(cls=TwoSteps, opt_func=SAM)


@job("SAM by a closure")
def _():
    return learner(cls=Closure, opt_func=SAM)


@job("LBFGS by itself")
def _():
    return learner(opt_func=partial(torch.optim.LBFGS, max_iter=4))


@job("LBFGS by itself, with a line search")
def _():
    return learner(opt_func=partial(torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe"))


@job("LBFGS by itself, with a penalty")
def _():
    return learner(opt_func=partial(torch.optim.LBFGS, max_iter=3), cbs=Callback(after_loss=penalise))


class ClosureSAM(SGD):
    "Sharpness-aware minimisation (Foret et al., arXiv:2010.01412), which needs a closure."

    @torch.no_grad()
    def step(self, closure):
        closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before, norm = [p.clone() for p in params], torch.nn.utils.get_total_norm([p.grad for p in params])
        for p in params:
            p += 0.05 * p.grad / (norm + 1e-12)
        closure()
        for p, value in zip(params, before, strict=True):
            p.copy_(value)
        super().step()


@job("SAM that needs a closure")
def _():
    return learner(opt_func=partial(ClosureSAM, momentum=0.9))


class ByClosure(Learner):
    def _step(self):
        self.opt.step(self.closure())


@job("a closure of the learner's")
def _():
    return learner(cls=ByClosure)


@job("a closure of the learner's, with a _backward of its own")
def _():
    class Own(OwnBackward, ByClosure):
        """Both."""

    return learner(cls=Own, opt_func=partial(torch.optim.LBFGS, max_iter=3))


@job("SAM with unused parameters")
def _():
    return learner(Parts(), cls=TwoSteps, opt_func=SAM)


@job("a _step that clips")
def _():
    class Clip(Learner):
        def _step(self):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            super()._step()

    return learner(cls=Clip, cbs=GradientAccumulation(n_batches=2))


class Penalty(Learner):
    """The norm of the gradient with regard to the input."""

    def _forward(self):
        self.xb = (self.x.detach().requires_grad_(),)
        super()._forward()

    def _loss(self):
        super()._loss()
        if self.training:
            (grad,) = torch.autograd.grad(self.pred.sum(), self.x, create_graph=True)
            self.loss_grad = self.loss_grad + (grad**2).sum(1).mean()


@job("gradient penalty of the input")
def _():
    return learner(cls=Penalty)


@job("gradient penalty of the weights")
def _():
    class OfWeights(Learner):
        def _loss(self):
            super()._loss()
            if self.training and self.batch_size:
                params = list(self.model.parameters())
                grads = torch.autograd.grad(self.pred.sum() / self.batch_size, params, create_graph=True)
                self.loss_grad = self.loss_grad + 0.01 * sum(g.sum() for g in grads)

    return learner(cls=OfWeights)


@job("backward with create_graph")
def _():
    class Graph(Learner):
        def _backward(self):
            params = list(self.model.parameters())
            for p, g in zip(params, torch.autograd.grad(self.loss_grad, params, create_graph=True), strict=True):
                p.grad = g.detach()

    return learner(cls=Graph)


class AuxiliaryBackward(OwnBackward, AuxiliaryLoss):
    """Both."""


@job("a _backward of its own")
def _():
    return learner(cls=OwnBackward)


def ignored(at: int) -> Callback:
    """The loss ignores all targets of a batch."""

    def ignore(cb):
        if cb.training and cb.iter == at:
            cb.learn.yb = (torch.full_like(cb.yb[0], -100),)

    return Callback(before_batch=ignore)


@job("a _backward of its own, and a batch that counts nothing")
def _():
    return learner(cls=OwnBackward, cbs=ignored(1))


@job("a _backward of its own, with unused parameters")
def _():
    return learner(Parts(), cls=OwnBackward)


@job("a _backward of its own, with an auxiliary loss")
def _():
    return learner(Parts(), cls=AuxiliaryBackward)


@job("a _backward of its own, of experts")
def _():
    return learner(Experts(), cls=OwnBackward)


class TwoPasses(Learner):
    def _loss(self):
        super()._loss()
        rows = (self.model.second(self.model.features) ** 2).sum(1)
        self.aux = rows.sum() if self.loss_func.reduction == "sum" else rows.mean()

    def _backward(self):
        self.loss_grad.backward(retain_graph=True)
        self.aux.backward()


@job("a _backward of its own, in two passes")
def _():
    return learner(Parts(), cls=TwoPasses)


@job("a _backward of its own, in two passes, with a sum")
def _():
    return learner(Parts(), cls=TwoPasses, loss=nn.CrossEntropyLoss(reduction="sum"), lr=0.01)


@job("callback's own backward pass of the data, with a sum")
def _():
    own = own_pass("after_backward", lambda cb: (cb.model.score(cb.x) ** 2).sum())
    return learner(Parts(), cbs=own, loss=nn.CrossEntropyLoss(reduction="sum"), lr=0.01)


@job("callback's own backward pass of the data, accumulated")
def _():
    own = own_pass("after_backward", of_weights)
    return learner(Parts(), cbs=[own, GradientAccumulation(n_batches=2)])


@job("a _backward of its own, and a loss with parameters")
def _():
    loss = CentreLoss()
    return learner(cls=OwnBackward, loss=loss, splitter=lambda m: [list(m.parameters()), list(loss.parameters())])


@job("wrapped parts, and a loss with parameters", wrap=("body", "head", "second"))
def _():
    loss = CentreLoss()
    return learner(
        Parts(), cls=AuxiliaryBackward, loss=loss, splitter=lambda m: [list(m.parameters()), list(loss.parameters())]
    )


# Calls of the model


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(5, 6), mlp(12, CLASSES)

    def forward(self, x):
        return self.head(torch.cat([self.body(x), self.body(x.flip(1))], 1))


@job("a part that is called twice")
def _():
    return learner(Siamese())


@job("the model called twice")
def _():
    class Twice(Learner):
        def _forward(self):
            self.pred = self.model(self.x) + self.model(self.x.flip(1))

    return learner(cls=Twice)


@job("the model called twice, with running statistics that are used", sync_bn=False)
def _():
    class Twice(Learner):
        def _forward(self):
            self.model[1].eval()
            self.pred = self.model(self.x) + self.model(self.x.flip(1))

    return learner(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double(), cls=Twice)


@job("lazy layers")
def _():
    class Draw(Callback):
        def before_fit(self):
            assert not any(isinstance(p, nn.UninitializedParameter) for p in self.model.parameters())

    model = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(CLASSES)).double()
    return learner(model, cbs=Draw())


@job("lazy layers with batch norm", sync_bn=False)
def _():
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.LazyLinear(CLASSES)).double()

    def still(cb):
        cb.learn.model[1].eval()

    return learner(model, cbs=Callback(before_batch=still))


@job("lazy layers, one cycle")
def _():
    class Cycle(Learner):
        def fit(self, *args, **kwargs):
            if self.opt is None:
                return self.fit_one_cycle(*args, **kwargs)
            return super().fit(*args, **kwargs)

    return learner(nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(CLASSES)).double(), cls=Cycle, wd=0.1)


# Models that cannot run on nothing, and outputs of all kinds


class Attention(nn.Module):
    """With a mask of shape (heads * samples, t, t), of which nothing can be left for nobody."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
        self.embed, self.head = nn.Linear(1, 4).double(), nn.Linear(4, CLASSES).double()

    def forward(self, x):
        h = self.embed(x[..., None])
        mask = torch.stack([torch.ones(5, 5).tril() == 0] * (2 * len(x)))
        h = self.attention(h, h, h, attn_mask=mask)[0]
        return self.head(h.mean(1))


@job("a mask of attention")
def _():
    return learner(Attention())


@job("a model that asks for samples")
def _():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(5, CLASSES)

        def forward(self, x):
            return self.body(x / x.abs().max())  # no maximum of nothing

    class Everywhere(Asks):
        def forward(self, x):
            return self.body(x * (x.flatten()[0].item() < 1e9))

    return learner(Everywhere())


@job("a model that asks for samples in training")
def _():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(5, CLASSES)

        def forward(self, x):
            if self.training and not len(x):
                raise ValueError("no samples")
            return self.body(x)

    return learner(Asks())


@dataclass
class Output:
    scores: Tensor
    hidden: list


Named = namedtuple("Named", ["scores", "hidden"])


class Structured(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head, self.kind = mlp(5, 6, 6), mlp(6, CLASSES), kind

    def forward(self, x):
        h = self.body(x)
        return self.kind(self.head(h), [h])


def of_kind(name, kind, read):
    @job(name)
    def _():
        class Own(Learner):
            def _loss(self):
                self.loss_grad = F.cross_entropy(read(self.pred), self.y)
                self.loss = self.loss_grad.detach()

        return learner(Structured(kind), loss=lambda pred, y: F.cross_entropy(read(pred), y))


of_kind("a dataclass", Output, lambda pred: pred.scores)
of_kind("a named tuple", Named, lambda pred: pred.scores)
of_kind("a dict", lambda s, h: {"scores": s, "more": {"h": h}}, lambda pred: pred["scores"])
of_kind("a list", lambda s, h: [s, *h], lambda pred: pred[0])
of_kind("nested", lambda s, h: ([{"s": (s,)}], h), lambda pred: pred[0][0]["s"][0])


# Inside the model


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        self.last.weight = self.first.weight
        self.shared = self.first
        self.head = mlp(5, CLASSES)

    def forward(self, x):
        return self.head(self.last(torch.tanh(self.shared(torch.tanh(self.first(x))))))


@job("tied weights and shared modules")
def _():
    return learner(Tied())


class Checkpointed(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.a, self.b, self.head, self.kwargs = mlp(5, 5), mlp(5, 5), mlp(5, CLASSES), kwargs

    def forward(self, x):
        if not self.training:
            return self.head(self.b(self.a(x)))
        h = checkpoint(self.a, x.requires_grad_(), **self.kwargs)
        h = checkpoint(self.b, h, **self.kwargs)
        return self.head(h)


@job("checkpoint")
def _():
    return learner(Checkpointed(use_reentrant=False))


@job("reentrant checkpoint")
def _():
    return learner(Checkpointed(use_reentrant=True))


class CheckpointedTwice(Checkpointed):
    def forward(self, x):
        if not self.training:
            return self.head(self.b(self.a(self.a(x))))
        h = checkpoint(self.a, x.requires_grad_(), **self.kwargs)
        h = checkpoint(self.a, h, **self.kwargs)
        return self.head(checkpoint(self.b, h, **self.kwargs))


@job("checkpoint of a shared module")
def _():
    return learner(CheckpointedTwice(use_reentrant=False))


@job("reentrant checkpoint of a shared module")
def _():
    return learner(CheckpointedTwice(use_reentrant=True))


@job("reentrant checkpoint with unused parameters")
def _():
    model = Checkpointed(use_reentrant=True)
    model.spare = nn.Linear(2, 2).double()
    return learner(model)


@job("checkpoint with unused parameters")
def _():
    model = Checkpointed(use_reentrant=False)
    model.spare = nn.Linear(2, 2).double()
    return learner(model)


@job("parametrizations")
def _():
    model = mlp(5, 6, 6, CLASSES)
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    parametrizations.orthogonal(model[4])
    return learner(model)


class Bag(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 6, mode="mean", sparse=sparse, dtype=torch.float64)
        self.head = mlp(6, CLASSES)

    def forward(self, x):
        return self.head(self.bag((x * 3).long().abs().clamp(max=19)))


@job("a bag of embeddings")
def _():
    return learner(Bag(False))


@job("sparse gradients")
def _():
    return learner(Bag(True), opt_func=SGD)


@job("sparse gradients and unused parameters")
def _():
    model = Bag(True)
    model.spare = nn.Linear(2, 2).double()
    return learner(model, opt_func=SGD)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, CLASSES, dtype=torch.complex128))
        self.head = mlp(CLASSES, CLASSES)

    def forward(self, x):
        return self.head((x.to(self.w.dtype) @ self.w).abs())


@job("complex parameters")
def _():
    return learner(Complex(), opt_func=SGD)


@job("complex parameters and unused ones")
def _():
    model = Complex()
    model.spare = nn.Linear(2, 2).double()
    return learner(model, opt_func=SGD)


@job("a compiled model")
def _():
    return learner(torch.compile(mlp(5, 7, CLASSES), backend="eager"))


@job("a compiled model with unused parameters")
def _():
    model = mlp(5, 7, CLASSES)
    model.register_parameter("spare", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    return learner(torch.compile(model, backend="eager"))


@job("a model that compiles itself")
def _():
    model = mlp(5, 7, CLASSES)
    model.compile(backend="eager")
    return learner(model)


@job("a recurrent network")
def _():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(1, 4, batch_first=True).double(), mlp(4, CLASSES)

        def forward(self, x):
            return self.head(self.rnn(x[..., None])[0][:, -1])

    return learner(Net())


@job("batch norm in eval mode", sync_bn=False)
def _():
    class Still(Callback):
        def before_batch(self):
            self.model[1].eval()

    return learner(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double(), cbs=Still())


# Branches


class Experts(nn.Module):
    """Each sample goes to one of four experts, so that a rank's samples may leave some of them out."""

    def __init__(self, never=0):
        super().__init__()
        self.experts = nn.ModuleList(mlp(5, CLASSES) for _ in range(4 + never))

    def forward(self, x):
        which = (x[:, 0] > 0.8).long() + 2 * (x[:, 1] > 0).long()
        out = x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            mine = which == i
            if mine.any():
                out = out.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
        return out


@job("experts")
def _():
    return learner(Experts())


@job("experts of which one is never asked")
def _():
    return learner(Experts(never=1))


@job("experts, with weight decay and momentum")
def _():
    return learner(Experts(never=1), opt_func=AdamW, wd=0.1)


@job("experts, accumulated")
def _():
    return learner(Experts(never=1), cbs=GradientAccumulation(n_batches=2))


@job("experts, accumulated, and a batch that one rank leaves")
def _():
    class Leave(Callback):
        def before_batch(self):
            if self.training and self.train_iter in (1, 3) and distributed.is_main():
                raise CancelBatchException

    return learner(Experts(never=1), cbs=[GradientAccumulation(n_batches=2), Leave(order=30)], dls=make_loaders(24))


class Later(nn.Module):
    """A part that only later batches use."""

    def __init__(self, at):
        super().__init__()
        self.body, self.head, self.more, self.at, self.calls = mlp(5, 6), mlp(6, CLASSES), mlp(6, CLASSES), at, 0

    def forward(self, x):
        h = self.body(x)
        return self.head(h) + (self.more(h) if x[:, 0].mean() > self.at else 0)


class Sometimes(Learner):
    """A part that is left out in one batch of the second epoch, after it has been used."""

    def _forward(self):
        h = self.model.body(self.x)
        self.pred = self.model.head(h)
        if not (self.training and self.train_iter == 4):
            self.pred = self.pred + self.model.more(h)


@job("a part left out in mid-training")
def _():
    return learner(Later(0.0), cls=Sometimes)


@job("a part left out in mid-training, said before", find_unused_parameters=True)
def _():
    return learner(Later(0.0), cls=Sometimes)


@job("a part left out in the last batch of one rank")
def _():
    class Last(Learner):
        def _forward(self):
            h = self.model.body(self.x)
            self.pred = self.model.head(h)
            if not (self.training and self.train_iter == 5 and distributed.rank() == 0):
                self.pred = self.pred + self.model.more(h)

    return learner(Later(0.0), cls=Last, dls=make_loaders(24))


@job("frozen in mid-fit")
def _():
    class FreezeLayer(Callback):
        def before_epoch(self):
            self.model[0].requires_grad_(self.epoch == 0)

    return learner(cbs=FreezeLayer())


@job("frozen in mid-epoch")
def _():
    class FreezeLayer(Callback):
        def before_batch(self):
            if self.training and self.train_iter == 1:
                self.model[0].requires_grad_(False)

    return learner(cbs=FreezeLayer())


@job("unfrozen in mid-epoch")
def _():
    class ThawLayer(Callback):
        order = 50

        def before_fit(self):
            self.model[0].requires_grad_(False)

        def before_batch(self):
            if self.training and self.train_iter == 1:
                self.model[0].requires_grad_(True)

    return learner(cbs=ThawLayer())


# Buffers


class Counting(nn.Module):
    """Buffers that are alike on all ranks."""

    def __init__(self):
        super().__init__()
        self.body = mlp(5, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.body(x)


@job("a buffer that counts")
def _():
    return learner(Counting(), dls=make_loaders(24))


class Queue(nn.Module):
    """A queue of features, as in MoCo."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(5, 4), mlp(4, CLASSES)
        self.register_buffer("queue", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        h = self.body(x)
        if self.training and len(x):
            self.queue.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.head(h - self.queue.clone())


@job("a buffer of features")
def _():
    return learner(Queue())


@job("a loss with a buffer of its own")
def _():
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

        def forward(self, pred, y):
            loss = F.cross_entropy(pred, y)
            if pred.requires_grad:
                self.mean.mul_(0.9).add_(0.1 * loss.detach())
            return loss / (1 + self.mean)

    return learner(loss=Moving())


# Cancels


class CancelInHook(Callback):
    """Leaves the batch from a hook of a layer."""

    def __init__(self, rank=None):
        super().__init__()
        self.only = rank

    def before_fit(self):
        def leave(*_):
            if self.training and self.train_iter == 1 and self.only in (None, distributed.rank()):
                raise CancelBatchException

        self.handle = self.model[1].register_forward_hook(leave)

    def cleanup_fit(self):
        self.handle.remove()


@job("cancel in a forward hook")
def _():
    return learner(cbs=CancelInHook())


@job("cancel in a forward hook, with buffers", sync_bn=False)
def _():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()

    class Still(Callback):
        def before_batch(self):
            self.model[2].eval()

    return learner(model, cbs=[CancelInHook(), Still()])


@job("cancel in a forward hook, on one rank")
def _():
    return learner(cbs=CancelInHook(0), dls=make_loaders(24))


@job("cancel in a forward hook, on one rank, with buffers", sync_bn=False)
def _():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()
    return learner(model, cbs=CancelInHook(0), dls=make_loaders(24))


@job("a NaN on one rank")
def _():
    def spoil(cb):
        if cb.training and cb.train_iter == 1 and distributed.is_main():
            cb.learn.loss_grad = cb.loss_grad * float("nan")

    return learner(cbs=Callback(after_loss=spoil))


def do(name: str) -> dict:
    """What a job comes to on this rank: numbers, or the text of its `error`."""
    set_seed(42)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "find_unused_parameters=True was chosen")
            return train(JOBS[name](), OPTIONS[name])
    except Exception as error:
        return {"error": "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])}


def do_sharded(name: str) -> dict:
    """What a job comes to on shards of its model, on this rank."""
    OPTIONS[name] |= {"shard": UNITS.get(name, True)}
    try:
        return do(name)
    finally:
        del OPTIONS[name]["shard"]


UNITS = {name: ["body"] for name in (
    "a buffer that counts", "a model that asks for samples", "a model that asks for samples in training")}  # fmt: skip
"""The units of models in which nothing is repeated."""


def train(learn: Learner, options: dict) -> dict:
    """Train and predict."""
    model = type(learn.model)
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(split_batches=True, timeout=30, **options):
        learn.fit(2)
        preds = [asdict(each) if isinstance(each, Output) else each for each in learn.get_preds()]
    assert type(learn.model) is model, learn.model
    state = dict(learn.model.state_dict())
    if isinstance(learn.loss_func, nn.Module):
        state |= {f"loss.{k}": v for k, v in learn.loss_func.state_dict().items()}
    return {
        "weights": {k: v.clone() for k, v in state.items()},
        "losses": [learn.recorder.losses, learn.recorder.step_losses],
        "values": learn.recorder.values,
        "preds": None if isinstance(preds[0], list) and isinstance(preds[0][0], Output) else preds,
    }
