"""GradientNoiseScale on one process, against gradients of single samples; on several in test_noise_on_ranks.py."""

import math
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers import KeepsGradients, OwnBackward, mostly_slow, same_weights
from noise_jobs import (
    LOSSES,
    Batches,
    Mixed,
    exact,
    make_data,
    make_learner,
    make_model,
    per_sample,
    recomputed,
    rows_of,
    shown,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import RandomSampler

from learnerkit import (
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CarriedState,
    CheckpointCallback,
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    GradientNoiseScale,
    Learner,
    MixedPrecision,
    SaveModelCallback,
)
from learnerkit.scaling.noise import Measured, estimate, together

FP16 = pytest.mark.filterwarnings("ignore:mixed precision with float16 is some 30 times slower on a CPU")


def drawn(size, batches):
    """What a loader takes to draw with replacement."""
    return {"batch_size": size, "sampler": RandomSampler(make_data(), replacement=True, num_samples=size * batches)}


def accumulated(n=4):
    return [GradientAccumulation(n_batches=n)]


# The estimate


@pytest.mark.slow
@pytest.mark.parametrize("how", mostly_slow(["parts", "uneven parts", "cut"], "uneven parts"))
@pytest.mark.parametrize("loss", ["mean", pytest.param("weighted", marks=pytest.mark.soak)])
def test_it_is_that_of_single_samples(how, loss):
    """With replacement, so that the data are all there is."""
    batches = 600 if loss == "mean" else 1600
    loader = {
        "parts": drawn(16, batches), "cut": drawn(64, batches * 2 // 3),
        "uneven parts": {"batch_sampler": Mixed(256, (4, 28, 8, 24), batches)},
    }[how]  # fmt: skip
    learn = make_learner([] if how == "cut" else accumulated(), loss, **loader)
    learn.fit(1, cbs=(scale := GradientNoiseScale(every=1)))
    true = exact(learn.model, loss, make_data())
    assert scale.value == pytest.approx(true, rel=0.1)
    assert 0 < scale.error < 0.1 * true


def test_the_spread_may_be_of_parts_of_any_sizes():
    """Known numbers: gradients of four samples in parts of one and three."""
    grads = torch.tensor([[3.0, 1.0], [1.0, 0.0], [2.0, -2.0], [0.0, 1.0]])
    one, three, whole = grads[0], grads[1:].mean(0), grads.mean(0)
    squares = one.square().sum() + 3 * three.square().sum()
    row = Measured(0, squares.item(), 2, 4, 4, 4, whole.square().sum().item())
    assert row.spread == pytest.approx(((one - whole).square().sum() + 3 * (three - whole).square().sum()).item())
    noise = row.spread
    value, error = estimate([row])
    assert value == pytest.approx(noise / (row.whole - noise / 4)) or value == math.inf
    assert math.isnan(error)


def test_ranks_are_added_up_and_one_that_left_knows_no_whole():
    rows = together(
        [Measured(3, 1.0, 1, 8, 8, 8, math.nan), Measured(3, 2.0, 2, 4, 4, 4, 0.5), Measured(4, *[0.0] * 6)]
    )
    assert rows[0] == Measured(3, 3.0, 3, 12, 12, 12, 0.5)
    assert [row.is_known() for row in rows] == [True, False]
    assert not rows[0]._replace(squares=math.inf).is_known()


def test_a_gradient_that_is_lost_in_the_noise():
    row = Measured(0, 10.0, 2, 0, 4, 4, 1.0)
    assert estimate([row])[0] == math.inf
    assert math.isnan(estimate([])[0])


# What it sees


@pytest.mark.parametrize(
    "extra",
    [[], [GradientClip(1e-3)], [MixedPrecision("bf16")], pytest.param([MixedPrecision("fp16")], marks=FP16)],
    ids=["plain", "clipped", "bf16", "fp16"],
)
def test_gradients_are_seen_before_others_change_them(extra):
    learn = make_learner(
        [*accumulated(3), *extra, batches := Batches()], data=make_data(100, torch.float32), batch_size=8
    )
    learn.fit(2, cbs=(scale := GradientNoiseScale(every=1)))
    found, expected = shown(scale), recomputed(learn.model, "mean", batches)
    if extra and isinstance(extra[0], MixedPrecision):
        assert torch.equal(found[:, 1:4], expected[:, 1:4])
        torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-3)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("size", "kind"),
    [(8, {"n_batches": 3}), (8, {"n_samples": 20}), pytest.param(2, {"n_batches": 7}, marks=pytest.mark.slow)],
)
def test_each_part_counts_by_what_it_had(size, kind, loss):
    """The last step has a smaller part, and of two samples both may be ignored."""
    learn = make_learner([GradientAccumulation(**kind), batches := Batches()], loss, make_data(101), batch_size=size)
    learn.fit(2, cbs=(scale := GradientNoiseScale(every=1)))
    torch.testing.assert_close(shown(scale), recomputed(learn.model, loss, batches), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_two_quarters_of_a_batch_are_compared(loss):
    learn = make_learner([batches := Batches()], loss, make_data(77), batch_size=20)
    learn.fit(1, cbs=(scale := GradientNoiseScale(every=1)))
    whole = [step[0] for step in batches.steps]
    batches.steps = [[(x[:n], y[:n]), (x[n : 2 * n], y[n : 2 * n])] for x, y in whole for n in [len(x) // 4]]
    quarters = recomputed(learn.model, loss, batches)
    found = shown(scale)
    torch.testing.assert_close(found[:, :2], quarters[:, :2], rtol=1e-9, atol=1e-12)
    assert found[:, 3].tolist() == [20, 20, 20, 17]
    for (x, y), row in zip(whole, found, strict=True):
        sums, counts = per_sample(learn.model, loss, x, y)
        assert row[2] == counts.sum()
        torch.testing.assert_close(row[4], (sums.sum(0) / counts.sum()).square().sum())


def test_a_batch_is_cut_where_its_samples_are():
    """There are as many steps of time as samples, and each sample has a relation of its own."""
    n = 16
    draws = torch.Generator().manual_seed(0)
    slopes = torch.randn(n, 1, 3, generator=draws)
    inputs = [torch.randn(n, 1, 3, generator=draws).repeat(1, n, 1) for _ in range(8)]
    batches = [(x, (x * slopes).sum(2, keepdim=True)) for x in inputs]
    first, second = ([(x.transpose(0, dim), y.transpose(0, dim)) for x, y in batches] for dim in (0, 1))
    found = []
    for data, dim in ((first, 0), (second, 1)):
        dls = DataLoaders(data, device="cpu", batch_dim=dim)
        learn = Learner(dls, nn.Linear(3, 1), nn.MSELoss(), opt_func=torch.optim.SGD, lr=0.0)
        torch.nn.init.ones_(learn.model.weight)
        torch.nn.init.ones_(learn.model.bias)
        with learn.no_logging():
            learn.fit(1, cbs=(scale := GradientNoiseScale(every=1)))
        found.append(scale.value)
    assert found[0] > 0.1
    assert found[1] == pytest.approx(found[0], rel=1e-3)


class Leave(Callback):
    """Leaves some batches out."""

    def __init__(self, event, error, order):
        super().__init__(order=order)
        setattr(self, event, self._leave)
        self._error, self.seen, self.left = error, 0, []

    def _leave(self):
        self.seen += 1
        if self.seen % 5 == 2:
            self.left.append(self.seen - 1)
            raise self._error


@pytest.mark.parametrize(
    ("event", "error"),
    [("before_batch", CancelBatchException), ("after_loss", CancelBatchException),
     ("before_backward", CancelBackwardException), ("before_backward", CancelBatchException)],
)  # fmt: skip
@pytest.mark.parametrize("order", mostly_slow([-8, 8, 80], 8))
def test_a_batch_that_is_left_out_is_no_part(event, error, order):
    data, batches = make_data(96), Batches()
    learn = make_learner([*accumulated(3), leave := Leave(event, error, order)], data=data, batch_size=8)
    learn.fit(2, cbs=(scale := GradientNoiseScale(every=1)))
    parts = [tuple(t[i % 12 * 8 :][:8] for t in data.tensors) if i not in leave.left else None for i in range(24)]
    # A step whose last batch is cancelled has no end that could be measured.
    ends = [i for i in range(0, 24, 3) if parts[i + 2] or error is CancelBackwardException]
    batches.steps = [[part for part in parts[i : i + 3] if part] for i in ends]
    assert len(batches.steps) >= 7
    torch.testing.assert_close(shown(scale), recomputed(learn.model, "mean", batches), rtol=1e-9, atol=1e-12)


def test_a_batch_of_which_a_quarter_counts_nothing_is_not_measured():
    data = make_data(32)
    data.tensors[1][:8] = -100  # two quarters of the first batch
    learn = make_learner(data=data, batch_size=16)
    learn.fit(1, cbs=(scale := GradientNoiseScale(every=1)))
    assert [row.step for row in rows_of(scale)] == [1]


@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_of_an_earlier_step_are_not_taken_for_this_ones(keeps):
    """A callback accumulates by itself; or gradients are set to zero rather than removed."""

    def every_second(cb):
        if keeps and cb.iter % 2 == 0:
            raise CancelBatchException

    learn = make_learner([Callback(after_backward=every_second)], cls=KeepsGradients, batch_size=16)
    learn.fit(1, cbs=(scale := GradientNoiseScale(every=1)))
    assert [row.step for row in rows_of(scale)] == list(range(0, 16, 1 + keeps))


# What it leaves


@pytest.mark.parametrize("accumulates", [True, False, "off"])
def test_training_goes_on_as_without(accumulates):
    """Dropout, BatchNorm, an order that is drawn, and everybody's random numbers."""

    def trained(cbs):
        model = make_model(dropout=0.5, norm=True)
        learn = make_learner(accumulated(2) * bool(accumulates), model=model, batch_size=20, shuffle=True)
        if accumulates == "off":
            learn.gradient_accumulation.run = False
        learn.fit(2, 0.3, cbs=cbs)
        streams = torch.rand(1).item(), random.random(), np.random.rand()
        return learn, streams, [row[0] for row in learn.recorder.values]

    (one, *numbers), (other, *others) = trained([]), trained(scale := GradientNoiseScale(every=2))
    assert same_weights(one.model, other.model)
    assert numbers == others
    assert len(rows_of(scale)) == (6 if accumulates is True else 13)
    assert [cb for cb in other.cbs if cb not in one.cbs and type(cb).__name__ in ("_Watch", "GradientNoiseScale")] == []
    assert not any(p._backward_hooks for p in other.model.parameters())


def test_an_error_leaves_nothing_behind():
    def fails(cb):
        raise RuntimeError("no")

    learn = make_learner([*accumulated(), Callback(before_backward=fails, order=80)], batch_size=16)
    with pytest.raises(RuntimeError, match="no"):
        learn.fit(1, cbs=GradientNoiseScale())
    assert not any(p._backward_hooks for p in learn.model.parameters())
    assert not any(type(cb).__name__ == "_Watch" for cb in learn.cbs)


# What it shows


def test_the_noise_scale_is_a_column_and_a_sentence(capsys, tmp_path):
    learn = make_learner(accumulated(), batch_size=16, shuffle=True)
    learn.path = tmp_path
    saves = SaveModelCallback(monitor="noise_scale")
    learn.fit(2, cbs=[scale := GradientNoiseScale(every=2), saves])
    assert learn.recorder.metric_names == ["epoch", "train_loss", "noise_scale", "time"]
    assert [row[1] for row in learn.recorder.values][-1] == scale.value == estimate(rows_of(scale))[0]
    said = capsys.readouterr().out
    about = f"{float(f'{scale.value:.2g}'):.0f}"
    assert f"gradient noise scale: batches beyond about {about} samples (give or take {scale.error:.2g})" in said
    assert "a step has 64 samples, 4 were measured" in said


def test_it_says_so_if_nothing_was_measured(capsys):
    learn = make_learner(batch_size=1, data=make_data(4))
    learn.fit(1, cbs=(scale := GradientNoiseScale(every=1)))
    assert math.isnan(scale.value)
    said = capsys.readouterr().out
    assert "not measured, as no step had two parts with finite gradients (without accumulation a batch" in said
    assert "with BatchNorm none of less than four" in said
    single = [GradientAccumulation(n_samples=1)]
    make_learner(single, batch_size=2, data=make_data(4)).fit(1, cbs=GradientNoiseScale(every=1))
    assert "with too small an n_samples= it has a single one" in capsys.readouterr().out
    learn.validate(dl=learn.dls.train, cbs=GradientNoiseScale())
    assert "noise" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_goes_on_measures_what_it_would_have(tmp_path):
    class _Stop(Callback):
        order = 20_000

        def after_step(self):
            if self.train_iter == 37:
                raise KeyboardInterrupt

    def trained(*cbs):
        learn = make_learner([*accumulated(2), *cbs], batch_size=10, shuffle=True)
        with learn.no_logging():
            learn.fit(3, 0.1, cbs=(scale := GradientNoiseScale(every=3)))
        return scale, learn.recorder.values

    scale, values = trained()
    with pytest.raises(KeyboardInterrupt):
        trained(CheckpointCallback(tmp_path, every=3), _Stop())
    again, others = trained(CheckpointCallback(tmp_path, every=3, resume=True))
    assert (rows_of(again), again.value, again.error, others) == (rows_of(scale), scale.value, scale.error, values)


# What it refuses


def test_every_below_1_is_refused():
    with pytest.raises(ValueError, match="every=0"):
        GradientNoiseScale(every=0)


def test_a_backward_of_ones_own_is_refused():
    with pytest.raises(ValueError, match="this learner has a _backward of its own: leave it out"):
        make_learner(cls=OwnBackward, batch_size=8).fit(1, cbs=GradientNoiseScale())


def test_a_batch_that_cannot_be_cut():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_model()

        def forward(self, x):
            return self.body(x.view(16, 5))

    learn = make_learner(model=Fixed(), batch_size=16)
    with pytest.raises(RuntimeError) as error:
        learn.fit(1, cbs=GradientNoiseScale())
    assert any("on 4 of the 16 samples of a batch; instead accumulate" in note for note in error.value.__notes__)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_state_that_is_carried_needs_whole_batches(accumulates):
    class Hidden(CarriedState):
        def start(self, n):
            return torch.zeros(n, 1).double()

    class Carries(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_model()

        def forward(self, x, state):
            return self.body(x + state), state + 1

    learn = make_learner([Hidden(), *accumulated() * accumulates], model=Carries(), batch_size=16)
    with nullcontext() if accumulates else pytest.raises(ValueError, match="would run the model on parts of a batch"):
        learn.fit(1, cbs=GradientNoiseScale(every=1))


def test_a_gradient_in_pieces_is_an_error():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 5).double(), nn.Linear(5, 3).double()

        def forward(self, x):
            x = checkpoint(self.body, x.requires_grad_(), use_reentrant=True)
            return self.head(checkpoint(self.body, x, use_reentrant=True))

    with pytest.raises(RuntimeError, match="came in several pieces"):
        make_learner(accumulated(), model=Twice(), batch_size=16).fit(1, cbs=GradientNoiseScale())
