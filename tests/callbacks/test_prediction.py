"""get_preds: what comes back, and in which order."""

import pickle
import random
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import make_classes, make_data, make_dls, make_learner, make_model, mostly_slow, padded, raising
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from learnerkit import (
    AccumMetric,
    Callback,
    CancelBatchException,
    DataLoaders,
    Learner,
    MCDropout,
    SplitBatch,
    load_learner,
    perplexity,
    set_seed,
)
from learnerkit.callbacks.debugging import OverfitBatch
from learnerkit.distributed import seeds
from learnerkit.values import get_field


def classifier(loss=None, **kwargs):
    dls = DataLoaders.from_datasets(make_classes(11), make_classes(7, seed=1), bs=4, device="cpu", drop_last=True)
    return make_learner(dls, make_model(n_out=3), loss or nn.CrossEntropyLoss(), **kwargs)


def expected(learn, data):
    with torch.no_grad():
        return learn.model.eval()(data.tensors[0])


def test_every_sample_is_predicted_once_in_dataset_order():
    learn = classifier()
    for i, data in enumerate((learn.dls.train_ds, learn.dls.valid_ds)):
        preds, targets = learn.get_preds(ds_idx=i)
        assert torch.equal(targets, data.tensors[1])
        torch.testing.assert_close(preds, expected(learn, data))  # in batches, and all at once: other kernels
        assert not preds.requires_grad


def test_items_come_in_their_order():
    learn = classifier()
    x, y = learn.dls.valid_ds.tensors
    inputs, preds, targets, decoded, losses = learn.get_preds(with_input=True, with_loss=True, with_decoded=True)
    assert torch.equal(inputs, x)
    assert torch.equal(targets, y)
    assert torch.equal(decoded, preds.argmax(1))
    torch.testing.assert_close(losses, F.cross_entropy(preds, y, reduction="none"))
    assert learn.loss_func.reduction == "mean"
    probabilities = learn.get_preds(act=lambda p: p.softmax(1))[0]
    torch.testing.assert_close(probabilities, preds.softmax(1))
    assert len(learn.get_preds(with_loss=True)) == 3


def test_a_loader_is_read_in_its_own_order():
    learn = classifier()
    data = learn.dls.valid_ds
    dl = DataLoader(data, sampler=[5, 0, 3], batch_size=2)
    assert torch.equal(learn.get_preds(dl=dl)[1], data.tensors[1][[5, 0, 3]])


class Refills:
    """A loader that puts each batch into the tensors of the one before."""

    def __iter__(self):
        x, y = torch.empty(2, 4), torch.empty(2, 1)
        for value in range(3):
            yield x.copy_(value + torch.eye(2, 4)), y.fill_(value)


def test_a_loader_may_refill_the_tensors_of_a_batch():
    learn = make_learner(DataLoaders(Refills(), Refills(), device="cpu"), metrics=AccumMetric(lambda p, y: y.mean()))
    inputs, preds, targets = learn.get_preds(dl=Refills(), with_input=True)
    assert inputs[:, 2].tolist() == targets.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(preds, learn.model(inputs))
    assert learn.validate()[1] == 1
    seen = []
    note = Callback(before_batch=lambda cb: cb.training and seen.append(cb.x[0, 2].item()))
    learn.fit(2, cbs=[OverfitBatch(2), note])
    assert seen == [0, 1, 0] * 2


def test_without_targets_targets_are_none():
    learn = classifier()
    x = learn.dls.valid_ds.tensors[0]
    preds, targets = learn.get_preds(dl=[x[:3], x[3:]])
    assert len(preds) == 7
    assert targets is None
    with pytest.raises(ValueError, match="no targets"):
        learn.get_preds(dl=[x], with_loss=True)


def test_targets_that_would_not_do_for_the_loss_do_no_harm():
    learn = classifier()
    x = learn.dls.valid_ds.tensors[0]
    _, targets = learn.get_preds(dl=[(x, torch.full((7,), -1))])
    assert targets.tolist() == [-1] * 7


def test_losses_of_several_elements_are_the_samples_means():
    dls = make_dls(8, 7, 4, lambda n, seed=0: make_regression(n, seed))
    for loss in (nn.MSELoss(), F.mse_loss):
        learn = make_learner(dls, make_model(n_out=2), loss)
        preds, targets, losses = learn.get_preds(with_loss=True)
        torch.testing.assert_close(losses, ((preds - targets) ** 2).mean(1))


class Tags(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 3)

    def forward(self, x):
        return self.body(x).transpose(1, 2)


def test_samples_of_several_lengths_are_decoded_and_have_probabilities():
    data = [(torch.randn(n, 2), torch.arange(n) % 3) for n in (3, 7, 5)]
    learn = make_learner(DataLoaders.from_datasets(data, data, bs=2, collate_fn=padded), Tags(), nn.CrossEntropyLoss())
    raw = learn.get_preds()[0]
    assert [row.shape for row in raw] == [(3, 7), (3, 7), (3, 5)]
    preds, targets, decoded = learn.get_preds(with_decoded=True, probs=True)
    assert [len(y) for y in targets] == [7, 7, 5]
    torch.testing.assert_close(preds, [row.softmax(0) for row in raw])
    assert all(map(torch.equal, decoded, (row.argmax(0) for row in raw)))


def test_the_loss_of_a_sample_does_not_depend_on_what_is_beside_it():
    data = [(torch.randn(n, 2), torch.arange(n) % 3) for n in (3, 7, 5)]
    learn = make_learner(DataLoaders.from_datasets(data, data, bs=3, collate_fn=padded), Tags(), nn.CrossEntropyLoss())
    together = learn.get_preds(with_loss=True)[-1]
    alone = learn.get_preds(dl=DataLoader(data, 1, collate_fn=padded), with_loss=True)[-1]
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(alone[0], F.cross_entropy(learn.model.eval()(data[0][0][None]), data[0][1][None]))
    learn = make_learner(make_dls(8, 7), make_model(n_out=3), nn.MSELoss(reduction="sum"))
    losses = learn.get_preds(dl=[(row[None], torch.ones(1, 3)) for row in torch.eye(4)], with_loss=True)[-1]
    torch.testing.assert_close(losses, (learn.model(torch.eye(4)) - 1).square().sum(1))


