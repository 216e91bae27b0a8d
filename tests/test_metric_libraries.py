"""Private names of torchmetrics and torcheval: if a release takes one away, the test of this name fails."""

import warnings
from importlib.util import find_spec

import pytest

from learnerkit.metrics import libraries

pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="needs torchmetrics")


def sums():
    """A metric with one state of each kind."""
    from own_metrics import Sums

    return Sums()


def test_the_states_of_a_metric_and_how_they_are_reduced():
    found = {name: how for name, (_, how) in libraries.declared_states(sums()).items()}
    of_tensors = {"sum_of": "sum", "max_of": "max", "min_of": "min", "mean_of": "same", "None_of": None}
    assert found == of_tensors | {"joined": "cat", "listed": "cat", "own": None}


@pytest.mark.parametrize("name", ["_defaults", "_reductions", "_update_count", "_computed", "_cache"])
def test_torchmetrics_has_the_name_that_is_used(name):
    assert hasattr(sums(), name)


def test_updates_are_counted():
    metric = sums()
    metric.update(1.0)
    assert libraries.update_count(metric) == 1


def test_a_wrapper_is_known():
    from torchmetrics import MinMaxMetric

    assert libraries.synchronizes_otherwise(MinMaxMetric(sums()))


def test_whether_ranks_are_there_is_asked_by_compute_and_forgotten_by_reset():
    metric, asked = sums(), []
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
    assert not libraries.synchronizes_otherwise(sums())
    assert libraries.synchronizes_otherwise(type("Own", (type(sums()),), {"_sync_dist": None})())


def test_torchmetrics_objects_are_found_in_others():
    class Around:
        def __init__(self):
            self.inner = {"a": [sums()]}

    assert [type(m) for m in libraries.torchmetrics_in(Around())] == [type(sums())]


def test_the_states_of_torcheval_are_known_to_merge_or_not():
    pytest.importorskip("torcheval")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it scripts its functions, of which torch warns
        from torcheval.metrics import BinaryAUROC, MulticlassAccuracy, WindowedMeanSquaredError
    assert libraries.is_torcheval(BinaryAUROC())
    assert [libraries.merges_any_order(m) for m in (MulticlassAccuracy(), BinaryAUROC())] == [True, False]
    assert not libraries.merges_any_order(WindowedMeanSquaredError(max_num_updates=2))
