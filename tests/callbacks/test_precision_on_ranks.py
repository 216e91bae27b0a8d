"""Mixed precision, clipping and compiling on two ranks."""

import warnings

import pytest
import torch
from helpers import mostly_slow
from helpers import weights_on_ranks as weights
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import (
    Callback,
    CancelBatchException,
    CancelStepException,
    Compile,
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    distributed,
)
from learnerkit.utils import unwrap

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings("ignore:mixed precision with float16 is some 30 times slower on a CPU"),
]


class OutsideAutocast(torch.optim.SGD):
    """Steps in the precision of the weights, on every rank."""

    def step(self, closure=None):
        assert not torch.is_autocast_enabled("cpu")
        return super().step(closure)


class Norms(Callback):
    """Keeps the norm of the whole gradient after clipping, and the scale after each batch."""

    order = 50
    run_valid = False

    def __init__(self):
        super().__init__()
        self.norms, self.scales, self.skipped = [], [], []

    def before_step(self):
        grads = [p.grad for p in self.learn.model.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())

    def after_cancel_step(self):
        self.skipped.append(self.learn.train_iter)

    def after_batch(self):
        precision = getattr(self.learn, "mixed_precision", None)
        if precision is not None and precision.scaler is not None:
            self.scales.append(precision.scaler.get_scale())


def make_learner(cbs=(), n=30, kind=torch.float32):
    torch.manual_seed(3)
    x = torch.randn(n, 4, dtype=kind)
    dls = DataLoaders.from_datasets(TensorDataset(x, x.sum(1, keepdim=True).sin()), bs=8, shuffle=False, device="cpu")
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(kind)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.4)
    return Learner(dls, model, nn.MSELoss(), opt_func=lambda p, lr: OutsideAutocast(p, lr, 0.9), lr=0.05, cbs=[*cbs])


def trained(cbs=(), epochs=2, alone=False, **kwargs):
    """A learner after a fit, and its weights."""
    learn = make_learner(cbs, **kwargs)
    with learn.no_logging(), learn.no_bar(), warnings.catch_warnings():
        if alone:
            warnings.simplefilter("ignore")  # of ranks that train each for itself
            learn.fit(epochs)
        else:
            with learn.distrib_ctx(split_batches=True):
                learn.fit(epochs)
    return learn, weights(learn)


def clipping(n_batches):
    return [GradientClip(0.1), Norms(), GradientAccumulation(n_batches=n_batches)]