def test_a_sampler_of_a_part_of_the_dataset_is_told():
    data = make_classes(9)
    dls = DataLoaders(DataLoader(data, 4), DataLoader(data, 4, sampler=SubsetRandomSampler(range(5))), device="cpu")
    learn = make_learner(dls, make_model(n_out=3), nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match="all 9 samples of the dataset of loader 1 .* takes 5 of them: dl=learn.dls"):
        assert len(learn.get_preds()[0]) == 9
    assert len(learn.get_preds(dl=dls[1])[0]) == 5


def make_regression(n, seed):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 4, generator=g), torch.randn(n, 2, generator=g))


def test_the_forward_of_a_loss_module_may_take_the_reduction():
    class Smooth(nn.Module):
        def forward(self, pred, target, reduction="mean"):
            return F.cross_entropy(pred, target, label_smoothing=0.1, reduction=reduction)

    preds, y, losses = classifier(Smooth()).get_preds(with_loss=True)
    torch.testing.assert_close(losses, Smooth()(preds, y, reduction="none"))


def test_a_loss_that_does_not_heed_its_reduction_is_told():
    class Smooth(nn.CrossEntropyLoss):
        def forward(self, pred, target):
            return F.cross_entropy(pred, target, label_smoothing=0.1)

    with pytest.raises(ValueError, match="takes `reduction`, as torch's do; Smooth does not"):
        classifier(Smooth()).get_preds(with_loss=True)


def test_what_cannot_be_had_is_said_before_anything_is_read():
    learn = classifier(lambda pred, y: F.cross_entropy(pred, y))
    with pytest.raises(ValueError, match="takes `reduction`"):
        learn.get_preds(with_loss=True)
    with pytest.raises(ValueError, match="not known how to decode predictions"):
        learn.get_preds(with_decoded=True)
    with pytest.raises(ValueError, match="on='somewhere'"):
        learn.get_preds(on="somewhere")
    with pytest.raises(IndexError, match="no loader 5"):
        learn.get_preds(5)
    with pytest.raises(ValueError, match="empty"):
        learn.get_preds(dl=[])


def test_a_loss_may_bring_its_own_decode():
    class Loss(nn.BCEWithLogitsLoss):
        def decode(self, pred):
            return pred > 0

        def forward(self, pred, y):
            return super().forward(pred, F.one_hot(y, 3).float())

    learn = classifier(Loss())
    preds, _, decoded = learn.get_preds(with_decoded=True)
    assert torch.equal(decoded, preds > 0)


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits, nn.BCELoss()])
@pytest.mark.parametrize("classes", [["a", "b", "c"], ["no", "yes"], None])
def test_binary_losses_say_of_each_class_whether_it_is_likely(loss, classes):
    n_out = 3 if classes and len(classes) == 3 else 1

    def data(n, seed=0):
        g = torch.Generator().manual_seed(seed)
        return TensorDataset(torch.randn(n, 4, generator=g), torch.rand(n, n_out, generator=g).round())

    model = nn.Sequential(make_model(n_out=n_out), nn.Sigmoid() if isinstance(loss, nn.BCELoss) else nn.Identity())
    learn = make_learner(make_dls(8, 7, 4, data), model, loss)
    learn.dls.classes = classes
    preds, _, decoded = learn.get_preds(with_decoded=True)
    likely = preds > (0.5 if isinstance(loss, nn.BCELoss) else 0)
    assert torch.equal(decoded, likely)
    assert likely.any()
    assert not likely.all()
    path = learn.export("binary")
    for each in (learn, load_learner(path, lambda: model)):
        for item, mask in zip(learn.dls.valid_ds.tensors[0], likely, strict=True):
            found = each.predict(item)
            names = [name for name, there in zip(classes or [], mask, strict=False) if there]
            assert found.label == (names if n_out == 3 else classes[int(mask)] if classes else bool(mask))
            assert torch.equal(found.decoded.view(-1), mask)


def test_one_yes_or_no_is_no_name_of_three():
    learn = make_learner(model=nn.Sequential(make_model(n_out=1), nn.Flatten(0)), loss_func=nn.BCEWithLogitsLoss())
    learn.dls.classes = ["a", "b", "c"]
    found = learn.predict(make_data().tensors[0][0])
    assert found.label is found.decoded
    assert found.decoded.dtype == torch.bool


class Several(nn.Module):
    """Predictions as a nested structure, one of them of a length that changes from batch to batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x):
        return {"a": self.body(x), "b": (x[:, :1], x.new_ones(len(x), len(x)))}


def test_nested_predictions_are_joined_by_their_parts():
    learn = make_learner(make_dls(8, 7, 4), Several(), lambda pred, y: pred["a"].mean())
    preds, _ = learn.get_preds()
    x = learn.dls.valid_ds.tensors[0]
    torch.testing.assert_close(preds["a"], learn.model.body(x).detach())
    assert torch.equal(preds["b"][0], x[:, :1])
    assert [len(row) for row in preds["b"][1]] == [4] * 4 + [3] * 3


def test_the_model_is_in_eval_mode_and_stays_so():
    learn = classifier()
    seen = []
    learn.get_preds(cbs=Callback(after_pred=lambda cb: seen.append(cb.model.training)))
    assert set(seen) == {False}
    assert not any(m.training for m in learn.model.modules())


def test_an_evaluation_that_fails_gives_modules_their_modes_back():
    learn = classifier()
    learn.model[2].eval()
    modes = [m.training for m in learn.model.modules()]
    with pytest.raises(ZeroDivisionError):
        learn.get_preds(cbs=Callback(after_pred=lambda cb: 1 / 0))
    assert [m.training for m in learn.model.modules()] == modes


class Own(nn.Module):
    def forward(self, pred, y):
        return F.mse_loss(pred, y)


@pytest.mark.parametrize("name", ["decode", "decodes"])
def test_a_loss_says_how_its_predictions_are_decoded(name):
    loss = Own()
    setattr(loss, name, lambda pred: pred > 0)
    preds, _, decoded = make_learner(loss_func=loss).get_preds(with_decoded=True)
    assert torch.equal(decoded, preds > 0)


class Likely(nn.BCEWithLogitsLoss):
    """A loss in the form of fastai's, which decodes what its activation returned."""

    def activation(self, pred):
        return pred.sigmoid()

    def decodes(self, pred):
        return pred > 0.4


