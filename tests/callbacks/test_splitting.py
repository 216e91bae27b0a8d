"""SplitBatch on one process: a batch that runs out of memory is taken in parts, and nothing else changes."""

import gc

import pytest
import torch
from helpers import OwnBackward, mostly_slow, mostly_soak, raises, same_weights
from memory_limits import FAILURE, Limit
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    EMA,
    Callback,
    CarriedState,
    CheckpointCallback,
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    MixUp,
    SplitBatch,
    accuracy,
    set_seed,
)

ROWS = 20


class Spy(Callback):
    """Writes down each event of a batch, with the predictions and the loss that it shows."""

    order = 5

    def __init__(self):
        super().__init__()
        self.seen = []
        for event in ("before_batch", "after_pred", "after_loss", "before_backward", "after_backward", "before_step",
                      "after_step", "after_batch"):  # fmt: skip
            setattr(self, event, lambda event=event: self._note(event))

    def _note(self, event):
        learn = self.learn
        loss = learn.loss.item() if isinstance(learn.loss, torch.Tensor) else None
        self.seen.append((event, learn.training, getattr(learn.pred, "tolist", lambda: None)(), loss))


def make_net(dropout=0.0, norm=False):
    parts = [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return nn.Sequential(*parts[:1], *[nn.BatchNorm1d(8)] * norm, *parts[1:]).double()


def make_loaders(n=70, rows=ROWS, **kwargs):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (n,), generator=generator)
    data = TensorDataset(x, y)
    return DataLoaders(DataLoader(data, rows, shuffle=True), DataLoader(data, 2 * rows), device="cpu", **kwargs)


def fitted(limit=None, cbs=(), model=None, loss=None, epochs=2, dls=None, cls=Learner, **kwargs):
    """A learner after a fit."""
    set_seed(1)
    learn = cls(
        dls or make_loaders(), (model or make_net)(), loss or nn.CrossEntropyLoss(), lr=1e-2, cbs=list(cbs), **kwargs
    )
    if limit is not None:
        limit.put_on(learn.model)
    with learn.no_bar(), learn.no_logging():
        learn.fit(epochs)
    return learn


def difference(a, b):
    """How far the weights and the tables of two learners are from each other."""
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    rows = [torch.tensor([[float(v) for v in row] for row in x.recorder.values], dtype=torch.float64) for x in (a, b)]
    return max([(p - q).abs().max().item() for p, q in pairs] + [(rows[0] - rows[1]).abs().max().item()])


# Equal to the whole batch


