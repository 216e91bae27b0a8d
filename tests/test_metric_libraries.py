"""Private names of torchmetrics and torcheval: if a release takes one away, the test of this name fails."""

import warnings

import pytest
import torch

from learnerkit.metrics import libraries

torchmetrics = pytest.importorskip("torchmetrics")


class Sums(torchmetrics.Metric):
    """One state of each kind."""

    def __init__(self):
        super().__init__()
        for kind in ("sum", "max", "min", "mean", None):
            self.add_state(f"{kind}_of", torch.tensor(0.0), kind)
        self.add_state("joined", [], "cat")
        self.add_state("listed", [], None)
        self.add_state("own", [], lambda x: x)

    def update(self, x):
        self.sum_of += x

    def compute(self):
        return self.sum_of


def test_the_states_of_a_metric_and_how_they_are_reduced():
    found = {name: how for name, (_, how) in libraries.declared_states(Sums()).items()}
    of_tensors = {"sum_of": "sum", "max_of": "max", "min_of": "min", "mean_of": "same", "None_of": None}
    assert found == of_tensors | {"joined": "cat", "listed": "cat", "own": None}


@pytest.mark.parametrize("name", ["_defaults", "_reductions", "_update_count", "_computed", "_cache"])
def test_torchmetrics_has_the_name_that_is_used(name):
    assert hasattr(Sums(), name)


def test_updates_are_counted():
    metric = Sums()
    metric.update(1.0)
    assert libraries.update_count(metric) == 1


def test_a_wrapper_is_known():
    assert libraries.synchronizes_otherwise(torchmetrics.MinMaxMetric(Sums()))


def test_whether_ranks_are_there_is_asked_by_compute_and_forgotten_by_reset():
    metric, asked = Sums(), []
    metric.distributed_available_fn = lambda: bool(asked.append(1))
    metric.update(1.0)
    libraries.hold_the_whole([metric])
    assert (metric.compute(), asked) == (1, [])
    libraries.note_new_states(metric, 2)
    with pytest.raises(RuntimeError, match="Sums holds what all ranks have seen"):
        metric.compute()
    metric.reset()
    metric.update(1.0)
    metric.compute()
    assert asked == [1]
    libraries.hold_the_whole([metric])
    libraries.hold_the_whole([metric], False)
    assert not isinstance(metric.distributed_available_fn, libraries.HoldsTheWhole)


def test_a_class_that_combines_ranks_in_its_own_way_is_known():
    assert not libraries.synchronizes_otherwise(Sums())
    assert libraries.synchronizes_otherwise(type("Own", (Sums,), {"_sync_dist": None})())


def test_torchmetrics_objects_are_found_in_others():
    class Around:
        def __init__(self):
            self.inner = {"a": [Sums()]}

    assert [type(m) for m in libraries.torchmetrics_in(Around())] == [Sums]


def test_the_states_of_torcheval_are_known_to_merge_or_not():
    pytest.importorskip("torcheval")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it scripts its functions, of which torch warns
        from torcheval.metrics import BinaryAUROC, MulticlassAccuracy, WindowedMeanSquaredError
    assert libraries.is_torcheval(BinaryAUROC())
    assert [libraries.merges_any_order(m) for m in (MulticlassAccuracy(), BinaryAUROC())] == [True, False]
    assert not libraries.merges_any_order(WindowedMeanSquaredError(max_num_updates=2))