def test_decodes_of_fastai_gets_what_the_activation_of_the_loss_returned():
    learn = make_learner(loss_func=Likely())
    preds, _, decoded = learn.get_preds(with_decoded=True)
    assert torch.equal(decoded, preds.sigmoid() > 0.4)
    assert decoded.any()
    assert (preds < 0.4).all()  # raw outputs are on another scale
    assert torch.equal(learn.get_preds(probs=True, with_decoded=True)[2], decoded)


class MonteCarlo(Callback):
    """Dropout in prediction, as callbacks for fastai have it."""

    def before_validate(self):
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.train()


def test_dropout_in_prediction_differs_from_call_to_call():
    learn = make_learner(make_dls(4, 8), make_model(dropout=0.5), cbs=MonteCarlo())
    preds = torch.stack([learn.get_preds()[0] for _ in range(10)])
    assert (preds.std(0) > 0).all()
    losses = [learn.validate()[0] for _ in range(5)]
    assert len(set(losses)) == 5
    torch.manual_seed(3)
    first = learn.get_preds()[0]
    torch.manual_seed(3)
    assert torch.equal(first, learn.get_preds()[0])


class Noisy(Dataset):
    """Draws from every random stream of the host for each sample."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((4,), random.random() + np.random.rand()) + torch.rand(4), torch.ones(1)


@pytest.mark.parametrize("workers", mostly_slow([0, 2], 0))
@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_an_augmenting_loader_gives_other_data_each_time(workers, generator):
    loader = DataLoader(Noisy(), 3, num_workers=workers, generator=generator)
    learn = make_learner(DataLoaders(DataLoader(make_data(), 4), loader, device="cpu"))
    first, second = (learn.get_preds(with_input=True)[0] for _ in range(2))
    assert not torch.isclose(first, second).any()
    dl = DataLoader(Noisy(), 3, num_workers=workers, generator=generator)
    assert not torch.isclose(*(learn.get_preds(dl=dl, with_input=True)[0] for _ in range(2))).any()


def streams():
    """The states of the host's random streams."""
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_in_a_fit_all_random_streams_are_given_back(monkeypatch):
    kept = []
    monkeypatch.setattr(seeds, "device_streams_kept", lambda device: kept.append(device) or nullcontext())

    def evaluate(cb):
        before = streams()
        readings = [cb.learn.get_preds(with_input=True)[0] for _ in range(2)]
        cb.learn.validate()
        assert torch.equal(*readings)  # each begins where the fit is
        assert streams() == before

    learn = make_learner(DataLoaders(DataLoader(make_data(4), 4), DataLoader(Noisy(), 3), device="cpu"))
    learn.fit(1, cbs=Callback(after_step=evaluate))
    assert kept == [torch.device("cpu")] * 4  # those of the device too, also in the epoch's own validation
    learn.validate()
    assert len(kept) == 4


@pytest.mark.gpu
def test_in_a_fit_the_devices_random_stream_is_given_back_and_outside_it_moves_on():
    dls = DataLoaders(DataLoader(make_data(8), 4), DataLoader(make_data(4, seed=1), 4), device="cuda")
    learn, states = make_learner(dls, make_model(dropout=0.5), cbs=MonteCarlo()), []

    def evaluate(cb):
        before = torch.cuda.get_rng_state()
        cb.learn.get_preds()
        states.append(torch.equal(before, torch.cuda.get_rng_state()))

    learn.fit(1, cbs=Callback(after_step=evaluate))
    assert states == [True, True]
    assert not torch.equal(*(learn.get_preds()[0] for _ in range(2)))


# Test time augmentation


def flips(x):
    """Mirrors some samples by chance, drawing from every random stream."""
    assert random.random() + np.random.rand() >= 0
    return torch.where(torch.rand(len(x), 1) < 0.5, -x, x)


def test_augmented_predictions_are_averaged_with_plain_ones():
    learn = make_learner(make_dls(8, 10))
    seen = []

    def twice(x):
        seen.append(len(x))
        return 2 * x

    (plain, targets), (doubled, _) = learn.get_preds(), learn.get_preds(cbs=Callback(before_batch=double))
    preds, found = learn.tta(batch_tfms=twice, n=3)
    assert torch.equal(found, targets)
    assert sum(seen) == 3 * 10
    torch.testing.assert_close(preds, 0.25 * plain + 0.75 * doubled)
    torch.testing.assert_close(learn.tta(batch_tfms=twice, beta=1.0)[0], plain)
    assert torch.equal(learn.tta(batch_tfms=twice, use_max=True)[0], torch.maximum(plain, doubled))
    both, found = learn.tta(batch_tfms=twice, n=2, beta=None)
    torch.testing.assert_close(both, (doubled, plain))
    assert torch.equal(found, targets)
    acted = learn.tta(batch_tfms=twice, act=torch.sigmoid, beta=0.5)[0]
    torch.testing.assert_close(acted, (plain.sigmoid() + doubled.sigmoid()) / 2)


def double(cb):
    cb.learn.xb = (2 * cb.learn.xb[0],)