@pytest.mark.parametrize(
    ("where", "rows", "parts"),
    mostly_slow(
        [(where, *case) for where in ("forward", "backward") for case in ((10, 2), (7, 3), (3, 7))],
        ("forward", 10, 2), ("backward", 7, 3), slow=[("forward", 3, 7), ("backward", 3, 7)],
    ),
)  # fmt: skip
def test_a_batch_that_runs_out_of_memory_is_taken_in_parts_with_the_same_result(where, rows, parts, capsys):
    whole, spies = fitted(cbs=[(first := Spy())], metrics=accuracy), [first, Spy(), Spy()]
    limit = Limit(rows, where)
    split = fitted(limit, [SplitBatch(), spies[1]], metrics=accuracy)
    tried = [k for k in range(1, parts + 1) if k == 1 or -(-ROWS // k) < -(-ROWS // (k - 1))]  # with smaller parts
    assert (split.split_batch.parts, limit.failures) == (parts, len(tried) - 1)
    assert difference(whole, split) < 1e-9
    events = [[(event, training) for event, training, *_ in spy.seen] for spy in spies[:2]]
    assert events[0] == events[1]  # each once
    for (*_, pred, loss), (*_, others, other) in zip(spies[0].seen, spies[1].seen, strict=True):
        assert (pred is None) == (others is None)
        assert pred is None or torch.allclose(torch.tensor(pred), torch.tensor(others), atol=1e-9)
        assert loss == other or abs(loss - other) < 1e-9
    assert capsys.readouterr().out == f"SplitBatch takes batches of 20 samples in {parts} parts\n"
    beforehand = fitted(None, [SplitBatch(parts=parts), spies[2]], metrics=accuracy)
    assert difference(beforehand, split) == 0
    assert spies[2].seen == spies[1].seen


@pytest.mark.parametrize("error", [RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried "
                                                "to allocate 8 bytes. Error code 12")])  # fmt: skip
def test_the_hosts_allocator_counts_and_other_errors_do_not(error):
    limit = Limit(10, error=error)
    assert difference(fitted(), fitted(limit, [SplitBatch()])) < 1e-9
    with pytest.raises(RuntimeError, match="out of money"):
        fitted(Limit(10, error=RuntimeError("out of money")), [SplitBatch()])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_becomes_short_late_in_a_fit(where):
    limit = Limit(10, where, begins=12)
    split = fitted(limit, [SplitBatch()], epochs=5)
    assert limit.failures == 1
    assert difference(fitted(epochs=5), split) < 1e-9


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_of_earlier_batches_of_a_step_survive(where):
    def accumulated(limit=None, cbs=()):
        dls = make_loaders(rows=10)
        return fitted(limit, [GradientAccumulation(n_batches=3), *cbs], dls=dls)

    limit = Limit(4, where, begins=2)  # the third batch of the first step
    assert difference(accumulated(), accumulated(limit, [SplitBatch()])) < 1e-9
    assert limit.failures >= 1


def test_a_late_failure_in_the_backward_pass_of_an_accumulated_step_is_an_error():
    limit, cbs = Limit(4, "backward", begins=16), [GradientAccumulation(n_batches=2), SplitBatch()]
    with pytest.raises(torch.OutOfMemoryError):
        fitted(limit, cbs, dls=make_loaders(rows=10), epochs=4)


class Padded(nn.Module):
    """Makes its own loss, a mean over the targets that are not padding."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x, labels):
        logits = self.body(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def padded():
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(40, 5, 6, generator=generator, dtype=torch.float64),
        torch.randint(3, (40, 5), generator=generator),
    )
    for i, row in enumerate(y):
        row[1 + i % 5 :] = -100
    batches = [{"x": x[i : i + 10], "labels": y[i : i + 10]} for i in range(0, 40, 10)]
    return DataLoaders(batches, batches, device="cpu")


class Penalty(Callback):
    """Adds something to the loss: a function of the weights, and one of the predictions."""

    def after_loss(self):
        if self.training:
            more = self.learn.pred.square().mean() + self.model[0].weight.square().sum()
            self.learn.loss_grad = self.loss_grad + 0.1 * more


class Doubled(Callback):
    """Changes the predictions before the loss."""

    def after_pred(self):
        self.learn.pred = 2 * self.pred


def weighted(pred, y):
    return F.cross_entropy(pred, y, weight=torch.tensor([0.2, 1.0, 3.0]).double())


WEIGHTS = torch.tensor([0.2, 1.0, 3.0]).double()
CASES = {
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
    "class weights": {"loss": nn.CrossEntropyLoss(weight=WEIGHTS)},
    "ignored": {"loss": nn.CrossEntropyLoss(ignore_index=1)},
    "a count of its own": {"loss": weighted, "loss_weight": lambda y: WEIGHTS[y].sum()},
    "a count by predictions": {"loss": weighted, "loss_weight": lambda pred, y: WEIGHTS[y].sum()},
    "own loss": {"dls": padded, "model": Padded, "loss_weight": lambda y: (y != -100).sum()},
    "penalty": {"cbs": [Penalty]},
    "predictions are changed": {"cbs": [Doubled]},
    "mixed": {"cbs": [MixUp]},
    "clipped and averaged": {"cbs": [lambda: GradientClip(0.1), EMA]},
    "bf16": {"cbs": [lambda: MixedPrecision("bf16")]},
    "fp16": {"cbs": [MixedPrecision]},
}


def case(name):
    """The arguments of `fitted`, of which each call makes new callbacks, models and data."""
    given = dict(CASES[name])
    cbs = [cb() for cb in given.pop("cbs", [])]
    if "dls" in given:
        given["dls"] = given["dls"]()
    if given.get("model") is Padded:
        given["cls"] = lambda dls, model, loss, **kwargs: Learner(dls, model, **kwargs)
    return cbs, given


@pytest.mark.filterwarnings("ignore:mixed precision with float16")
@pytest.mark.parametrize("where", mostly_soak(["forward", "backward"], "forward"))
@pytest.mark.parametrize(
    "name", mostly_slow(CASES, "sum", "a count by predictions", "own loss", "penalty", "clipped and averaged", "fp16")
)
def test_losses_and_callbacks_see_the_whole_batch(name, where):
    (cbs, given), (others, again) = case(name), case(name)
    limit = Limit(4, where)
    split = fitted(limit, [*others, SplitBatch()], **again)
    assert limit.failures
    tolerance = 5e-2 if name == "bf16" else 1e-2 if name == "fp16" else 1e-9  # rows of a batch are rounded by its size
    assert difference(fitted(cbs=cbs, **given), split) < tolerance


class Returns(nn.Module):
    """Returns what a function makes of the scores and the labels."""

    def __init__(self, made):
        super().__init__()
        self.body, self.made = make_net(), made

    def forward(self, x, labels):
        return self.made(self.body(x), labels)


def fitted_with_own_loss(made, loss_weight, cbs, dls=None):
    def learner(dls, model, loss, **kwargs):
        return Learner(dls, model, loss_weight=loss_weight, **kwargs)

    return fitted(None, cbs, lambda: Returns(made), dls=dls, cls=learner)


def test_the_parts_of_a_models_loss_are_the_same_columns():
    def losses(pred, labels):
        return {"ce": F.cross_entropy(pred, labels), "size": pred.square().mean()}

    whole, split = (fitted_with_own_loss(losses, "samples", cbs) for cbs in ([], [SplitBatch(2)]))
    assert split.recorder.metric_names == whole.recorder.metric_names
    assert {"ce", "size"} < {*whole.recorder.metric_names}
    assert difference(whole, split) < 1e-9


def test_a_batch_of_a_models_own_loss_may_count_nothing():
    def with_scores(pred, labels):
        return {"loss": F.cross_entropy(pred, labels), "logits": pred}

    data = make_loaders(60).train_ds
    data.tensors[1][20:40] = -100
    found = []
    for cbs in ([], [SplitBatch(2)]):
        dls = DataLoaders(DataLoader(data, ROWS), device="cpu")
        cbs = [GradientAccumulation(n_batches=2), *cbs]
        found.append(fitted_with_own_loss(with_scores, lambda y: (y != -100).sum(), cbs, dls))
    assert difference(*found) < 1e-9


@pytest.mark.parametrize("rows", mostly_slow([4, 13], 4))
def test_evaluation_is_cut_too_and_gives_the_same_table_and_predictions(rows):
    whole, limit = fitted(metrics=accuracy), Limit(rows, trains=False)
    split = fitted(limit, [SplitBatch()], metrics=accuracy)
    assert limit.failures
    assert split.split_batch.parts == 1
    assert difference(whole, split) < 1e-9
    preds, targets = split.get_preds()
    assert torch.allclose(preds, whole.get_preds()[0], atol=1e-9)
    assert torch.equal(targets, whole.get_preds()[1])
    assert abs(split.validate()[0] - whole.validate()[0]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 20])
def test_a_validation_in_the_middle_of_a_batch_leaves_its_parts_alone(order):
    class Validates(Callback):
        def __init__(self, event):
            super().__init__(**{event: lambda cb: cb.learn.validate() if cb.learn.training else None})
            self.order = order

    for event in ("before_batch", "after_pred", "after_loss", "after_backward", "after_batch"):
        limit = Limit(7)
        assert difference(fitted(cbs=[Validates(event)]), fitted(limit, [SplitBatch(), Validates(event)])) < 1e-9
        assert limit.failures


def test_inputs_may_have_a_graph_and_get_their_gradients_once():
    class Scaled(Callback):
        def before_batch(self):
            if self.training:
                factor = self.model[0].bias[0].exp()
                self.learn.xb = ((self.learn.x * factor).requires_grad_(),)
                self.learn.x.retain_grad()
                self.given = getattr(self, "given", [])

        def after_backward(self):
            self.given.append(self.learn.x.grad.clone())

    class Second(Limit):
        def _check(self, module, rows):
            if len(self.seen) == 2 and not self.failures:
                self.failures += 1
                raise self.error

    loss = nn.CrossEntropyLoss(weight=WEIGHTS)
    whole = fitted(cbs=[Scaled()], loss=loss)
    for limit in (Second(20), Limit(7, "backward")):
        split = fitted(limit, [Scaled(), SplitBatch(parts=2)], loss=loss)
        assert limit.failures
        assert difference(whole, split) < 1e-9
        pairs = zip(whole.scaled.given, split.scaled.given, strict=True)
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in pairs)


class Heads(nn.Module):
    """Has a head of which the loss knows nothing."""

    def __init__(self):
        super().__init__()
        self.body, self.other, self.unused = make_net(), make_net(), make_net()
        self.other[0].weight.register_hook(lambda grad: 2 * grad)  # not called without one

    def forward(self, x):
        return {"logits": self.body(x), "more": self.other(x)}


def test_a_callback_may_make_a_loss_of_an_output_that_the_loss_leaves_out():
    class More(Callback):
        def after_loss(self):
            if self.training:
                self.learn.loss_grad = self.loss_grad + self.output["more"].square().mean()

    for limit, parts in ((None, 3), (Limit(7), None)):
        split = fitted(limit, [More(), SplitBatch(parts)], Heads)
        assert difference(fitted(cbs=[More()], model=Heads), split) < 1e-9
        assert difference(fitted(model=Heads), fitted(limit, [Spy(), SplitBatch(parts)], Heads)) < 1e-9


def test_targets_that_a_callback_changes_in_place_behind_the_forward_pass_count():
    class Relabels(Callback):
        def after_pred(self):
            if self.training:
                self.learn.y[:3] = 0

    assert difference(fitted(cbs=[Relabels()]), fitted(Limit(7), [Relabels(), SplitBatch()])) < 1e-9


def test_a_batch_that_counts_nothing_in_a_step_of_several():
    class Ignores(Callback):
        def before_batch(self):
            if self.training and self.iter == 1:
                self.learn.yb = (torch.full_like(self.learn.y, -100),)

    def accumulated(*cbs):
        return fitted(cbs=[Ignores(), GradientAccumulation(n_batches=2), *cbs])

    assert difference(accumulated(), accumulated(SplitBatch(parts=2))) < 1e-9


def test_more_parts_than_samples_are_one_for_each():
    most = fitted(None, [SplitBatch(parts=10**9)])
    assert difference(fitted(), most) < 1e-9
    assert difference(fitted(None, [SplitBatch(parts=20)]), most) == 0


@pytest.mark.parametrize(("parts", "last"), [(10, 7), (19, 3)])
def test_no_part_has_a_single_sample_where_a_norm_needs_two(parts, last):
    sizes = []
    model = make_net(norm=True)
    model[1].register_forward_pre_hook(lambda norm, given: sizes.append(len(given[0])) if norm.training else None)
    fitted(None, [SplitBatch(parts=parts)], lambda: model, dls=make_loaders(20 + last), epochs=1)
    assert min(sizes) >= 2
    assert sum(sizes) == 20 + last


# What a failed try leaves behind


@pytest.mark.parametrize("where", mostly_slow(["forward", "backward"], "forward"))
def test_random_states_and_buffers_are_as_before_the_failed_try(where):
    def model():
        return make_net(dropout=0.5, norm=True)

    split = fitted(Limit(7, where), [SplitBatch()], model=model)
    assert difference(fitted(cbs=[SplitBatch(parts=3)], model=model), split) == 0
    late = [fitted(Limit(7, where, begins=8), [SplitBatch()], model=model, epochs=3) for _ in range(2)]
    assert difference(*late) == 0


class Centred(nn.Module):
    """Has a buffer that its first forward pass makes."""

    def __init__(self):
        super().__init__()
        self.body = make_net()
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.training:
            now = x.mean(0).detach()
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return self.body(x - self.mean)


class Counted(nn.CrossEntropyLoss):
    """A loss that counts its batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pred, y):
        self.calls += 1
        return super().forward(pred, y)


