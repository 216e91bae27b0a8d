"""The scaling report on two ranks: faults that are put in on purpose are found, and nothing else is."""

import contextlib
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import mostly_slow
from scaling_jobs import BYTES_PER_SECOND, PART_OF, SECONDS, make_learner

from learnerkit import (
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelStepException,
    GradientAccumulation,
    distributed,
)
from learnerkit.distributed import PeerError
from learnerkit.scaling.making import Making
from learnerkit.scaling.parts import REDUCE
from learnerkit.scaling.trials import pace

pytestmark = pytest.mark.ranks(2)
SLOW = pytest.mark.slow


def parts_of(learn, n=8, **kwargs):
    with learn.distrib_ctx(**kwargs):
        return Making(learn, n, 60.0).measure_parts()


def report_of(learn, n=5, **kwargs):
    with contextlib.redirect_stdout(io.StringIO()) as text, learn.distrib_ctx():
        report = learn.scaling_report(n, **kwargs)
    assert text.getvalue().strip() == (str(report).strip() if distributed.is_main() else "")
    return report


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
@pytest.mark.parametrize(
    "fault", mostly_slow(["backward", "dataset", "forward", "optimizer", "callback"], "backward", slow=["dataset"])
)
@pytest.mark.slow
def test_the_slow_rank_and_its_cause_are_named(fault, rank):
    for _ in range(3):  # on a busy machine it may look like chance
        report = parts_of(make_learner(fault, rank))
        found = report.slowest
        if found is not None:
            break
    assert (found.rank, found.part) == (rank, PART_OF[fault])
    for seconds in (found.seconds, found.cost, report.waits[1 - rank]):
        assert 0.8 < seconds / SECONDS < 2  # other tests may run meanwhile
    assert f"rank {rank} is the slowest" in str(report)
    for r in range(2):  # they leave the reduction together
        assert report.walls[r] == pytest.approx(report.walls[0], rel=0.1)  # within 0.02 on an idle machine
        assert sum(found[r] for found in report.parts.values()) == pytest.approx(report.walls[r], rel=0.02)


@SLOW
def test_the_slow_rank_is_named_where_the_others_wait_in_another_collective():
    learn = make_learner("dataset")
    learn.add_cb(Callback(after_loss=lambda cb: distributed.reduce(cb.learn.loss, "mean")))
    found = None
    for _ in range(3):  # on a busy machine it may look like chance
        found = found or parts_of(learn).slowest
    assert (found.rank, found.part) == (1, PART_OF["dataset"])


@pytest.mark.soak
@SLOW
def test_a_rank_twice_as_slow_is_named():
    found = None
    for _ in range(3):  # on a busy machine it may look like chance
        report = parts_of(make_learner("twice", work=SECONDS / 3))
        found = found or report.slowest
        named = {name for name in report.parts if name.startswith("callback ")}
        assert named <= {"callback DistributedCallback", "callback TrainEvalCallback", "callback Recorder"}
    assert (found.rank, found.part) == (1, "")
    assert 0.8 < found.seconds / SECONDS < 2


@pytest.mark.soak
def test_slow_links_are_no_slow_rank_and_what_helps_is_found():
    learn = make_learner("links")
    report = report_of(learn)
    sent = report.gradient_bytes / BYTES_PER_SECOND
    assert report.slowest is None
    assert 0.95 < report.communication / sent < 2
    assert max(report.parts, key=lambda name: report.parts[name]) == REDUCE
    assert report.without["network"] < 0.6 * report.seconds
    assert report.alone[1] == 8
    assert report.efficiency < 0.7
    assert dict(report.helps)["GradientAccumulation(n_batches=4)"] > 0.5
    assert "a free network would save" in str(report)
    assert distributed.same_everywhere(report.to_json())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "error"),
    [
        ("before_batch", CancelBatchException),
        ("before_backward", CancelBackwardException),
        ("before_step", CancelStepException),
        ("", None),  # GradientAccumulation cancels the rest of each batch but the last of a step
    ],
)
def test_steps_without_the_network_may_be_cancelled(event, error):
    def cancel(cb):
        if cb.iter % 3 == 1:
            raise error

    learn = make_learner(n=64)  # several epochs
    learn.add_cb(Callback(**{event: cancel}) if event else GradientAccumulation(n_batches=2))
    with learn.distrib_ctx():
        assert pace(learn, 4, network=False).seconds > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:comm_hook='bf16' rounds the gradients")
def test_what_is_sent_is_what_the_hook_leaves():
    learn = make_learner()
    whole = sum(p.nbytes for p in learn.model.parameters())
    assert parts_of(learn, 2).gradient_bytes == whole
    assert parts_of(learn, 2, comm_hook="bf16").gradient_bytes == whole / 2


@pytest.mark.soak
def test_everything_is_as_it_was_on_each_rank():
    learn = make_learner()
    with learn.distrib_ctx():
        state = torch.get_rng_state()
        before = {k: v.clone() for k, v in learn.model.state_dict().items()}
        member = learn.distributed
        attributes = dict(vars(member))
        with contextlib.redirect_stdout(io.StringIO()):
            learn.scaling_report(2)
        assert all(torch.equal(before[k], v) for k, v in learn.model.state_dict().items())
        assert torch.equal(state, torch.get_rng_state())
        assert learn.distributed is member
        assert vars(member) == attributes
        assert learn.opt is None
        assert learn.task is None
        assert learn.n_ranks == 1
        with learn.no_logging():
            learn.fit(1)
    flat = torch.cat([p.detach().reshape(-1) for p in learn.model.parameters()])
    assert distributed.same_everywhere(flat.tolist())


@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_report_on_all_and_leaves_nothing():
    def fail(cb):
        if distributed.rank() == 1 and cb.train_iter == 5:
            raise OSError("the disk is full")

    learn = make_learner()
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    with learn.distrib_ctx():
        failing = Callback(after_batch=fail)
        with (
            learn.added_cbs(failing),
            pytest.raises(OSError if distributed.rank() else PeerError, match="the disk is full"),
        ):
            learn.scaling_report(2)
        assert all(torch.equal(before[k], v) for k, v in learn.model.state_dict().items())
        assert learn.opt is None
        assert learn._dispatch is None
        with learn.no_logging():
            learn.fit(1)


@pytest.mark.soak
def test_a_callback_that_talks_to_the_other_ranks_is_not_run_alone():
    def talk(cb):
        dist.all_reduce(torch.ones(1))

    report = report_of(make_learner(), 2, advice=False)
    assert report.alone is not None
    learn = make_learner()
    learn.add_cb(Callback(after_batch=talk))
    report = report_of(learn, 2, advice=False)
    assert report.alone is None
    assert any("in one process alone could not be run" in note for note in report.notes)


@SLOW
def test_ranks_that_do_not_train_together_are_told_of_one_process():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*distrib_ctx")  # on rank 0, by its own test
        report = make_learner().scaling_report(2, advice=False, show=False)
    assert (report.ranks, report.cost) == (1, None)
    assert any("no forecast" in note for note in report.notes)
