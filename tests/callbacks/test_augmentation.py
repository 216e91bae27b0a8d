"""BatchTransform, MixUp and CutMix: what they mix, and what they draw."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers import (
    OwnLoss,
    make_classes,
    make_data,
    make_dls,
    make_learner,
    make_model,
    raises,
    results_of,
    same_weights,
    weights,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

from learnerkit import (
    BatchTransform,
    Callback,
    CutMix,
    DataLoaders,
    DataParallelCallback,
    GradientAccumulation,
    Learner,
    MixUp,
    Recorder,
    accuracy,
    set_seed,
)
from learnerkit.distributed import seeds


def make_images(n=8, seed=0):
    """Random images (3, 6, 5) of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(n, 3, 6, 5, generator=generator), torch.randint(3, (n,), generator=generator))


def image_learner(*cbs, loss=None, **kwargs):
    """A classifier of images."""
    set_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 3, 3))
    dls = kwargs.pop("dls", None) or make_dls(12, 4, 4, lambda n, seed=0: make_images(n, seed))
    return make_learner(dls, model, loss or nn.CrossEntropyLoss(), cbs=list(cbs), **kwargs)


class Inputs(Callback):
    """Inputs before and after they are augmented."""

    order = -4
    run_valid = False

    def __init__(self):
        super().__init__()
        self.before, self.after = [], []

    def before_batch(self):
        self.before.append(self.xb[0].clone())

    def after_batch(self):
        self.after.append(self.xb[0].clone())


class Kept(Callback):
    """What the loss is made of, for each training batch."""

    order = 20
    run_valid = False

    def __init__(self):
        super().__init__()
        self.batches = []

    def after_loss(self):
        self.batches.append((self.xb[0], self.pred.detach(), *self.yb, self.loss.clone(), self.loss_grad.detach()))


# Mixing


class Penalty(Callback):
    """Adds to the loss."""

    def after_loss(self):
        self.learn.loss_grad = self.loss_grad + 7


@pytest.mark.parametrize("kind", [MixUp, CutMix])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])),
        lambda pred, y: F.nll_loss(pred.log_softmax(1), y),
        lambda pred, y: F.mse_loss(pred, F.one_hot(y, 3).float()),
    ],
)
def test_samples_and_losses_are_mixed_as_torchvision_mixes_labels(kind, loss):
    mix, seen, kept, streams = kind(1.0), Inputs(), Kept(), []
    note = Callback(order=1, before_batch=lambda cb: streams.append(mix._seed(0)))
    image_learner(mix, seen, kept, Penalty(), note, loss=loss).fit(1)
    images = getattr(v2, kind.__name__)(alpha=1.0, num_classes=3)
    for seed, x, (mixed, pred, y, recorded, differentiated) in zip(streams, seen.before, kept.batches, strict=False):
        with seeds.own_stream(seed, torch.device("cpu")):
            wanted, soft = images(x, y)
        assert torch.equal(mixed, wanted)
        assert not torch.equal(mixed, x)
        assert not y.is_floating_point()
        other = y.roll(1, 0)
        share = next(s[a] for s, a, b in zip(soft, y, other, strict=True) if a != b)
        expected = share * loss(pred, y) + (1 - share) * loss(pred, other)
        torch.testing.assert_close(recorded, expected)
        torch.testing.assert_close(differentiated, expected + 7)  # what others add is not mixed
        if isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None:
            torch.testing.assert_close(recorded, loss(pred, soft))


def test_metrics_see_hard_targets_and_validation_is_plain():
    seen = []
    look = Callback(order=9, before_batch=lambda cb: seen.append((cb.training, cb.xb[0].clone(), cb.yb[0].dtype)))
    learn = image_learner(MixUp(1.0), look, metrics=accuracy)
    learn.remove_cb(Recorder)
    learn.add_cb(Recorder(train_metrics=True))
    learn.fit(1)
    assert "train_accuracy" in learn.recorder.metric_names
    assert {kind for _, _, kind in seen} == {torch.int64}
    ((_, x, _),) = [each for each in seen if not each[0]]
    assert torch.equal(x, learn.dls.valid_ds.tensors[0])
    torch.testing.assert_close(learn.recorder.values[0][2], learn.validate()[0])