@pytest.mark.parametrize("n_batches", mostly_slow([1, 3], 3))
def test_clipping_is_that_of_one_process(n_batches):
    one, expected = trained(clipping(n_batches), alone=True, kind=torch.float64)
    two, found = trained(clipping(n_batches), kind=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert len(one.norms.norms) == len(two.norms.norms)
    assert max(one.norms.norms) <= 0.1 + 1e-9
    a, b = (learn.recorder.final_record for learn in (one, two))
    assert torch.allclose(torch.tensor([*a[:-1]]), torch.tensor([*b[:-1]]), rtol=1e-6), (a, b)
    assert not torch.allclose(expected, trained(alone=True, kind=torch.float64)[1])


@pytest.mark.parametrize("kwargs", [{"max_value": 0.02}, {"max_norm": 0.05, "each": True}])
def test_clipping_elements_or_each_parameter_is_that_of_one_process(kwargs):
    _, expected = trained([GradientClip(**kwargs)], alone=True, kind=torch.float64)
    _, found = trained([GradientClip(**kwargs)], kind=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected, trained(alone=True, kind=torch.float64)[1])


@pytest.mark.parametrize("n", mostly_slow([30, 25], 25))  # its last batch has a single sample: a rank without data
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_half_precision_trains_as_on_one_process(mode, n):
    kwargs = {"init_scale": 256.0} if mode == "fp16" else {}
    _, expected = trained([MixedPrecision(mode, **kwargs), GradientClip()], alone=True, n=n)
    two, found = trained([MixedPrecision(mode, **kwargs), GradientClip(), Norms()], n=n)
    assert torch.allclose(found, expected, atol=0.01), (found - expected).abs().max()
    assert not torch.equal(found, trained([GradientClip()], n=n)[1])
    assert len(two.norms.norms) == 2 * len(two.dls.train)
    assert two.norms.skipped == []


def spoil(cb):
    """Give the second batch an infinite gradient, on rank 1 alone."""
    if cb.train_iter == 1 and distributed.rank() == 1:
        cb.learn.loss_grad = cb.loss_grad * torch.inf


@pytest.mark.parametrize("n_batches", [1, 2])
def test_ranks_skip_an_overflowing_step_alike(n_batches):
    cbs = [MixedPrecision(init_scale=256.0), Callback(before_backward=spoil), note := Norms()]
    learn, _ = trained([*cbs, GradientAccumulation(n_batches=n_batches)])
    everyone = distributed.all_gather((note.scales, note.skipped, learn.mixed_precision.skipped))
    assert everyone[0] == everyone[1], everyone
    assert set(note.scales) == {256.0, 128.0}
    assert (len(note.skipped), learn.mixed_precision.skipped) == (1, 1)


class Overflows(Callback):
    """Lets the second batch overflow, and leaves the third, with which a step is due; counts the ends of steps."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def before_batch(self):
        if self.training and self.iter == 2:
            raise CancelBatchException

    def after_loss(self):
        if self.training and self.iter == 1:
            self.learn.loss_grad = self.loss_grad * torch.inf

    def after_step(self):
        self.steps += 1


def test_an_overflow_skips_a_step_whose_last_batch_all_ranks_have_left():
    def run(alone):
        cbs = [MixedPrecision(init_scale=256.0), GradientAccumulation(n_batches=3), Overflows(), Norms()]
        learn, found = trained(cbs, alone=alone, kind=torch.float64)  # autocast leaves numbers of 64 bits as they are
        precision = learn.mixed_precision
        return found, [learn.overflows.steps, precision.skipped, learn.norms.scales]

    (expected, alone), (found, together) = run(True), run(False)
    assert together == alone == [4, 2, [256.0, 256.0, 128.0, 128.0, 128.0, 128.0, 64.0, 64.0]]
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "event", mostly_slow(["before_batch", "after_pred", "after_backward", "before_step"], "after_pred", "before_step")
)
@pytest.mark.parametrize("overflow", mostly_slow([True, False], True), ids=["with overflow", "without"])
def test_a_rank_that_leaves_its_batch_or_step_keeps_its_scale(event, overflow):
    """Whatever rank 0 cancels while rank 1 overflows."""
    note = Norms()

    def leave_it(cb):
        if cb.training and cb.train_iter < 2 and distributed.rank() == 0:
            raise CancelStepException if event == "before_step" else CancelBatchException

    cbs = [MixedPrecision(init_scale=256.0, growth_interval=5), note, Callback(**{event: leave_it})]
    learn, _ = trained([*cbs, *([Callback(before_backward=spoil)] if overflow else [])])
    everyone = distributed.all_gather((note.scales, learn.mixed_precision.skipped))
    assert everyone[0] == everyone[1], everyone
    assert learn.mixed_precision.skipped == overflow


@pytest.mark.slow
@pytest.mark.parametrize("n_batches", [1, 2])
def test_compiled_training_gives_the_same_weights_and_leaves_the_model_as_it_was(n_batches):
    _, expected = trained([GradientAccumulation(n_batches=n_batches)], kind=torch.float64)
    cbs = [Compile(backend="aot_eager"), GradientAccumulation(n_batches=n_batches)]
    learn = make_learner(cbs, kind=torch.float64)
    plain, keys = learn.model, list(learn.model.state_dict())
    seen = []

    def look(cb, plain=plain, seen=seen):
        seen.append((unwrap(cb.learn.model) is plain, plain._compiled_call_impl is not None))

    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(split_batches=True):
        learn.fit(2, cbs=Callback(after_pred=look))
    assert set(seen) == {(True, True)}
    assert learn.model is plain
    assert plain._compiled_call_impl is None
    assert list(unwrap(learn.model).state_dict()) == keys
    assert torch.allclose(weights(learn), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_trial_compiles_nothing():
    graphs = []

    def backend(graph, inputs):
        graphs.append(inputs)
        return graph

    learn = make_learner([Compile(backend=backend)], n=32)
    at = []
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(split_batches=True):
        learn.fit(1, cbs=Callback(before_batch=lambda cb: at.append(len(graphs)), order=12))
    assert at[0] == 0
    assert at[-1] >= 1