def test_buffers_that_the_first_pass_makes_and_those_of_the_loss_are_as_before_too(capsys):
    assert difference(fitted(None, [SplitBatch(parts=3)], Centred), fitted(Limit(7), [SplitBatch()], Centred)) == 0
    assert "Not equal to the whole batch: the buffers of Centred" in capsys.readouterr().out
    beforehand = fitted(None, [SplitBatch(parts=3)], loss=Counted())
    split = fitted(Limit(7, "backward"), [SplitBatch()], loss=Counted())
    assert torch.equal(beforehand.loss_func.calls, split.loss_func.calls)


def test_inputs_that_a_model_changes_in_place_are_an_error_and_no_wrong_result():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_net()

        def forward(self, x):
            return self.body(x.mul_(0.5))

    fitted(None, [SplitBatch()], Halves)
    assert difference(fitted(model=Halves), fitted(None, [SplitBatch(parts=2)], Halves)) < 1e-9
    with pytest.raises(torch.OutOfMemoryError, match="its inputs have been changed in place"):
        fitted(Limit(7), [SplitBatch()], Halves)


def test_what_cannot_be_equal_is_said_by_name_once(capsys):
    fitted(Limit(7), [SplitBatch()], model=lambda: make_net(dropout=0.5, norm=True))
    assert capsys.readouterr().out == (
        "SplitBatch takes batches of 20 samples in 3 parts. Not equal to the whole batch: the statistics of 1 "
        "(BatchNorm1d) and the random numbers of 3 (Dropout) (equal in law)\n"
    )