def test_one_of_several_mixers_acts_in_each_batch():
    mixing, kinds = [MixUp(), CutMix()], []
    note = Callback(order=1, before_batch=lambda cb: kinds.append([mix._mixed is not None for mix in mixing]))
    note.run_valid = False
    image_learner(*mixing, note).fit(6)
    assert {tuple(kind) for kind in kinds} == {(True, False), (False, True)}


def test_mixing_goes_with_accumulation_half_precision_and_replicas(two_gpus):
    kept = Kept()
    learn = image_learner(MixUp(1.0), kept, GradientAccumulation(n_batches=2), DataParallelCallback()).to_bf16()
    learn.fit(1)
    for _, pred, y, recorded, _ in kept.batches:
        losses = [F.cross_entropy(pred.float(), t).item() for t in (y, y.roll(1, 0))]
        assert min(losses) - 1e-2 <= recorded.item() <= max(losses) + 1e-2
        assert len(set(losses)) == 1 or min(losses) < recorded.item() < max(losses)


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        (lambda: Learner(make_dls(), OwnLoss(), cbs=MixUp()), "this model makes its own loss"),
        (lambda: image_learner(MixUp(), BatchTransform(lambda x: (255 * x).byte())), "uint8 tensor of shape"),
        (lambda: image_learner(MixUp(), dls=DataLoaders([(torch.rand(4, 3, 6, 5), [1, 2, 0, 0])], device="cpu")),
         "targets that are tensors"),
        (lambda: image_learner(MixUp(), dls=DataLoaders([torch.rand(4, 3, 6, 5)], device="cpu")), "no targets"),
        (lambda: image_learner(MixUp(), dls=DataLoaders([{"x": torch.rand(4, 3)}], device="cpu")), "'x': float32"),
        (lambda: make_learner(cbs=CutMix()), "take MixUp"),
        (lambda: image_learner(CutMix(), BatchTransform(lambda x, y: (x, torch.ones(4, 6, 5)), with_targets=True)),
         "take MixUp"),
    ],
)  # fmt: skip
def test_what_cannot_be_mixed_is_refused_before_training(learner, said):
    learn = learner()
    before = weights(learn.model)
    with raises(ValueError, said):
        learn.fit(1)
    assert same_weights(before, learn.model)


@pytest.mark.parametrize("alpha", [0, -1.0, "1"])
def test_alpha_is_above_0(alpha):
    with raises(ValueError, "a number above 0"):
        MixUp(alpha)


@pytest.mark.parametrize("kind", [MixUp, CutMix])
def test_alpha_may_be_a_whole_number(kind):
    assert kind(1).alpha == 1
    assert kind(1)._mix._dist.sample().shape == kind(1.0)._mix._dist.sample().shape


# Transforms of batches


def noise(x):
    return x + torch.rand_like(x)


def augmented(*cbs, epochs=2, fits=1, seed=1, shuffle=True):
    """The inputs of a fit with dropout, and what it has come to."""
    set_seed(seed)
    seen = Inputs()
    dls = DataLoaders.from_datasets(make_data(12), make_data(4, seed=1), bs=4, device="cpu")
    if not shuffle:
        dls = DataLoaders(list(make_dls(12).train), dls.valid, device="cpu")  # they draw nothing
    learn = make_learner(dls, make_model(dropout=0.5 * shuffle), cbs=[seen, *cbs])
    for _ in range(fits):
        learn.fit(epochs)
    return learn, seen


def test_a_transform_draws_from_a_stream_of_its_own():
    plain, _ = augmented()
    drawing, seen = augmented(BatchTransform(lambda x: (torch.rand(9), torch.randperm(7), x)[2], valid=True))
    assert same_weights(plain.model, drawing.model)
    assert plain.recorder.values == drawing.recorder.values
    assert torch.equal(torch.cat(seen.before), torch.cat(seen.after))


