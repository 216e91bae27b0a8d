"""Metrics on several processes equal one process, and the user's own objects hold the whole."""
# ruff: noqa: SIM905 (many names in a row read best as one text)

import pickle
import warnings
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from helpers import raises
from metric_catalogue import (
    LEFT_OUT,
    TORCHEVAL_LEFT_OUT,
    make,
    torcheval_classes,
    torcheval_table,
    torchmetrics_classes,
    torchmetrics_table,
)
from torch import nn

from learnerkit import Metric, accuracy, distributed
from learnerkit.metrics import make_meters
from learnerkit.metrics.libraries import torchmetrics_in
from learnerkit.metrics.meters import GatheringMeter

pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="needs torchmetrics")

# How the four batches of the catalogue are dealt to the ranks
DEALS = {"one rank has none": (0, 0, 0, 0), "three to one": (0, 1, 0, 0), "the first has one": (1, 0, 1, 1)}


def flat(value):
    """Numbers of any structure as one tensor."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return torch.cat([flat(v) for v in value]) if value else torch.zeros(0)
    return torch.as_tensor(value).detach().double().reshape(-1)


def agree(a, b, rtol=1e-6):
    return a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=1e-7, equal_nan=True)


def alone(metric, batches):
    """What one process computes."""
    for part in torchmetrics_in(metric):
        part.distributed_available_fn = lambda: False
    for pred, *targets in batches:
        metric.update(pred, *targets)
    return flat(metric.compute())


def on_ranks(metric, batches, deal, meter=None):
    """What the ranks compute, and what the user's object computes here after that, without communication."""
    meter = meter or make_meters({"m": metric})[0]
    meter.numbers = flat
    meter.reset()
    for place, ((pred, *targets), rank) in enumerate(zip(batches, deal, strict=True)):
        if rank % distributed.world_size() == distributed.rank():
            meter.update(place, 1, pred, tuple(targets))
    found = meter.result(sharded=True)
    with distributed.no_collectives("the user's compute"):
        return found, flat(metric.compute())


def check(new, batches, deals=DEALS, rtol=1e-6):
    """Compare ranks to one process; `new` makes the metric."""
    wrong = []
    expected = alone(new(), batches)
    assert len(expected)
    for name, deal in deals.items():
        try:
            values = on_ranks(new(), batches, deal)
        except Exception as e:
            values = ()
            wrong.append(f"{name}: {type(e).__name__}: {e}")
        wrong += [f"{name}: {v} instead of {expected}" for v in values if not agree(v, expected, rtol)]
    return wrong


def check_all(classes, table, deals=DEALS):
    """Check a whole table; all ranks go through it together."""
    wrong = {}
    warnings.simplefilter("ignore")
    for name in table:
        for args, kwargs, data in table[name]:

            def new(name=name, args=args, kwargs=kwargs):
                return make(classes[name], args, kwargs)

            try:
                found = check(new, data(), deals)
            except Exception as e:
                found = [f"{type(e).__name__}: {e}"]
            if found:
                wrong[f"{name} {args} {kwargs}"] = found
    assert not wrong, "\n".join(f"{name}: {each}" for name, found in wrong.items() for each in found)


QUICK = (
    "BinaryAUROC MulticlassAUROC MulticlassF1Score RetrievalMAP PearsonCorrCoef MeanSquaredError SpearmanCorrCoef "
    "PeakSignalNoiseRatio IntersectionOverUnion CHRFScore Running MinMaxMetric MultitaskWrapper CompositionalMetric "
    "MeanMetric CatMetric"
).split()
QUICK_TORCHEVAL = "MulticlassAccuracy BinaryAUROC Cat MeanSquaredError WindowedMeanSquaredError".split()


def chosen(table, names):
    return {name: table[name] for name in names}


@pytest.mark.soak
@pytest.mark.ranks(2, soak=[3])
def test_metrics_of_the_libraries_equal_one_process():
    check_all(torchmetrics_classes(), chosen(torchmetrics_table(), QUICK))
    check_all(torcheval(), chosen(torcheval_table(), QUICK_TORCHEVAL))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.ranks(2)
def test_every_metric_of_torchmetrics_equals_one_process():
    check_all(torchmetrics_classes(), torchmetrics_table())


@pytest.mark.soak
@pytest.mark.ranks(3)
def test_every_metric_of_torchmetrics_equals_one_process_on_three():
    check_all(torchmetrics_classes(), torchmetrics_table(), {"the last has none": (1, 0, 1, 0)})


@pytest.mark.soak
@pytest.mark.ranks(2)
def test_every_metric_of_torcheval_equals_one_process():
    check_all(torcheval(), torcheval_table())


def torcheval():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it scripts its functions, of which torch warns
        return torcheval_classes()