@pytest.mark.parametrize("where", mostly_slow(["forward", "backward"], slow=["backward"]))
def test_no_tensor_of_a_failed_try_stays(where):
    def alive():
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    class Counts(Callback):
        counts = ()

        def after_batch(self):
            self.counts = [*self.counts, alive()]

    fitted(Limit(7, where), [SplitBatch()])  # what torch keeps from its first use on
    counts = [fitted(limit, [SplitBatch(**given), Counts()]).counts.counts
              for limit, given in ((None, {"parts": 3}), (Limit(7, where), {}))]  # fmt: skip
    assert counts[0] == counts[1]


def test_hooks_of_parameters_hear_of_the_whole_gradient_once():
    heard = []

    def model():
        net = make_net()
        net[0].weight.register_hook(lambda grad: heard.append(grad.clone()) or 2 * grad)
        net[0].weight.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.clone()))
        return net

    whole, first = fitted(model=model), list(heard)
    heard.clear()
    assert difference(whole, fitted(Limit(4), [SplitBatch()], model=model)) < 1e-9
    assert len(heard) == len(first)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(heard, first, strict=True))


def test_the_number_of_parts_stays_for_that_size_and_in_the_next_fit():
    limit = Limit(10)
    split = fitted(limit, [SplitBatch()], epochs=2)
    assert limit.failures == 1
    training = [rows for rows in limit.seen if rows != 2 * ROWS]
    assert training[:7] == [20, 10, 10, 10, 10, 10, 10]
    with split.no_bar(), split.no_logging():
        split.fit(1)
    assert limit.failures == 1