@pytest.mark.filterwarnings(
    "ignore:the first batch. all values of the inputs are the same"
)  # as the last one makes them
def test_what_is_drawn_differs_between_steps_fits_and_callbacks_and_comes_again_with_the_seed():
    (_, first), (_, again), (_, other) = (
        augmented(BatchTransform(noise), BatchTransform(noise), fits=2, seed=seed, shuffle=False) for seed in (1, 1, 2)
    )
    added = torch.stack(first.after) - torch.stack(first.before)
    assert len(added.flatten().round(decimals=4).unique()) > 0.95 * added.numel()
    assert torch.equal(torch.stack(first.after), torch.stack(again.after))
    assert not torch.isclose(added, torch.stack(other.after) - torch.stack(other.before)).all(-1).any()
    one, _ = augmented(BatchTransform(lambda x: torch.rand_like(x)), BatchTransform(lambda x: x - torch.rand_like(x)))
    assert one.recorder.values != augmented(BatchTransform(torch.zeros_like))[0].recorder.values


def test_it_acts_where_it_is_told_to():
    learn = make_learner(cbs=BatchTransform(torch.zeros_like, train=False, valid=True))
    seen = []
    learn.fit(1, cbs=Callback(before_batch=lambda cb: seen.append((cb.training, bool(cb.xb[0].any())))))
    assert set(seen) == {(True, True), (False, False)}
    after = []
    for cbs in ([], [BatchTransform(noise), MixUp()]):  # in validation they do not even draw
        set_seed(1)
        make_learner(cbs=cbs).validate()
        after.append(torch.rand(1).item())
    assert len(set(after)) == 1


@pytest.mark.parametrize("event", ["before_batch", "after_batch"])
def test_an_evaluation_inside_a_validation_does_not_change_its_draws(event):
    values, busy = [], []

    def look(cb):
        if not cb.training and cb.iter == 1 and not busy:
            busy.append(True)
            cb.learn.get_preds()
            busy.clear()

    for cbs in ([], [Callback(**{event: look})]):
        set_seed(1)
        learn = make_learner(make_dls(12, 12, 4), cbs=[BatchTransform(noise, valid=True), *cbs])
        learn.fit(2)
        values.append(learn.recorder.values)
    assert values[0] == values[1]


class NotesTargets(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 1), []

    def forward(self, x, targets=None):
        self.seen.append((x, targets))
        return {"squared": (self.layer(x) - targets).square().mean()}


def test_a_model_that_makes_its_own_loss_gets_the_targets_that_go_with_its_inputs():
    model, before = NotesTargets(), []
    note = Callback(before_batch=lambda cb: before.append((cb.xb, cb.yb)))
    cbs = [BatchTransform(lambda x, y: (-x, y + 5), with_targets=True), note]
    Learner(make_learner().dls, model, cbs=cbs, loss_weight="samples").fit(1)
    assert len(before) > 1
    assert all(len(xb) == 2 and xb[1] is yb[0] for xb, yb in before)
    assert all(targets is xb[1] for (_, targets), (xb, _) in zip(model.seen, before, strict=True))
    model.seen, batch = [], {"x": torch.rand(4, 4), "targets": torch.zeros(4, 1)}
    dls = DataLoaders([batch], target_keys=("targets",), device="cpu")
    cbs = BatchTransform(lambda x, y: (x | {"x": -x["x"]}, y + 5), with_targets=True)
    Learner(dls, model, cbs=cbs, loss_weight="samples").fit(1)
    assert [(x.sign().unique().item(), targets.unique().item()) for x, targets in model.seen] == [(-1, 5)]
    assert not batch["targets"].any()


def test_a_transform_that_returns_nothing_is_told():
    with raises(ValueError, "returned None; BatchTransform needs the new inputs"):
        make_learner(cbs=BatchTransform(lambda x: None)).fit(1)


