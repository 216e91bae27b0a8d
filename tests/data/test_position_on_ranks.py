"""A fit that goes on in mid-epoch on several ranks, or on another number of them than before."""

import warnings

import pytest
import torch
from data.test_position import Log, Resume, make_dls
from torch import nn

from learnerkit import Learner, set_seed, world

pytestmark = pytest.mark.ranks(2, slow=[3])

RANKS = world.world_size()
EPOCHS = 2


def fit(made, log, state=None, own=None, distributed=None):
    """What this process sees of a fit, distributed or all by itself, which begins anew or goes on."""
    seed = 42 if state is None else 43
    set_seed(seed)
    torch.set_default_dtype(torch.float64)
    dls = made()
    try:
        learn = Learner(dls, nn.Linear(4, 1), nn.MSELoss(), lr=1e-6)
        set_seed(seed)
        cbs = [log] if state is None else [Resume(state, own), log]
        if distributed is not None:
            learn.to_distributed(**distributed)
        with learn.no_logging(), learn.no_bar(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* processes each train a whole copy")  # here that is meant
            learn.fit(EPOCHS, cbs=cbs)
    finally:
        torch.set_default_dtype(torch.float32)
        dls._twins.clear()  # ends persistent workers
    return log


def samples(log, epoch):
    """The numbers of the samples that training has read in an epoch, on all ranks, in order."""
    mine = [[int(x[0]) for x in seen[4]] for seen in log.seen if seen[0] and seen[1] == epoch]
    return [i for step in zip(*world.all_gather(mine), strict=True) for batch in step for i in batch]


def alone(log, epoch):
    return [int(x[0]) for seen in log.seen if seen[0] and seen[1] == epoch for x in seen[4]]


CASES = [
    ("shuffled", "no workers", True), ("global", "no workers", True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("shuffled", "workers", False), ("drop_last", "persistent", False), ("own generator", "workers", True),
        ("weighted", "no workers", False), ("global batches", "workers", False), ("buckets", "persistent", False),
        ("batches of the dataset", "workers", False),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("sampler", "workers", "split"), CASES)
def test_t8_ranks_go_on_as_they_are_and_in_another_number(sampler, workers, split):
    made, how = lambda: make_dls(sampler, workers), {"split_batches": split}
    same_later = "global" not in sampler  # what else is drawn there differs with the number of ranks
    one, whole = fit(made, Log()), fit(made, Log(), distributed=how)
    for epoch, steps in ((0, 1), (1, 2), (1, "trained"), (0, "ended")):
        stopped = fit(made, Log((epoch, steps)), distributed=how)
        of_rank0 = world.broadcast(stopped.state)
        state = of_rank0[0], *stopped.state[1:]  # the random states are this rank's own
        assert world.same_everywhere(
            repr(sorted((k, v) for k, v in stopped.state[0].items() if k in "batches samples"))
        )
        again = fit(made, Log(), state, distributed=how)
        assert again.seen == whole.seen[stopped.count :], (epoch, steps)
        by_one = fit(made, Log(), of_rank0)
        later = epoch if steps != "ended" else epoch + 1
        if steps != "trained":
            got = samples(whole, later)
            read = len(got) - len(alone(by_one, later))
            assert got[read:] == alone(by_one, later)
            assert read == state[0]["samples"]
        for last in range(later + 1, EPOCHS if same_later else 0):
            assert alone(by_one, last) == alone(one, last)
    for epoch, steps in ((0, 1), (1, 3)):
        stopped = fit(made, Log((epoch, steps)))
        again = fit(made, Log(), stopped.state, distributed=how)
        assert alone(stopped, epoch) + samples(again, epoch) == alone(one, epoch), (epoch, steps)
        for last in range(epoch + 1, EPOCHS if same_later else 0):
            assert samples(again, last) == alone(one, last)