def test_a_checkpoint_has_the_number_of_parts_and_the_run_goes_on_bit_by_bit(tmp_path):
    class Killed(Exception):
        pass

    class Kill(Callback):
        order = 20000

        def after_batch(self):
            if self.learn.training and self.learn.train_iter == deadly:
                raise Killed

    def run(limit):
        cbs = [SplitBatch(), CheckpointCallback(tmp_path / "run", every=2, resume=True), Kill()]
        return fitted(limit, cbs, epochs=3)

    whole = fitted(Limit(7), [SplitBatch()], epochs=3)
    deadly = 6
    with pytest.raises(Killed):
        run(Limit(7))
    deadly, limit = 0, Limit(7)
    assert same_weights(whole.model, run(limit).model)
    assert limit.failures == 0


# What is refused


def test_one_sample_that_does_not_fit_is_an_error_with_numbers():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted(Limit(0), [SplitBatch()])
    text = str(caught.value)
    assert text.startswith(f"one sample alone does not fit: {FAILURE}")
    assert "are free; the largest tensors are" in text
    assert "ActivationCheckpointing()" in text


def test_memory_that_runs_out_in_the_optimizers_step_is_an_error_that_says_what_would_help():
    class Full(torch.optim.SGD):
        def step(self, closure=None):
            raise torch.OutOfMemoryError(FAILURE)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted(cbs=[SplitBatch()], opt_func=Full)
    assert str(caught.value) == FAILURE
    assert any(note.startswith("the memory:") for note in caught.value.__notes__)


