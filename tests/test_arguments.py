"""Checks at the rim, one by one; `test_learner.py` has them as a user meets them."""

import re
import warnings
from inspect import getdoc, signature
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_data, make_dls, make_learner, make_model
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from learnerkit import Callback, DataLoaders, Learner, arguments, load_learner
from learnerkit.distributed import facts
from learnerkit.explain import explain


def test_broadcasting_is_refused_in_validation_too():
    dls = DataLoaders(DataLoader(make_data(4), 4), [(torch.zeros(4, 4), torch.zeros(4))], device="cpu")
    with pytest.raises(ValueError, match=r"the targets \(4,\)"):
        make_learner(dls).validate()


@pytest.mark.parametrize("loader", [[1], iter([]), (x for x in []), DataLoader(make_data(4), 4, drop_last=True)])
def test_what_has_batches_or_does_not_say_passes(loader):
    arguments.check_not_empty(loader, "the loader")


def test_a_loader_has_a_length_where_it_is_needed():
    assert arguments.check_length([1, 2], "a schedule") == 2
    with pytest.raises(
        ValueError, match=r"a schedule needs to know .* \(list_iterator\) has no length; give it a __len__"
    ):
        arguments.check_length(iter([]), "a schedule")


def test_every_message_names_what_was_got():
    cases = [
        (lambda: Learner("data", make_model()), "str"),
        (lambda: Learner(make_dls(), "model"), "'model'"),
        (lambda: Learner(make_dls(), make_model(), 7), "7"),
        (lambda: Learner(make_dls(), make_model(), opt_func=7), "7"),
        (lambda: make_learner(cbs=7), "7"),
        (lambda: make_learner().fit("two"), "'two'"),
        (lambda: make_learner().fit(np.int64(1)), "n_epoch=np.int64(1); it is a whole number, 0 or more: write int("),
        (lambda: make_learner().fit(1, start_epoch=-3), "-3"),
        (lambda: make_learner().save("a/../b"), "'a/../b'"),
        (lambda: make_learner().get_preds(on="rank1"), "'rank1'"),
        (lambda: make_learner(loss_weight="mean"), "'mean'"),
        (lambda: Callback(befor_fit=print), "'befor_fit'"),
    ]
    for bad, got in cases:
        with pytest.raises((TypeError, ValueError)) as e:
            bad()
        assert got in str(e.value)
        assert len(str(e.value)) > 30


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda learn: learn.fit(epochs=3), "n_epoch"),
        (lambda learn: learn.fit(1, callbacks=[]), "cbs"),
        (lambda learn: learn.fit(1, learning_rate=0.1), "lr"),
        (lambda learn: learn.fit_one_cycle(1, lr=0.1), "lr_max"),
        (lambda learn: learn.fit_flat_cos(max_epochs=1), "n_epoch"),
        (lambda learn: learn.fine_tune(1, lr=0.1), "base_lr"),
        (lambda learn: learn.fine_tune(1, callbacks=[]), "cbs"),
        (lambda learn: learn.lr_find(num_its=3), "num_it"),
        (lambda learn: learn.validate(cb=[]), "cbs"),
        (lambda learn: learn.get_preds(with_inputs=True), "with_input"),
        (lambda learn: Learner(learn.dls, learn.model, metric=[]), "metrics"),
        (lambda learn: Learner(learn.dls, learn.model, optimizer=SGD), "opt_func"),
        (lambda learn: Learner(learn.dls, learn.model, criterion=nn.MSELoss()), "loss_func"),
        (lambda learn: Learner(data=learn.dls, model=learn.model), "dls"),
        (lambda learn: DataLoaders(learn.dls.train, target_key="y"), "target_keys"),
        (lambda learn: DataLoaders.from_datasets(make_data(), workers=2), "num_workers"),
        (lambda learn: DataLoaders.from_datasets(make_data(), collate=None), "collate_fn"),
        (lambda learn: learn.show_results(max_n=4), "n"),
        (lambda learn: learn.dls.show_batch(max_n=4), "n"),
        (lambda learn: load_learner("x", models=1), "model"),
    ],
)
def test_a_keyword_of_another_library_or_a_misspelled_one_is_told(call, meant):
    with pytest.raises(TypeError, match=f"unexpected keyword argument .*; did you mean {meant!r}"):
        call(make_learner())