def test_every_augmented_reading_is_another():
    learn = make_learner(make_dls(8, 10))
    one, four = learn.tta(batch_tfms=flips, n=1, beta=0)[0], learn.tta(batch_tfms=flips, n=4, beta=0)[0]
    (plain, _), (mirrored, _) = learn.get_preds(), learn.get_preds(cbs=Callback(before_batch=mirror))
    shares = ((four - plain) / (mirrored - plain)).flatten()
    assert len({round(share, 2) for share in shares.tolist()}) > 2  # neither none nor all of the four
    assert not torch.equal(one, four)
    assert not torch.equal(one, learn.tta(batch_tfms=flips, n=1, beta=0)[0])


def test_in_a_fit_augmented_readings_differ_and_leave_the_streams_alone():
    found = []

    def ask(cb):
        before = streams()
        found.append(cb.learn.tta(batch_tfms=flips, n=4, beta=0)[0])
        (plain, _), (mirrored, _) = cb.learn.get_preds(), cb.learn.get_preds(cbs=Callback(before_batch=mirror))
        shares = ((found[-1] - plain) / (mirrored - plain)).flatten()
        assert len({round(share, 2) for share in shares.tolist()}) > 2  # neither none nor all of the four
        assert streams() == before

    make_learner(make_dls(4, 10)).fit(1, cbs=Callback(after_step=ask))
    assert len(found) == 1


def mirror(cb):
    cb.learn.xb = (-cb.learn.xb[0],)


def test_a_loader_may_augment_by_itself():
    class Noisy(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, i):
            x, y = make_data(10, seed=1)[i]
            return x + torch.rand(4), y

    learn = make_learner(make_dls(8, 10))
    preds = learn.tta(dl=DataLoader(Noisy(), 4), n=2)[0]
    assert preds.shape == (10, 1)
    assert not torch.allclose(preds, learn.get_preds()[0])


def test_other_samples_are_augmented_and_averaged(capsys):
    learn = make_learner(make_dls(8, 10))
    tests = learn.dls.test_dl(make_data(7, seed=3).tensors[0], bs=4)
    plain, _, doubled = learn.get_preds(dl=tests) + learn.get_preds(dl=tests, cbs=Callback(before_batch=double))[:1]
    preds, targets = learn.tta(dl=tests, batch_tfms=lambda x: 2 * x, n=2)
    torch.testing.assert_close(preds, 0.25 * plain + 0.75 * doubled)
    assert targets is None
    learn.tta(dl=tests, batch_tfms=lambda x: x)
    assert not capsys.readouterr().out
    labelled = DataLoader(make_data(7, seed=3), 4, shuffle=True)
    with pytest.raises(ValueError, match="same samples in the same order, and the targets of one differ"):
        learn.tta(dl=labelled, batch_tfms=flips)


def test_a_loader_that_augments_nothing_is_told(capsys):
    learn = make_learner(make_dls(8, 10))
    assert torch.equal(learn.tta(dl=learn.dls.valid)[0], learn.get_preds()[0])
    assert "dl= reads the samples as they are, so nothing is augmented" in capsys.readouterr().out
    learn.tta(batch_tfms=lambda x: x)
    assert not capsys.readouterr().out


def test_tta_refuses_a_loader_that_reads_in_another_order():
    learn = classifier()
    with pytest.raises(ValueError, match="same samples in the same order, and the targets of one differ"):
        learn.tta(dl=DataLoader(learn.dls.valid_ds, 4, shuffle=True))


def test_tta_needs_what_augments():
    learn = make_learner()
    with pytest.raises(ValueError, match="one of them, a loader that augments or an augmentation"):
        learn.tta()
    learn.dls.targets = "masks"
    with pytest.raises(ValueError, match="tta averages predictions of changed pictures, in which masks lie in other"):
        learn.tta(batch_tfms=flips)
    with pytest.raises(ValueError, match="got n=0; it is a number of augmented readings, 1 or more"):
        learn.tta(n=0, batch_tfms=flips)
    with pytest.raises(ValueError, match="got beta=7; it is a share from 0 to 1, or None"):
        learn.tta(beta=7, batch_tfms=flips)
    learn.dls.targets = None
    with pytest.raises(ValueError, match="tta can average scores, and act= returns int64 tensor of shape"):
        learn.tta(batch_tfms=flips, act=lambda pred: pred.argmax(1))
    assert learn.tta(batch_tfms=flips, act=lambda pred: pred.argmax(1), use_max=True)[0].dtype == torch.int64


def test_tta_is_the_same_with_data_parallel(two_gpus):
    learn = make_learner(make_dls(8, 10))
    found = []
    for context in (learn.parallel_ctx(), nullcontext()):
        set_seed(0)
        with context:
            found.append(learn.tta(batch_tfms=flips)[0])
    assert torch.equal(*found)


def test_a_list_with_an_entry_for_each_sample_is_joined_by_samples():
    class Each(nn.Module):
        def forward(self, x):
            return [row.expand(3, 4) for row in x]

    class Mappings(nn.Module):
        def forward(self, x):
            return [{"boxes": row.expand(1 + i, 4)} for i, row in enumerate(x)]

    class Heads(nn.Module):
        def forward(self, x):
            return [x, 2 * x]

    preds, _ = make_learner(make_dls(7, bs=2), Each()).get_preds(ds_idx=0)  # at last a batch of one
    assert [tuple(p.shape) for p in preds] == [(3, 4)] * 7
    preds, _ = make_learner(make_dls(7, bs=2), Mappings()).get_preds(ds_idx=0)
    assert [len(p["boxes"]) for p in preds] == [1, 2, 1, 2, 1, 2, 1]
    (one, two), _ = make_learner(make_dls(6, bs=2), Heads()).get_preds()
    assert torch.equal(2 * one, two)


class Named(NamedTuple):
    score: torch.Tensor
    names: list


@dataclass
class Fields:
    score: torch.Tensor
    names: list