def test_targets_may_be_transformed_too():
    seen = []
    learn = make_learner(cbs=BatchTransform(lambda x, y: (-x, y + 5), with_targets=True))
    learn.fit(1, cbs=Callback(before_batch=lambda cb: seen.append((cb.xb[0], cb.yb[0]))))
    x, y = learn.dls.train_ds.tensors
    assert torch.equal(torch.cat([a for a, _ in seen[:2]]), -x)
    assert torch.equal(torch.cat([b for _, b in seen[:2]]), y + 5)
    learn = make_learner(cbs=BatchTransform(lambda x, y: [-x, y + 5], with_targets=True))  # a list, as kornia's
    learn.fit(1, cbs=Callback(before_batch=lambda cb: seen.append((cb.xb[0], cb.yb[0]))))
    assert torch.equal(torch.cat([b for _, b in seen[3:5]]), y + 5)
    for fn, said in ((lambda x, y: x, "needs (x, y)"), (lambda x, y: None, "needs (x, y)")):
        with raises(ValueError, said):
            make_learner(cbs=BatchTransform(fn, with_targets=True)).fit(1)
    two = DataLoaders([(torch.rand(2, 4), torch.rand(2), torch.rand(2))], n_inp=1, device="cpu")
    for fn in (lambda x, y: (x, y[0] + y[1]), lambda x, y: (x, (*y, y[0]))):
        with raises(ValueError, "needs a tuple of 2, as many targets"):
            make_learner(two, cbs=BatchTransform(fn, with_targets=True)).fit(1)
    with raises(TypeError, "got fn="):
        BatchTransform(v2.RandomHorizontalFlip)


# Several ranks


class Shifts(Callback):
    """What a transform adds to each sample on this rank."""

    order = 20
    run_valid = False

    def __init__(self):
        super().__init__()
        self.found, self.sizes = [], []

    def after_batch(self):
        self.sizes.append(self.batch_size)
        self.found += self.xb[0][:, 0].tolist()


def smoothed(loss, *cbs):
    """A fit with uneven batches."""
    set_seed(1)
    data = make_classes(23)
    x, y = data.tensors
    dls = DataLoaders.from_datasets(TensorDataset(x.double(), y), TensorDataset(x.double(), y), bs=5, device="cpu")
    learn = make_learner(dls, make_model(n_out=3).double(), loss, cbs=list(cbs))
    with learn.distrib_ctx(split_batches=True), learn.no_logging():
        learn.fit(2)
    return {"weights": weights(learn.model), "values": learn.recorder.values}


def some(x):
    assert len(x)
    return noise(x)


def drawn():
    """What ranks add, where the last batch leaves one without data."""
    shifts = Shifts()
    set_seed(1)
    data = TensorDataset(torch.zeros(9, 4), torch.zeros(9, 1))
    learn = make_learner(DataLoaders(DataLoader(data, 4), device="cpu"), cbs=[BatchTransform(some), MixUp(), shifts])
    with learn.distrib_ctx(split_batches=True), learn.no_logging():
        learn.fit(1)
    return shifts.found, shifts.sizes


JOBS = {
    "smoothing": lambda: smoothed(nn.CrossEntropyLoss(label_smoothing=0.1)),
    "all": lambda: smoothed(
        nn.CrossEntropyLoss(torch.tensor([1.0, 2, 5]).double(), ignore_index=1, label_smoothing=0.2),
        GradientAccumulation(n_batches=2),
    ),
    "drawn": drawn,
}


def do(name):
    return JOBS[name]()


found = results_of(do)


@pytest.mark.soak
@pytest.mark.parametrize("job", ["smoothing", "all"])
def test_label_smoothing_on_ranks_equals_that_on_one_process(found, job):
    (alone,) = found[1, job]
    for rank in found[2, job]:
        torch.testing.assert_close(rank, alone, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_on_ranks_each_draws_its_own(found):
    (first, sizes), (second, others) = found[2, "drawn"]
    assert (sizes, others) == ([2, 2, 1], [2, 2, 0])
    assert set(first).isdisjoint(second)
    assert len({*first, *second}) == 9


@pytest.mark.parametrize("run", [lambda learn: learn.fit(1), lambda learn: learn.get_preds(1)])
@pytest.mark.parametrize("given", [lambda fn: fn, lambda fn: fn.forward, lambda fn: partial(fn)])
def test_a_transform_with_buffers_is_moved_to_the_device_of_the_batches(run, given, monkeypatch):
    class Ends(Exception):
        pass

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("by", torch.tensor(2.0))

        def forward(self, x):
            assert self.by.device == x.device  # torch multiplies by one number of any device, but not by filters
            raise Ends

    monkeypatch.setattr(seeds, "own_stream", lambda seed, device: nullcontext())  # "meta" has no random generator
    dls = DataLoaders.from_datasets(make_images(), make_images(), bs=4, device="meta")
    learn = image_learner(BatchTransform(given(Scale()), train=True, valid=True), dls=dls)
    with pytest.raises(Ends):
        run(learn)
