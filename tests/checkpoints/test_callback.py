"""`CheckpointCallback` on one process: a fit that is interrupted anywhere ends as one that is not."""

import gc
from contextlib import suppress

import pytest
from resume_jobs import JOBS, STEPS, Kill, Killed, different, make, outcome, run


def interrupted(name, folder, at, valid=False, **checkpoint):
    """Run a job that dies after so many batches; return what it has trained on."""
    learn = make(name, folder, Kill(at, valid), **checkpoint)
    with suppress(Killed):
        run(name, learn)
    batches = learn.order.batches
    del learn
    gc.collect()  # persistent workers end with their loader
    return batches


def resumed(name, folder, before, **checkpoint):
    """Run the job again from what it has saved; return its outcome."""
    learn = make(name, folder, resume=True, **checkpoint)
    run(name, learn)
    own = learn.order.batches
    missing = len(before) and learn.train_iter - len(own)
    return outcome(learn, before[:missing] + own)


@pytest.fixture(scope="module")
def whole():
    """The outcome of each job without a break."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = outcome(run(name, make(name)))
        return found[name]

    return of


STEPS_OF = {"quick": (1, 7, 12), "slow": range(1, STEPS + 1)}


@pytest.mark.parametrize("name", JOBS)
def test_r23_a_fit_that_dies_after_any_step_ends_as_one_that_does_not(name, tmp_path, whole):
    for at in STEPS_OF["quick"]:
        folder = tmp_path / str(at)
        before = interrupted(name, folder, at)
        assert different(whole(name), resumed(name, folder, before)) == [], at