@pytest.mark.parametrize("name", ["class_weights", "class_weight"])
def test_weights_of_the_classes_for_a_plain_learner_are_told_where_they_go(name):
    learn = make_learner()
    with pytest.raises(TypeError, match=f"{name}'; class_weights= is an argument of vision_learner, .*weight=...") as e:
        Learner(learn.dls, learn.model, **{name: "balanced"})
    assert "did you mean" not in str(e.value)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; class_weights= is"):
        learn.fit(1, **{name: [1, 2]})


def test_a_keyword_that_nothing_resembles_gets_the_list_of_those_that_are_there():
    with pytest.raises(TypeError, match=r"Learner.fit\(\) got .* 'xyz'; it takes n_epoch, lr, wd, cbs, reset_opt"):
        make_learner().fit(1, xyz=1)
    with pytest.raises(TypeError, match=r"Learner.summary\(\) got .* 'bs'; it takes none"):
        make_learner().summary(bs=1)


def test_keywords_are_checked_before_anything_happens_and_signatures_stay():
    learn = make_learner()
    with pytest.raises(TypeError, match="unexpected keyword"):
        learn.fine_tune(1, epoch=2)
    assert all(p.requires_grad for p in learn.model.parameters())
    assert list(signature(Learner.fit).parameters)[:3] == ["self", "n_epoch", "lr"]
    assert "opt_func" in signature(Learner).parameters


SHARED = {"n_epoch", "lr", "wd", "cbs", "reset_opt", "start_epoch", "n_steps"}


@pytest.mark.parametrize("verb", ["fit_one_cycle", "fit_flat_cos", "fit_sgdr"])
def test_arguments_that_verbs_of_training_share_are_those_of_fit(verb):
    fit, own = (signature(getattr(Learner, name)).parameters for name in ("fit", verb))
    assert fit.keys() == {"self", *SHARED}
    assert {name: own[name] for name in own.keys() & SHARED} == {name: fit[name] for name in own.keys() & SHARED}
    assert own.keys() >= {"wd", "cbs", "reset_opt", "start_epoch"}
    documented = set(re.findall(r"^    (\w+): ", getdoc(getattr(Learner, verb)).partition("Raises:")[0], re.MULTILINE))
    assert documented == own.keys() - SHARED - {"self"}


def test_what_is_no_dataset_is_told():
    x = torch.randn(8, 3)
    for inputs, targets in ((x, x[:, 0]), (x.numpy(), x.numpy()), (x, x)):
        with pytest.raises(TypeError, match=r"as the validation set; .* from_datasets\(TensorDataset\(X, y\)\)"):
            DataLoaders.from_datasets(inputs, targets)
    with pytest.raises(TypeError, match=r"got a tuple as a dataset: .* inputs and targets are TensorDataset\(X, y\)"):
        DataLoaders.from_datasets(tuple(make_data(4)), (torch.rand(4, 2), torch.rand(4)))
    loader = DataLoader(make_data(4))
    for train, valid in ((loader, None), (make_data(4), loader), (make_data(4), 8)):
        with pytest.raises(TypeError, match=r"got a (DataLoader|int) as a dataset; loaders go into DataLoaders\(train"):
            DataLoaders.from_datasets(train, valid)
    with pytest.raises(TypeError, match="got a dict of train, test as a dataset, .* are given one by one"):
        DataLoaders.from_datasets({"train": make_data(4), "test": make_data(4)})
    assert len(DataLoaders.from_datasets({0: x[:1], 1: x[1:2]}, bs=1).train) == 2  # samples by their numbers
    with pytest.raises(ValueError, match="the training set is empty: it has 0 samples"):
        DataLoaders.from_datasets(make_data(0))
    for bs in ("64", 0, 2.5):
        with pytest.raises(
            ValueError, match=rf"got bs={bs!r} \({type(bs).__name__}\); it is a whole number of samples"
        ):
            DataLoaders.from_datasets(make_data(), bs=bs)
    assert len(DataLoaders.from_datasets(x).train) == 1  # inputs without targets


def test_new_inputs_are_no_number_of_a_loader():
    learn = make_learner()
    for given in (torch.randn(8, 3), learn.dls.valid, "valid"):
        with pytest.raises(
            TypeError, match=r"as the number of a loader, which is 0 \(training\).* new inputs as dl=dls.test_dl"
        ):
            learn.get_preds(given)


def test_long_values_are_cut_in_messages():
    with pytest.raises(ValueError, match=r"got n_epoch=float32 tensor of shape \(256, 4\); it is a whole number"):
        make_learner().fit(torch.randn(256, 4), torch.randn(256))
    with pytest.raises(ValueError) as e:
        make_learner().fit("x" * 10_000)
    assert len(str(e.value)) < 200
    model = make_model()
    with pytest.raises(
        TypeError, match=r"^opt_func is an optimizer that is made already; .* opt_func=partial\(SGD, lr"
    ):
        Learner(make_dls(), model, opt_func=SGD(model.parameters(), lr=0.1))