class WithNames(nn.Module):
    """Returns a score and a name for each sample, in an object of the given kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind(score=x.sum(1, keepdim=True), names=[str(round(value, 3)) for value in x.sum(1).tolist()])


@pytest.mark.parametrize("kind", [dict, Named, Fields])
@pytest.mark.parametrize("n", [6, 7])
def test_lists_with_an_entry_for_each_sample_are_joined_by_samples_under_names(kind, n):
    learn = make_learner(make_dls(n, bs=3), WithNames(kind))
    preds, _ = learn.get_preds(ds_idx=0)
    assert type(preds) is kind
    assert get_field(preds, "names") == [str(round(value, 3)) for value in get_field(preds, "score")[:, 0].tolist()]
    inputs = list(learn.dls.train_ds.tensors[0])
    for found, x in zip(learn.predict_many(inputs), inputs, strict=True):
        alone = get_field(learn.predict(x).pred, "names")
        assert get_field(found.pred, "names") == alone == [str(round(x.sum().item(), 3))]


class TwoOutputs(nn.Module):
    """Returns two outputs, of which the second one belongs to the batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x):
        return self.body(x), x.sum(0, keepdim=True)


def several(n):
    def loss(pred, y):
        return F.mse_loss(pred[0], y)

    set_seed(3)
    learn = make_learner(make_dls(8, n, 4), TwoOutputs().eval(), loss, metrics=AccumMetric(loss, name="mse"))
    return learn, learn.dls.valid_ds.tensors[0]


def test_several_outputs_stay_several_in_a_batch_with_as_many_samples():
    for n in (7, 6):  # the last batch has 3 samples, or 2
        learn, x = several(n)
        (pred, sums), _ = learn.get_preds()
        torch.testing.assert_close(pred, learn.model(x)[0])
        assert sums.shape == (2, 4)
        assert learn.validate()[0] == pytest.approx(learn.validate()[1])
        assert len(learn.show_results(2).rows) == 2
    both = learn.predict_many([x[0], x[1]])
    for one, row in zip(both, x, strict=False):
        torch.testing.assert_close(one.pred[0], learn.model(row[None])[0][0])
    trained = []
    for cbs in ([], [SplitBatch(2)]):
        learn, _ = several(6)
        learn.fit(1, cbs=cbs)
        trained.append(learn.model.body.weight)
    torch.testing.assert_close(*trained)


# One input


