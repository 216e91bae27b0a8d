"""predict without the loop, which equals that with it, and a learner that several threads use."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import OwnLoss, make_classes, make_data, make_dls, make_learner, make_model
from torch import nn
from torch.utils.data import Dataset

from learnerkit import Callback, DataLoaders, ImageData, Learner, load_learner
from learnerkit.learner import Learner as Implementation

# One way through the loop, and one past it


class Named(Dataset):
    """Samples that are mappings."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {"input": make_data(6).tensors[0][i], "labels": i % 3}


def plain(**kwargs):
    dls = DataLoaders.from_datasets(make_classes(11), make_classes(7, seed=1), bs=4, classes="abc", device="cpu")
    return make_learner(dls, make_model(n_out=3, dropout=0.5), nn.CrossEntropyLoss(), **kwargs)


def texts():
    pytest.importorskip("tokenizers")
    import text_jobs

    dls = text_jobs.make_data().dataloaders(tokens=64, device="cpu")
    return Learner(dls, text_jobs.Bag(dls.data.vocab_size), nn.CrossEntropyLoss()), ["cat dog", "", "bread soup rice"]


def table():
    pd = pytest.importorskip("pandas")
    from learnerkit import TabularData, tabular_learner

    frame = pd.DataFrame({"town": ["Oslo", "Bonn"] * 8, "area": [float(i) for i in range(16)], "y": [0, 1] * 8})
    dls = TabularData.from_df(frame, "y", ["town"], ["area"]).dataloaders(bs=4, device="cpu")
    return tabular_learner(dls, (4,)), [frame.iloc[0], frame.iloc[9]]


def images():
    pictures = [torch.full((3, 8, 8), i * 20, dtype=torch.uint8) for i in range(10)]
    dls = ImageData([(p, i % 2) for i, p in enumerate(pictures)], size=8).dataloaders(bs=4, device="cpu")
    return Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), nn.CrossEntropyLoss()), pictures[:3]


def joined(samples):
    return torch.stack([sample[0] for sample in samples]), None


def some(kind):
    """A learner and inputs for it."""
    x = list(make_data(3).tensors[0])
    if kind in ("texts", "table", "images"):
        return globals()[kind]()
    if kind in ("program", "weights"):
        path = plain().export("some.pt2" if kind == "program" else "some")
        return load_learner(path, *([] if kind == "program" else [lambda: make_model(n_out=3)])), x
    if kind == "mappings":
        model = nn.Module()
        model.body, model.forward = nn.Linear(4, 3), lambda input: model.body(input)
        dls = DataLoaders.from_datasets(Named(), Named(), bs=2, device="cpu")
        return make_learner(dls, model, nn.CrossEntropyLoss()), [{"input": each} for each in x]
    if kind == "own loss":

        class Own(OwnLoss):
            def forward(self, x, labels=None):
                return super().forward(x, x[:, :1] if labels is None else labels)

        learn = make_learner(model=Own())
        learn.loss_func = None
        return learn, x
    if kind == "collate":
        data = make_classes(7)
        dls = DataLoaders.from_datasets(data, data, bs=4, device="cpu", collate_fn=joined)
        return make_learner(dls, make_model(n_out=3), nn.CrossEntropyLoss()), x
    return plain(), x


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


KINDS = ["plain", "texts", "table", "images", "weights", "mappings", "own loss", "collate"]


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("program", marks=pytest.mark.slow)])
def test_without_listeners_a_prediction_needs_no_loop_and_equals_that_of_the_loop(kind, monkeypatch):
    learn, items = some(kind)
    if kind != "program":  # which has no other mode
        learn.model.train()
    heard = []
    with learn.added_cbs(Callback(after_pred=lambda cb: heard.append(cb.batch_size))):
        looped = [learn.predict(item, act=torch.sigmoid if kind == "plain" else None) for item in items]
    assert heard == [1] * len(items)
    monkeypatch.setattr(Implementation, "_running", None)  # nobody enters the loop
    before, streams, modes = vars(learn).copy(), torch.get_rng_state(), [m.training for m in learn.model.modules()]
    for item, expected in zip(items, looped, strict=True):
        found = learn.predict(item, act=torch.sigmoid if kind == "plain" else None)
        assert all(map(same, found, expected)), (found, expected)
    assert vars(learn) == before  # nothing was assigned
    assert torch.equal(torch.get_rng_state(), streams)
    assert [m.training for m in learn.model.modules()] == modes