def test_a_loss_that_compares_samples_is_refused():
    def contrastive(pred, y):
        return F.cross_entropy(pred @ pred.mT, torch.arange(len(pred)))

    with pytest.raises(ValueError, match="contrastive compares the samples of a batch with each other"):
        fitted(Limit(7), [SplitBatch()], loss=contrastive)
    fitted(None, [SplitBatch()], loss=contrastive)  # as long as no batch is cut
    with pytest.raises(ValueError, match="contrastive compares the samples of a batch with each other"):
        fitted(Limit(7, trains=False), [SplitBatch()], loss=contrastive)


@pytest.mark.filterwarnings("ignore:the model makes its own loss")
def test_a_loss_of_the_model_is_refused_until_it_is_said_what_it_averages_over():
    cbs, given = case("own loss")
    del given["loss_weight"]
    with pytest.raises(ValueError, match=r"not known what that averages over.* cannot take a batch in parts"):
        fitted(Limit(4), [*cbs, SplitBatch()], **given)
    fitted(None, [*cbs, SplitBatch()], **given)


def test_what_cannot_be_cut_exactly_is_refused_in_words():
    class State(CarriedState):
        def start(self, n):
            return torch.zeros(n, 3)

    with pytest.raises(ValueError, match="OwnBackward makes backward passes or steps of its own"):
        fitted(cbs=[SplitBatch()], cls=OwnBackward)
    with pytest.raises(ValueError, match="LBFGS makes backward passes or steps of its own"):
        fitted(cbs=[SplitBatch()], opt_func=torch.optim.LBFGS)
    state = State()
    with pytest.raises(ValueError, match="State carries a state"):
        fitted(cbs=[SplitBatch(), state])
    state.run = False
    fitted(cbs=[SplitBatch(), state])
    with pytest.raises(ValueError, match="got parts=0"):
        SplitBatch(parts=0)