class Pair(nn.Module):
    """Takes two inputs, by place or by name."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, a, b):
        return self.body(a - 2 * b)


class Pairs(Dataset):
    """Two inputs and a class, as tuples or as mappings."""

    def __init__(self, named=False):
        self.a, self.b, self.named = make_data(6, 4, 4).tensors, torch.arange(6) % 3, named

    def __len__(self):
        return 6

    def __getitem__(self, i):
        a, b, y = self.a[0][i], self.a[1][i], self.b[i]
        return {"a": a, "b": b, "labels": y} if self.named else (a, b, y)


def test_predict_gives_the_row_of_get_preds_and_leaves_no_trace():
    learn = classifier(cbs=Callback(before_batch=double))
    learn.fit(1)
    learn.dls.classes = ["ant", "bee", "cow"]
    learn.model.train()
    preds, _, decoded = learn.get_preds(with_decoded=True)
    learn.model.train()
    learn._workers = "of a notebook, which have nothing to do with it"
    before, rows, cbs = streams(), list(learn.recorder.values), list(learn.cbs)
    for i in range(3):
        label, number, pred = learn.predict(learn.dls.valid_ds[i][0])
        torch.testing.assert_close(pred, preds[i])
        assert (number, label) == (decoded[i], learn.dls.classes[decoded[i]])
    probabilities = learn.predict(learn.dls.valid_ds[0][0], act=lambda p: p.softmax(1)).pred
    torch.testing.assert_close(probabilities, preds[0].softmax(0))
    assert learn.model.training
    assert (streams(), learn.recorder.values, learn.cbs, learn.task) == (before, rows, cbs, None)


@pytest.mark.parametrize("named", [False, True])
def test_predict_takes_an_input_as_the_dataset_yields_it(named):
    data = Pairs(named)
    learn = make_learner(DataLoaders.from_datasets(data, data, bs=4, device="cpu"), Pair(), nn.CrossEntropyLoss())
    preds = learn.get_preds()[0]
    a, b, y = data[5].values() if named else data[5]
    item = {"a": a, "b": b} if named else (a, b)
    torch.testing.assert_close(learn.predict(item).pred, preds[5])
    assert learn.predict(item).label == learn.predict(item).decoded == preds[5].argmax()
    if named:
        torch.testing.assert_close(learn.predict(item | {"labels": y}).pred, preds[5])


def test_predict_decodes_where_somebody_knows_how():
    x = make_data().tensors[0][0]
    learn = make_learner(model=make_model(n_out=3), loss_func=lambda pred, y: F.mse_loss(pred, y))
    label, decoded, pred = learn.predict(x)
    assert label is decoded is None
    assert pred.shape == (3,)
    for learn.loss_func in (nn.MSELoss(), F.l1_loss, partial(F.huber_loss, delta=2.0)):  # numbers stay as they are
        assert learn.predict(x).decoded.equal(pred)
        assert learn.predict(x).label.equal(pred)
    one = make_learner(model=make_model(n_out=1)).predict(x)
    assert type(one.label) is float
    assert one.label == one.decoded == one.pred
    learn.loss_func, learn.dls.classes = Own(), ["a", "b", "c"]
    learn.loss_func.decode = lambda pred: pred > pred.mean()
    label, decoded, pred = learn.predict(x)
    assert label == [name for name, score in zip("abc", pred, strict=True) if score > pred.mean()]
    learn.loss_func.decode = lambda pred: torch.full((len(pred),), -1)  # no class
    assert learn.predict(x)[:2] == (-1, -1)
    learn.loss_func.decode = lambda pred: pred.argmax(1).numpy()
    items = list(learn.dls.valid_ds.tensors[0][:3])
    best = [learn.predict(item).pred.argmax() for item in items]
    assert [(one.label, one.decoded) for one in learn.predict_many(items)] == [("abc"[i], i) for i in best]
    learn.loss_func.decode = lambda pred: np.array(["abc"[i] for i in pred.argmax(1)])
    assert [one.label for one in learn.predict_many(items)] == ["abc"[i] for i in best]
    pred = learn.predict(x, act=lambda pred: pred.softmax(1).numpy()).pred
    torch.testing.assert_close(pred, learn.predict(x, act=lambda pred: pred.softmax(1)).pred)
    learn.loss_func = None
    assert learn.predict(x).label == "abc"[learn.predict(x).pred.argmax()]
    preds, _, decoded = learn.get_preds(dl=[x[None]], with_decoded=True)
    assert torch.equal(decoded, preds.argmax(1))


@pytest.mark.parametrize(("tokens", "right"), [(4, True), (3, False)])
def test_classes_of_tokens_are_in_the_last_dimension_unless_there_are_as_many_tokens(tokens, right):
    class Tags(nn.Embedding):
        def forward(self, x):
            return {"logits": super().forward(x), "loss": torch.zeros(())}

    data = [(torch.arange(tokens), torch.zeros(tokens).long())] * 4
    learn = Learner(DataLoaders.from_datasets(data, data, classes="abc", device="cpu"), Tags(9, 3))
    decoded = learn.predict(data[0][0]).decoded
    assert torch.equal(decoded, learn.model.weight[:tokens].argmax(1)) if right else decoded is None
    refused = nullcontext() if right else pytest.raises(ValueError, match="decode predictions for the model's own loss")
    with refused:
        learn.get_preds(with_decoded=True)


def test_predict_has_the_precision_of_the_learner_and_needs_no_torch_loader():
    x, y = make_data(4).tensors
    learn = make_learner(DataLoaders([(x, y)], device="cpu")).to_bf16()
    pred = learn.predict(x[1]).pred
    assert pred.dtype == torch.float32
    torch.testing.assert_close(pred, learn.get_preds(dl=[x])[0][1], rtol=0, atol=1e-6)
    assert not torch.equal(pred, learn.to_fp32().predict(x[1]).pred)
    with pytest.raises(ValueError, match="a callback has cancelled the prediction"):
        learn.add_cb(raising("before_batch", CancelBatchException())).predict(x[1])


def test_batches_that_a_callback_cancels_are_left_out():
    learn = make_learner(make_dls(valid=12))
    skip = raising("before_batch", CancelBatchException(), lambda cb: cb.iter == 1)
    pred, target = learn.get_preds(cbs=skip)
    whole = learn.get_preds()
    for given, one in zip((pred, target), whole, strict=True):
        assert torch.equal(given, torch.cat([one[:4], one[8:]]))
    with pytest.raises(ValueError, match="there is nothing to predict: .* or a callback cancelled them"):
        learn.get_preds(dl=[torch.ones(2, 4)], cbs=raising("before_batch", CancelBatchException()))


def test_predict_takes_the_only_entry_of_what_is_no_tensor():
    class Detector(nn.Module):
        def forward(self, x):
            return [{"boxes": row.expand(1, 4)} for row in x]

    x = make_data().tensors[0][0]
    assert torch.equal(make_learner(model=Detector()).predict(x).pred["boxes"], x[None])


def test_predict_in_the_middle_of_a_fit_changes_nothing_of_it():
    models = []
    for cbs in ([], [Callback(after_step=ask_twice), Callback(after_loss=ask_twice)]):
        torch.manual_seed(3)
        learn = make_learner(make_dls(8, 4), make_model(dropout=0.5))
        learn.fit(2, cbs=cbs)
        models.append(learn.model)
    assert all(torch.equal(*pair) for pair in zip(*(m.state_dict().values() for m in models), strict=True))


def ask_twice(cb):
    learn = cb.learn
    if learn.task == "predict":
        return  # it is heard there too
    before = {name: getattr(learn, name) for name in ("dl", "batch", "xb", "yb", "pred", "loss", "iter", "training")}
    x = learn.dls.train.dataset[0][0]
    assert torch.equal(learn.predict(x).pred, learn.predict(x).pred)  # without dropout
    assert all(getattr(learn, name) is value for name, value in before.items())


# Inputs without targets


def test_a_loader_of_inputs_reads_as_the_validation_loader_does():
    data = make_classes(7, seed=1)
    learn = classifier()
    preds, targets = learn.get_preds(dl=learn.dls.test_dl(data.tensors[0]))
    assert targets is None
    for items in (list(data.tensors[0]), TensorDataset(data.tensors[0])):
        dl = learn.dls.test_dl(items, bs=3)
        assert [len(batch[0] if isinstance(batch, list) else batch) for batch in dl] == [3, 3, 1]
        torch.testing.assert_close(learn.get_preds(dl=dl)[0], preds)
    for options in ({"batch_size": 3}, {"batch_sampler": [[0, 1, 2], [3, 4, 5], [6]]}):
        dl = learn.dls.test_dl(data.tensors[0], **options)
        assert len(dl) == 3
        torch.testing.assert_close(learn.get_preds(dl=dl)[0], preds)
    pairs = Pairs()
    learn = make_learner(DataLoaders.from_datasets(pairs, bs=4, device="cpu"), Pair(), nn.CrossEntropyLoss())
    preds, targets = learn.get_preds(dl=learn.dls.test_dl([pairs[i][:2] for i in range(6)]))  # n_inp is not said
    assert targets is None
    torch.testing.assert_close(preds, learn.get_preds(0)[0])
    for wrong in ({"a": 1}, "abc", iter([1])):
        with pytest.raises(TypeError, match="test_dl takes a dataset, or a sequence"):
            learn.dls.test_dl(wrong)


def test_a_series_is_read_by_the_places_of_its_entries():
    pd = pytest.importorskip("pandas")
    x = make_classes(7, seed=1).tensors[0]
    learn = classifier()
    series = pd.Series(list(x), index=[*reversed(range(7))])
    assert torch.equal(learn.get_preds(dl=learn.dls.test_dl(series))[0], learn.get_preds(dl=learn.dls.test_dl(x))[0])
    with pytest.raises(TypeError, match="got items of the type DataFrame; test_dl takes a dataset, or a sequence"):
        learn.dls.test_dl(series.to_frame())


class LengthOfText(nn.Module):
    """Scores texts, each by its length."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, texts):
        return self.linear(torch.tensor([[float(len(text))] for text in texts]))