def test_the_catalogues_are_complete():
    pytest.importorskip("torcheval")
    for classes, table, left_out in (
        (torchmetrics_classes(), torchmetrics_table(), LEFT_OUT),
        (torcheval(), torcheval_table(), TORCHEVAL_LEFT_OUT),
    ):
        table = table.keys() - left_out.keys()
        assert classes.keys() - table == left_out.keys(), "a release has brought or taken classes"
        assert table <= classes.keys()


@pytest.mark.ranks(2)
def test_batches_are_gathered_only_where_states_do_not_tell():
    """States are small; predictions may be large."""
    from torchmetrics.classification import BinaryAUROC, MulticlassJaccardIndex
    from torchmetrics.image import PeakSignalNoiseRatio
    from torchmetrics.regression import PearsonCorrCoef

    pred = torch.rand(4, 3)
    for metric, target, gathers in (
        (BinaryAUROC(), (pred > 0.5).long(), False),
        (MulticlassJaccardIndex(3), torch.arange(4) % 3, False),
        (PeakSignalNoiseRatio(data_range=1.0), pred, False),
        (PearsonCorrCoef(3), pred, True),
    ):
        (meter,) = make_meters(metric)
        meter.reset()
        meter.update(0, 4, pred, (target,))
        assert isinstance(meter, GatheringMeter) == gathers, metric


# Classes of users


class Wrapping:
    """An object of the user's around one of torchmetrics."""

    def __init__(self):
        from torchmetrics.retrieval import RetrievalMAP

        self.inner = [RetrievalMAP()]

    def reset(self):
        self.inner[0].reset()

    def update(self, pred, target):
        self.inner[0].update(pred, (target > 0.5).long(), torch.zeros(len(pred)).long())

    def compute(self):
        return self.inner[0].compute()


class Communicating(Wrapping):
    def compute(self):
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return total