def test_a_validation_iterator_that_is_exhausted():
    valid = iter(list(DataLoader(make_data(4), 4)))
    learn = make_learner(DataLoaders(DataLoader(make_data(), 4), valid, device="cpu"))
    with pytest.raises(
        ValueError, match="the validation loader gave no batches in epoch 1; an iterator can be read only"
    ):
        learn.fit(2)


def test_an_unsized_loader_without_batches_is_noticed():
    class Nothing:
        def __iter__(self):
            return iter(())

    with pytest.raises(ValueError, match="the training loader gave no batches in epoch 0$"):
        make_learner(DataLoaders(Nothing(), device="cpu")).fit(1)


def test_a_killed_loader_worker_is_explained():
    class Late:
        exitcodes = iter([None, None, -9])  # the news of its death may be late

        @property
        def exitcode(self):
            return next(self.exitcodes, -9)

    class Loader(_MultiProcessingDataLoaderIter):
        def __init__(self):
            pass

        def __del__(self):
            pass

        _workers = (SimpleNamespace(exitcode=0), Late())

        def fail(self, error):
            raise error

        fail = FunctionType(fail.__code__, {"__name__": DataLoader.__module__})  # as a method of torch's own

    gone = RuntimeError("DataLoader worker (pid(s) 5) exited unexpectedly")
    cut = ConnectionResetError(104, "Connection reset by peer")
    crashed = RuntimeError("DataLoader worker (pid 5) is killed by signal: Segmentation fault. ")
    for error in (cut, gone, crashed):
        with pytest.raises(type(error)):
            Loader().fail(error)
    killed = "9 (SIGKILL)"
    for error, signal in ((cut, killed), (gone, killed), (gone, killed), (crashed, "11 (SIGSEGV)")):
        explain(make_learner(), error)
        (note,) = error.__notes__  # one, also if runs lie within each other
        assert note.startswith(f"the loader worker was killed by signal {signal}")
    for other in (RuntimeError("a DataLoader worker"), FileNotFoundError(2, "No such file")):
        explain(make_learner(), other)
        assert not hasattr(other, "__notes__")


class Scaled(nn.Module):
    """A loss with a trainable scale."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pred, target):
        return nn.functional.cross_entropy(pred * self.scale, target)


class OwnOptimizer(Callback):
    """Trains the loss's scale by an optimizer that the learner does not know, and leaves its gradient behind."""

    def __init__(self, loss):
        self.own = SGD(loss.parameters(), lr=0.1)

    def before_backward(self):
        self.own.zero_grad()

    def after_step(self):
        self.own.step()


def test_parameters_of_a_loss_that_no_optimizer_trains_are_told():
    learn = make_learner(loss_func=Scaled(), cbs=Callback(before_validate=lambda cb: told.append("validation")))
    told = []
    learn.say = told.append
    learn.fit(2)
    assert told[0].startswith("Scaled has parameters that no optimizer trains (scale), so they keep their values")
    assert told[1:] == ["validation"] * 2  # before the first validation, and once


def test_parameters_of_a_loss_that_are_trained_or_frozen_are_not_told():
    loss, frozen = Scaled(), Scaled()
    frozen.requires_grad_(False)
    told = []
    for learn in (
        make_learner(loss_func=frozen), make_learner(loss_func=loss, cbs=OwnOptimizer(loss)),
        make_learner(loss_func=loss, splitter=lambda model: [[*model.parameters(), *loss.parameters()]]),
    ):  # fmt: skip
        learn.say = told.append
        learn.fit(1)
    assert told == []


@pytest.mark.parametrize("trained", [False, True])
def test_parameters_that_a_callback_puts_into_the_model_and_nothing_trains_are_told(trained, monkeypatch):
    monkeypatch.setattr(facts, "_warned", set())

    class Widen(Callback):
        def before_epoch(self):
            if self.epoch == 1:
                self.model.append(nn.Linear(1, 1))
                if trained:
                    self.opt.add_param_group({"params": self.model[-1].parameters()})

    learn = make_learner(cbs=Widen)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        learn.fit(3)
    text = "a callback has put parameters into the model that no optimizer trains (4.weight, 4.bias)"
    assert [(text in str(w.message), w.filename) for w in said] == [(True, __file__)] * (not trained)