@pytest.mark.parametrize("texts", [["abc"], ["abc", "de"], ["abc", "de", "fgh"]])
def test_the_texts_of_a_batch_without_targets_are_one_input(texts):
    pairs = [("ab", 0), ("abcd", 1)]
    learn = make_learner(
        DataLoaders.from_datasets(pairs, pairs, bs=2, device="cpu"), LengthOfText(), nn.CrossEntropyLoss()
    )
    expected = learn.model(texts).detach()
    for bs in (1, 2):
        for dl in (learn.dls.test_dl(texts, bs=bs), DataLoader(texts, bs)):
            assert torch.equal(learn.get_preds(dl=dl)[0], expected)
    assert torch.equal(learn.predict(texts[0]).pred, expected[0])


def joined(samples):
    return torch.stack([sample[0] for sample in samples]), None


def pairs_joined(samples):
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def test_a_collate_function_gets_tuples_where_samples_are_some():
    data = make_classes(7, seed=1)
    found = []
    for collate in (joined, pairs_joined):
        dls = DataLoaders.from_datasets(data, data, bs=4, device="cpu", collate_fn=collate)
        learn = make_learner(dls, make_model(n_out=3), nn.CrossEntropyLoss())
        if collate is joined:
            found = learn.get_preds(dl=dls.test_dl(list(data.tensors[0])))[0]
            continue
        with pytest.raises(ValueError, match=r"pairs_joined, cannot join .* give it one that can: .*collate_fn="):
            learn.predict(data.tensors[0][0])
        preds = learn.get_preds(dl=dls.test_dl(list(data.tensors[0]), collate_fn=torch.stack))[0]
        assert torch.equal(preds, found)


def test_a_loader_without_samples_joins_inputs_by_its_collate_function():
    dls = DataLoaders(DataLoader([], 4, collate_fn=torch.stack), device="cpu")
    learn, x = make_learner(dls, make_model(n_out=3), nn.CrossEntropyLoss()), make_classes(2, seed=1).tensors[0]
    assert torch.equal(torch.stack([found.pred for found in learn.predict_many(list(x))]), learn.model(x))


# Probabilities


def own_loss_model():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_model(n_out=3)

        def forward(self, x):
            return {"logits": self.body(x)}

    return Own()


class Activates(nn.CrossEntropyLoss):
    def activation(self, pred):
        return pred.sigmoid() / 2

    def decode(self, pred):
        return pred.argmin(1)


PROBABILITIES = {
    "cross-entropy": (nn.CrossEntropyLoss(), lambda p: p.softmax(1)),
    "function": (partial(F.cross_entropy, label_smoothing=0.1), lambda p: p.softmax(1)),
    "log-probabilities": (nn.NLLLoss(), torch.exp),
    "binary": (nn.BCEWithLogitsLoss(), torch.sigmoid),
    "shares": (nn.BCELoss(), lambda p: p),
    "own": (Activates(), lambda p: p.sigmoid() / 2),
    "the model's": (None, lambda p: p.softmax(1)),
}


@pytest.mark.parametrize("case", PROBABILITIES)
def test_probabilities_are_made_as_the_loss_says(case):
    loss, made = PROBABILITIES[case]
    learn = classifier()
    learn.dls.classes = "abc"
    if loss is None:
        learn.model = own_loss_model()
    learn.loss_func = loss
    preds = learn.get_preds()[0]
    probs = learn.get_preds(probs=True)[0]
    torch.testing.assert_close(probs, made(preds))
    torch.testing.assert_close(learn.tta(n=1, batch_tfms=lambda x: x, probs=True)[0], probs)
    x = learn.dls.valid_ds.tensors[0][0]
    for found in (learn.predict(x), learn.predict(x, act=torch.exp), learn.predict(x, probs=True)):
        label, decoded, pred = found
        assert case in ("binary", "shares") or label == "abc"[int(decoded)]
        torch.testing.assert_close(found.probs, probs[0])
        torch.testing.assert_close(pickle.loads(pickle.dumps(found)).probs, probs[0])
    torch.testing.assert_close(pred, probs[0])
    learn.add_cb(Callback(before_validate=lambda cb: None))  # so that it goes through the loop
    torch.testing.assert_close(learn.predict(x).probs, probs[0])


class Decodes(nn.CrossEntropyLoss):
    def decode(self, pred):
        return pred.argmin(1)


@pytest.mark.parametrize("loss", [nn.MSELoss(), Decodes(), lambda pred, y: pred.mean(), None])
def test_probabilities_that_nothing_says_how_to_make_are_refused(loss):
    learn = classifier()
    learn.loss_func = loss
    name = "the model's" if loss is None else getattr(loss, "__name__", type(loss).__name__)
    refused = pytest.raises(ValueError, match=rf"probabilities of predictions for this loss \({name}\); say act=")
    x = learn.dls.valid_ds.tensors[0][0]
    with refused:
        learn.get_preds(probs=True)
    found = learn.predict(x)
    with refused:
        _ = found.probs
    learn.loss_func, learn.dls.classes = None, "ab"  # fewer than the model has outputs
    with pytest.raises(ValueError, match=r"this loss \(the model's\); say act="):
        learn.get_preds(probs=True)
    with pytest.raises(ValueError, match="got act=.* and probs=True, .* give one of them"):
        learn.predict(x, act=torch.exp, probs=True)


