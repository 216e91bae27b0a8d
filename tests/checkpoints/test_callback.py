"""`CheckpointCallback` on one process: a fit that is interrupted anywhere ends as one that is not."""

from contextlib import suppress

import pytest
from resume_jobs import JOBS, STEPS, Kill, Killed, different, make, outcome, run


def finished(learn, name, batches=()):
    """The outcome of a job, and the end of its learner."""
    with suppress(Killed):
        run(name, learn)
    own = learn.order.batches
    before = learn.train_iter - len(own) if len(batches) else 0  # what the process that died has trained on
    found = outcome(learn, [*batches[:before], *own])
    vars(learn).clear()  # persistent workers end with their loader, and slowly if garbage is collected
    return found


@pytest.fixture(scope="module")
def whole():
    """The outcome of each job without a break."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = finished(make(name), name)
        return found[name]

    return of


ALL, QUICK = range(1, STEPS + 1), ("one cycle", "workers", "accumulation", "average")


@pytest.mark.filterwarnings("ignore:mixed precision with float16")
@pytest.mark.parametrize(
    ("name", "steps"),
    [(name, (7, 12)) for name in QUICK] + [pytest.param(name, ALL, marks=pytest.mark.slow) for name in JOBS],
)
def test_r23_a_fit_that_dies_after_any_step_ends_as_one_that_does_not(name, steps, tmp_path, whole):
    for at in steps:
        folder = tmp_path / str(at)
        died = finished(make(name, folder, Kill(at)), name)
        ended = finished(make(name, folder, resume=True), name, died["order"])
        assert different(whole(name), ended) == [], at