def test_what_has_lost_its_graph_is_an_error_in_words():
    class Penalty(Callback):
        def before_batch(self):
            self.learn.xb = (self.xb[0].detach().requires_grad_(),)

        def after_loss(self):
            (slope,) = torch.autograd.grad(self.pred.sum(), self.xb[0], create_graph=self.training)
            self.learn.loss_grad = self.loss_grad + slope.square().sum()

    class OfLayer(Callback):
        run_valid = False

        def before_fit(self):
            self.hook = self.model[1].register_forward_hook(lambda module, x, output: setattr(self, "_output", output))

        def after_loss(self):
            self.learn.loss_grad = self.loss_grad + self._output.square().mean()

        def cleanup_fit(self):
            self.hook.remove()

    for parts in (1, 3):
        with raises(RuntimeError, "create_graph=True asks for a graph of the gradients of a batch"):
            fitted(None, [Penalty(), SplitBatch(parts)])
        with raises(RuntimeError, "SplitBatch has made the backward pass of the batch already"):
            fitted(None, [OfLayer(), SplitBatch(parts)])


def test_a_batch_that_cannot_be_cut_says_so():
    batches = [(torch.randn(20, 6).double(), torch.randint(3, (10,)))] * 2

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_net()

        def forward(self, x):
            return self.body(x)[:10]

    dls = DataLoaders(batches, device="cpu", batch_size=lambda batch: 10)
    with pytest.raises(torch.OutOfMemoryError, match=r"SplitBatch cannot cut a batch of 10 samples"):
        fitted(Limit(7), [SplitBatch()], model=Half, dls=dls)
    with pytest.raises(ValueError, match=r"SplitBatch cannot cut a batch of 10 samples"):
        fitted(None, [SplitBatch(parts=2)], model=Half, dls=dls)


def test_time_major_batches_are_cut_along_their_samples():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 5).double(), nn.Linear(5, 1).double()

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    generator = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randn(4, 12, k, generator=generator, dtype=torch.float64) for k in (6, 1)) for _ in range(3)]

    def dls():
        return DataLoaders(batches, batches, device="cpu", batch_dim=1)

    whole = fitted(dls=dls(), model=Net, loss=nn.MSELoss())
    split = fitted(None, [SplitBatch(parts=5)], dls=dls(), model=Net, loss=nn.MSELoss())
    assert difference(whole, split) < 1e-9


class Listed(nn.Module):
    """Returns as many numbers for a sample as it likes, with states that have no row for each sample."""

    def __init__(self):
        super().__init__()
        self.body = make_net()

    def forward(self, x):
        found = self.body(x)
        return [row[: 1 + i % 2] for i, row in enumerate(found)] if not self.training else found


def test_lists_with_an_entry_for_each_sample_are_joined():
    def listed(limit=None, cbs=()):
        set_seed(1)
        learn = Learner(make_loaders(), Listed(), nn.CrossEntropyLoss(), cbs=list(cbs))
        if limit is not None:
            limit.put_on(learn.model.body)
        with learn.no_bar(), learn.no_logging():
            return learn.get_preds(cbs=Single())[0]

    class Single(Callback):
        def after_pred(self):
            assert isinstance(self.learn.pred, list)
            assert len(self.learn.pred) == self.learn.batch_size
            self.learn.pred = torch.stack([row[0] for row in self.learn.pred])

    whole, limit = listed(), Limit(13, trains=False)
    assert torch.allclose(whole, listed(limit, [SplitBatch()]), atol=1e-9)
    assert limit.failures


@pytest.mark.gpu
def test_a_gpu_whose_memory_is_limited():
    def trained(cbs=()):
        set_seed(1)
        x = torch.randn(8192, 256, dtype=torch.float64)
        data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4096)
        widths = [256, *[1024] * 6, 1]
        layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
        net = nn.Sequential(*layers[:-1], nn.Unflatten(0, (-1, 1)), nn.Flatten()).double()
        learn = Learner(DataLoaders(data, device="cuda"), net, nn.MSELoss(), opt_func=torch.optim.SGD, lr=1e-4, cbs=cbs)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
        return torch.cat([p.detach().flatten().cpu() for p in learn.model.parameters()])

    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    whole = trained()
    gc.collect()
    total, peak = torch.cuda.get_device_properties(0).total_memory, torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.6 * peak / total)
    try:
        split = SplitBatch()
        assert (trained([split]) - whole).abs().max().item() < 1e-9
        assert split.parts > 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