@pytest.mark.parametrize("kind", KINDS)
def test_several_inputs_are_predicted_as_each_is_by_itself(kind):
    learn, items = some(kind)
    items = [*items, items[0], items[-1]]
    act = torch.sigmoid if kind == "plain" else None
    expected = [learn.predict(item, act) for item in items]
    for cbs in ([], [Callback(before_batch=lambda cb: None)]):  # past the loop, and through it
        with learn.added_cbs(cbs):
            found = learn.predict_many(items, act)
        assert [one.label for one in found] == [one.label for one in expected]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close((one.decoded, one.pred), (other.decoded, other.pred))
    assert learn.predict_many([]) == []
    with pytest.raises(TypeError, match="predict_many takes a list of inputs, and predict one input"):
        learn.predict_many(items[0])


def test_a_row_that_is_wrong_by_itself_is_wrong_among_others():
    learn, _ = table()
    good = {"town": "Oslo", "area": 3.0}
    rows = [good, {"town": None, "area": 3}, {"area": None, "town": "Rome"}, good]
    for one, row in zip(learn.predict_many(rows), rows, strict=True):
        torch.testing.assert_close(one.pred, learn.predict(row).pred)
    for bad, message in (({"area": 3.0}, "no column 'town'"), (good | {"town": 7}, "held text in training"),
                         (good | {"area": "far"}, "one of numbers"), ("Oslo", "got a str for a row")):  # fmt: skip
        for call in (learn.predict, lambda row: learn.predict_many([good, row])):
            with pytest.raises((ValueError, TypeError), match=message):
                call(bad)


class Finds(nn.Module):
    """Returns a mapping for each sample, as detectors do."""

    def forward(self, x):
        return [{"box": row[:2], "score": row[2:3]} for row in x]


def test_what_a_model_returns_for_each_sample_is_given_for_each():
    learn, x = make_learner(model=Finds()), make_data(3).tensors[0]
    for found, row in zip(learn.predict_many(list(x)), x, strict=True):
        assert torch.equal(found.pred["box"], row[:2])
        assert same(found.pred, learn.predict(row).pred)


class Resets(nn.Linear):
    """Has a state that begins anew in each run."""

    calls = 0

    def reset(self):
        self.calls += 1


class Doubles(Learner):
    def _forward(self):
        super()._forward()
        self.pred = 2 * self.pred


def test_what_is_to_be_done_before_a_prediction_is_done():
    x = make_data().tensors[0][0]
    learn = make_learner(model=Resets(4, 1))
    learn.predict(x)
    assert learn.model.calls == 1
    assert torch.equal(make_learner(cls=Doubles).predict(x).pred, 2 * make_learner().predict(x).pred)
    lazy = make_learner(model=nn.Sequential(nn.LazyLinear(1)))
    assert lazy.predict(x).pred.shape == (1,)
    kept = make_learner(model=make_model(dropout=0.5), default_cbs=False)  # as get_preds, which leaves the modes too
    assert not torch.equal(*(torch.stack([kept.predict(x).pred for _ in range(9)]) for _ in range(2)))
    learn = make_learner()
    with pytest.raises(RuntimeError, match="mat1"):
        learn.predict(torch.ones(3))
    assert learn.task is learn._thread is None


# Several threads


def ask(learn, items, threads=20, calls=30):
    """What each of several threads gets that ask for predictions at once, and which item each was for."""
    start = threading.Barrier(threads)

    def work(number):
        start.wait(timeout=20)
        return [(i, learn.predict(items[i]).pred) for i in ((number + k) % len(items) for k in range(calls))]

    with ThreadPoolExecutor(threads) as pool:
        return [pair for pairs in pool.map(work, range(threads)) for pair in pairs]


