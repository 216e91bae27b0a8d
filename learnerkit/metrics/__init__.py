"""Metrics: functions that are means over samples, and objects with states that ranks can combine.

Every metric counts each sample exactly once, for any batches and any number of ranks. `functions.py` and `objects.py`
have our own, and `by_name.py` finds metrics by their names; `meters.py` updates metrics of all kinds, and
`combining.py` makes the states of all ranks one; `libraries.py` knows what torchmetrics and torcheval do not document.
"""

from learnerkit.metrics.functions import accuracy, accuracy_multi, error_rate, mae, mse, top_k_accuracy
from learnerkit.metrics.meters import (
    DEPENDS_ON_CUT,
    GatheringMeter,
    MeanMeter,
    MergingMeter,
    Meter,
    StatesMeter,
    check_columns,
    make_meters,
    metric_names,
    weighted_mean,
)
from learnerkit.metrics.objects import AccumMetric, Dice, IoU, Metric, metric_name, perplexity, rmse

__all__ = [
    "DEPENDS_ON_CUT", "AccumMetric", "Dice", "GatheringMeter", "IoU", "MeanMeter", "MergingMeter", "Meter", "Metric",
    "StatesMeter", "accuracy", "accuracy_multi", "check_columns", "error_rate", "mae", "make_meters", "metric_name",
    "metric_names", "mse", "perplexity", "rmse", "top_k_accuracy", "weighted_mean",
]  # fmt: skip