def test_one_score_for_each_sample_has_the_probability_of_yes():
    learn = make_learner(make_dls(classes=["no", "yes"]), None, nn.BCEWithLogitsLoss())
    found = learn.predict(torch.randn(4))
    assert found.label == ("yes" if float(found.probs) > 0.5 else "no")
    torch.testing.assert_close(found.probs, found.pred.sigmoid())


def test_a_dataset_is_no_loader():
    learn = classifier()
    for given in (learn.dls.valid_ds, torch.zeros(4, 4), np.zeros((4, 4), "float32")):
        for read in (learn.get_preds, learn.validate):
            with pytest.raises(
                TypeError, match=r"the given loader is a dataset .*put it into a DataLoader, or .*test_dl\(inputs\)"
            ):
                read(dl=given)


def test_a_class_without_a_name_is_an_error():
    learn = classifier()
    learn.dls.classes = ["a"]
    with torch.no_grad():
        list(learn.model.parameters())[-1][:] = torch.tensor([0.0, 0.0, 1e3])
    with pytest.raises(ValueError, match="the model predicts class 2, and there are 1 names: give DataLoaders"):
        learn.predict(learn.dls.valid_ds.tensors[0][0])


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss(), Decodes(), Activates()])
def test_exported_weights_have_them_too(loss, tmp_path):
    learn = classifier(loss)
    learn.dls.classes = ["T-shirt/top", "b", "c"]
    x = learn.dls.valid_ds.tensors[0][0]
    again = load_learner(learn.export(tmp_path / "a.safetensors"), partial(make_model, n_out=3), device="cpu")
    again = load_learner(again.export(tmp_path / "b.safetensors"), partial(make_model, n_out=3), device="cpu")
    assert again.dls.classes[0] == "T-shirt/top"
    if isinstance(loss, nn.MSELoss | Decodes | Activates):  # methods of the loss are code, which no file has
        with pytest.raises(ValueError, match="say act="):
            again.predict(x, probs=True)
    else:
        torch.testing.assert_close(again.predict(x).probs, learn.predict(x).probs)


def test_an_exported_program_has_them_too(tmp_path):
    learn = classifier()
    learn.dls.classes = ["T-shirt/top", "b", "c"]
    again = load_learner(learn.export(tmp_path / "program.pt2"), device="cpu")
    x = learn.dls.valid_ds.tensors[0]
    torch.testing.assert_close(again.predict(x[0]).probs, learn.predict(x[0]).probs)
    assert learn.predict(x[0]).label == again.predict(x[0]).label
    probs = again.get_preds(dl=again.dls.test_dl(list(x)), probs=True)[0]
    torch.testing.assert_close(probs, learn.get_preds(probs=True)[0])


@pytest.mark.parametrize("event", ["before_batch", "after_pred", "after_batch", "after_validate"])
@pytest.mark.parametrize("inner", ["validate", "get_preds", "predict"])
def test_an_evaluation_inside_another_leaves_what_that_collects(inner, event):
    learn = classifier(metrics=[AccumMetric(lambda p, y: p.var(), name="var"), perplexity()])
    expected = [learn.get_preds()[0], learn.validate()]

    def look(cb):
        if not busy and (event == "after_validate" or cb.iter == 1):
            busy.append(True)
            args = (torch.ones(4),) if inner == "predict" else (0,)
            getattr(cb.learn, inner)(*args)

    found = []
    for read in (lambda cbs: learn.get_preds(cbs=cbs)[0], lambda cbs: learn.validate(cbs=cbs)):
        busy = []
        found.append(read(Callback(**{event: look})))
        assert busy
    assert torch.equal(expected[0], found[0])
    assert expected[1] == found[1]
    assert not hasattr(learn, "gather_preds")


# Dropout in evaluation


def test_passes_with_dropout_differ_and_leave_the_modes_alone():
    learn = classifier()
    learn.model[2].p = 0.5
    plain = learn.get_preds()[0]
    passes = torch.stack([learn.get_preds(cbs=MCDropout(), probs=True)[0] for _ in range(3)])
    assert not torch.equal(passes[0], passes[1])
    assert passes.std(0).max() > 0
    assert not any(module.training for module in learn.model.modules())
    assert torch.equal(learn.get_preds()[0], plain)
    modes = []
    learn.fit(1, cbs=[MCDropout(), Callback(after_pred=lambda cb: modes.append((cb.training, cb.model[2].training)))])
    assert {mode for _, mode in modes} == {True}
    modes.clear()
    learn.fit(1, cbs=Callback(after_pred=lambda cb: modes.append((cb.training, cb.model[2].training))))
    assert all(training == mode for training, mode in modes)


def test_dropout_in_a_transformer_is_left_on_too():
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True), nn.Linear(4, 1))
    inputs = TensorDataset(torch.randn(6, 3, 4), torch.zeros(6, 3, 1))
    learn = make_learner(DataLoaders(DataLoader(inputs, 6), DataLoader(inputs, 6), device="cpu"), model)
    first, second = (learn.get_preds(cbs=MCDropout())[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(*(learn.get_preds()[0] for _ in range(2)))


def test_an_evaluation_inside_another_one_puts_back_what_it_has_found():
    learn = classifier()
    inner = iter([True])
    evaluate = Callback(after_pred=lambda cb: next(inner, False) and cb.learn.validate())
    learn.validate(cbs=[MCDropout(), evaluate])
    learn.add_cb(MCDropout())
    inner = iter([True])
    modes = []
    learn.validate(cbs=[evaluate, Callback(after_batch=lambda cb: modes.append(cb.model[2].training))])
    assert modes == [True] * len(modes) != []
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(module.training for module in learn.model.modules())


def test_a_model_without_dropout_is_refused():
    learn = make_learner(model=nn.Linear(4, 1))
    with pytest.raises(ValueError, match="MCDropout found no module of dropout in Linear"):
        learn.get_preds(cbs=MCDropout())
    assert torch.backends.mha.get_fastpath_enabled()