class Merging:
    """Merges others, in no library's way, and returns nothing."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.n, self.seen = 0, []

    def update(self, pred, target):
        self.n += len(pred)
        self.seen.append(float(pred[0]))

    def merge_state(self, others):
        for other in others:
            self.n += other.n
            self.seen += other.seen

    def compute(self):
        return self.n + sum(self.seen)


class Late(Metric):
    """A mean over samples that declares a state in its first update, when it knows the number of columns."""

    def __init__(self):
        super().__init__()
        self.add_state("n", 0)

    def update(self, pred, target):
        if not hasattr(self, "sums"):
            self.add_state("sums", torch.zeros(1, dtype=pred.dtype))
        self.sums = self.sums + (pred - target).sum()
        self.n = self.n + len(pred)

    def compute(self):
        return self.sums / self.n


def difference_batches():
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.rand(2, n, generator=generator, dtype=torch.float64)) for n in (4, 3, 5, 2)]


class Joining(Metric):
    """Replaces the item of a list that ranks join."""

    def __init__(self):
        super().__init__()
        self.add_state("all", [], "cat")

    def update(self, pred, target):
        self.all = [torch.cat([*self.all, pred])]

    def compute(self):
        return torch.cat(self.all)[0]


@pytest.mark.ranks(2, soak=[3])
def test_classes_of_users_equal_one_process():
    from own_metrics import Careless, Listing

    for new in (Listing, Careless, Wrapping, Merging):
        assert check(new, difference_batches()) == [], new.__name__


@pytest.mark.ranks(2)
def test_states_that_a_metric_declares_in_an_update_are_joined():
    batches = difference_batches()
    assert check(Late, batches, {"in turns": (0, 1, 0, 1)}) == []


@pytest.mark.ranks(2)
def test_what_cannot_be_combined_is_refused_by_name():
    from own_metrics import Mean, Window

    with pytest.raises(ValueError, match="the state 'mean' of Mean is a mean.*AccumMetric"):
        on_ranks(Mean(), difference_batches(), (0, 1, 0, 1))
    with pytest.raises(ValueError, match="metric 'm' cannot be combined.*items from 'last' of Window.*AccumMetric"):
        on_ranks(Window(), difference_batches() * 2, (0, 1) * 4)
    with pytest.raises(ValueError, match="metric 'm' cannot be.*items from 'all' of Joining.*or replaces them"):
        on_ranks(Joining(), difference_batches(), (0, 1, 0, 1))
    with pytest.raises(RuntimeError, match="compute of the metric 'm' called .*all ranks then; leave the commun"):
        on_ranks(Communicating(), difference_batches(), (0, 0, 0, 1))


@pytest.mark.ranks(2)
def test_a_metric_that_pickle_does_not_take_is_named():
    class Local(Merging):
        pass

    with raises((AttributeError, pickle.PicklingError), "the metric 'm' goes from rank to rank by pickle"):
        on_ranks(Local(), difference_batches(), (0, 1, 0, 1))


@pytest.mark.ranks(2)
def test_a_result_in_between_changes_nothing():
    from own_metrics import Careless, Listing

    batches = difference_batches()
    for new in (Listing, Careless, Merging):
        expected, metric = alone(new(), batches), new()
        (meter,) = make_meters({"m": metric})
        meter.numbers = flat
        meter.reset()
        for place, batch in enumerate(batches):
            if place % 2 == distributed.rank():
                meter.update(place, 1, batch[0], batch[1:])
            meter.result(sharded=True)
        assert agree(meter.result(sharded=True), expected)
        assert agree(meter.result(sharded=True), expected), new.__name__


@pytest.mark.ranks(2)
def test_the_users_object_communicates_again_after_its_reset():
    from torchmetrics.aggregation import SumMetric

    metric = SumMetric()
    found, again = on_ranks(metric, [(torch.tensor(1.0),), (torch.tensor(2.0),)], (0, 1))
    assert found == again == 3
    assert pickle.loads(pickle.dumps(metric)).compute() == 3
    metric.update(torch.tensor(5.0))
    with pytest.raises(RuntimeError, match="SumMetric holds what all ranks have seen"):
        metric.compute()
    metric.reset()
    metric.update(torch.tensor(1.0 + distributed.rank()))
    assert metric.compute() == 3


def test_what_no_process_can_combine_is_refused_at_once():
    from torchmetrics.classification import BinaryAccuracy
    from torchmetrics.wrappers import BootStrapper, MetricTracker

    inner = BinaryAccuracy()
    for metric in (BootStrapper(inner), MetricTracker(inner)):
        with pytest.raises(TypeError, match=f"torchmetrics' {type(metric).__name__} "):
            make_meters({"m": metric})


# In a fit


def fitted(sharing):
    from helpers import make_classes, make_dls, make_learner, make_model
    from own_metrics import Kept
    from torchmetrics.classification import MulticlassAUROC

    torch.manual_seed(0)
    metrics = {"kept": Kept(), "auroc": MulticlassAUROC(3)}
    model = make_model(n_out=3)
    learn = make_learner(make_dls(8, 3, 4, make_classes), model, torch.nn.CrossEntropyLoss(), metrics=metrics)
    with warnings.catch_warnings(), learn.distrib_ctx(split_batches=True) if sharing else nullcontext():
        warnings.filterwarnings("ignore", "No (positive|negative) samples")  # of so few
        learn.fit(1, 0.0)
        after_fit = [float(m.compute()) for m in metrics.values()]
        values = learn.validate()[1:]
        after_validation = [float(m.compute()) for m in metrics.values()]
    return values, learn.recorder.final_record[2:], after_fit, after_validation


@pytest.mark.ranks(2)
def test_the_users_objects_hold_the_whole_after_a_fit():
    values, recorded, after_fit, after_validation = fitted(sharing=True)
    assert values == pytest.approx(recorded)
    assert values == pytest.approx(after_fit)
    assert values == pytest.approx(after_validation)
    assert distributed.same_everywhere([round(v, 6) for v in values])


def test_metrics_without_sharing_are_those_recorded():
    values, recorded, after_fit, after_validation = fitted(sharing=False)
    assert values == pytest.approx(recorded)
    assert values == pytest.approx(after_fit) == after_validation


@pytest.mark.ranks(2)
def test_a_metric_that_depends_on_how_samples_are_cut_is_warned_of_once():
    from helpers import make_classes, make_dls, make_learner, make_model
    from own_metrics import Kept

    def geometric(pred, target):
        return torch.nn.functional.cross_entropy(pred, target).exp()

    metrics = {"geometric": geometric, "kept": Kept()}
    learn = make_learner(
        make_dls(8, 7, 4, make_classes), make_model(n_out=3), torch.nn.CrossEntropyLoss(), metrics=metrics
    )
    with warnings.catch_warnings(record=True) as caught, learn.distrib_ctx(split_batches=True):
        warnings.simplefilter("always")
        learn.validate()
        learn.validate()
    said = [str(w.message) for w in caught if "depends on how the samples are cut" in str(w.message)]
    assert len(said) == (distributed.rank() == 0), said
    assert all("'geometric'" in text and "AccumMetric" in text for text in said)


@pytest.mark.ranks(2)
def test_shares_of_tokens_are_weighted_by_the_tokens_that_count():
    g = torch.Generator().manual_seed(0)
    scores, target = torch.randn(4, 6, 5, generator=g), torch.randint(5, (4, 6), generator=g)
    for i in range(3):  # of the first there is one token that counts, of the last there are all
        target[i, 1 + 2 * i :] = -100
    whole = accuracy(scores, target)
    for loss, pred in ((None, scores), (nn.CrossEntropyLoss(), scores.mT)):
        for deal in DEALS.values():
            (meter,) = make_meters(accuracy, loss)
            meter.reset()
            for i, rank in enumerate(deal):
                if rank == distributed.rank():
                    meter.update(i, 1, pred[i : i + 1], (target[i : i + 1],))
            assert meter.result(sharded=True) == pytest.approx(whole.item(), abs=1e-12)