@pytest.mark.parametrize(("heard", "calls"), [(False, 30), (True, 5)])
def test_twenty_threads_get_the_predictions_for_their_own_inputs(heard, calls):
    learn = plain(cbs=[Callback(before_batch=lambda cb: None)] if heard else [])
    x = learn.dls.train_ds.tensors[0]
    expected, _ = learn.get_preds(dl=[x])
    learn.model.train()
    before = list(learn.cbs)
    found = ask(learn, list(x), calls=calls)
    assert len(found) == 20 * calls
    for i, pred in found:
        torch.testing.assert_close(pred, expected[i])
    assert learn.cbs == before
    assert all(module.training for module in learn.model.modules())


def test_while_one_thread_trains_another_is_refused_and_disturbs_nothing():
    learn, x = plain(), make_data().tensors[0][0]
    alone = plain()
    for each in (alone, learn):
        torch.manual_seed(1)
        refused, may_go_on = [], threading.Event()

        def try_all(learn=each, refused=refused, may_go_on=may_go_on):
            for call in (lambda: learn.predict(x), learn.get_preds, learn.validate, lambda: learn.fit(1)):
                try:
                    call()
                except RuntimeError as e:
                    refused.append(str(e))
            may_go_on.set()

        def wait(cb, try_all=try_all, may_go_on=may_go_on):
            if cb.epoch == 0 and cb.iter == 0 and cb.learn is learn:
                thread = threading.Thread(target=try_all)
                thread.start()
                assert may_go_on.wait(20)
                thread.join()
                cb.learn.predict(x)  # of the thread that trains

        each.fit(2, cbs=Callback(after_step=wait))
    names = [text.split()[0] for text in refused]
    assert names == ["predict", "get_preds", "validate", "fit"]
    assert all("'fit' of the same learner goes on in another thread" in text for text in refused[:3])
    assert all(torch.equal(*pair) for pair in zip(alone.model.parameters(), learn.model.parameters(), strict=True))
    learn.predict(x)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(learn.validate).result(timeout=20) == learn.validate()


def test_a_fit_elsewhere_is_not_disturbed_by_predictions():
    def trained(cbs=()):
        torch.manual_seed(1)
        learn = make_learner(make_dls(8, 4), make_model(dropout=0.5))
        learn.fit(3, cbs=cbs)
        return learn.model

    expected = trained()
    other, x = plain(), make_data().tensors[0][0]
    done, predicted = threading.Event(), threading.Event()

    def predict():
        while not done.is_set():
            other.predict(x)
            predicted.set()

    def wait(cb):
        predicted.clear()
        assert predicted.wait(20)

    thread = threading.Thread(target=predict)
    thread.start()
    try:
        found = trained(Callback(after_pred=wait))
    finally:
        done.set()
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(expected.parameters(), found.parameters(), strict=True))


def test_a_fit_waits_for_a_prediction_in_another_thread():
    learn, x = plain(), make_data().tensors[0][0]
    inside, order = threading.Event(), []

    class Slow(nn.Identity):
        def forward(self, x):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                order.append("predicts")
                assert not fits.wait(0.1)
                order.append("predicted")
            return x

    fits = threading.Event()
    learn.model.append(Slow())
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(learn.predict, x)
        assert inside.wait(20)
        learn.fit(1, cbs=Callback(before_fit=lambda cb: order.append("fits") or fits.set()))
        assert found.result(timeout=20).pred.shape == (3,)
    assert order == ["predicts", "predicted", "fits"]


def test_a_copy_of_a_learner_has_a_lock_of_its_own():
    learn, x = make_learner(), make_data().tensors[0][0]
    for twin in (copy.deepcopy(learn), pickle.loads(pickle.dumps(learn))):
        with learn._lock, ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(twin.predict, x).result(timeout=20).pred, learn.predict(x).pred)
