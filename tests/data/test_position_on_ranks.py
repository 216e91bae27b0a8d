"""A fit that goes on in mid-epoch on several ranks, or on another number of them than before."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from data.test_position import WORKERS, Larger, Log, N, Remembering, Resume, Shuffled, Stream, make_dls
from helpers import end_workers, mostly_slow
from torch import nn
from torch.utils.data import DataLoader

from learnerkit import DataLoaders, Learner, distributed, set_seed

pytestmark = pytest.mark.ranks(2, soak=[3])

RANKS = distributed.world_size()
LAST = distributed.rank() == RANKS - 1
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
        end_workers(dls)  # ends persistent workers
    return log


def samples(log, epoch):
    """The numbers of the samples that training has read in an epoch, on all ranks, in order."""
    mine = [[int(x[0]) for x in seen[4]] for seen in log.seen if seen[0] and seen[1] == epoch]
    return [i for step in zip(*distributed.all_gather(mine), strict=True) for batch in step for i in batch]


def alone(log, epoch):
    return [int(x[0]) for seen in log.seen if seen[0] and seen[1] == epoch for x in seen[4]]


QUICK, SLOW = [("shuffled", "no workers", True)], [("global", "no workers", True)]
SOAK = [
    ("buckets", "persistent", False), ("own generator", "workers", True),
    ("shuffled", "workers", False), ("drop_last", "persistent", False), ("weighted", "no workers", False),
    ("global batches", "workers", False), ("batches of the dataset", "workers", False),
]  # fmt: skip
CASES = mostly_slow([*QUICK, *SLOW, *SOAK], *QUICK, slow=SLOW)


@pytest.mark.parametrize(("sampler", "workers", "split"), CASES)
def test_t8_ranks_go_on_as_they_are_and_in_another_number(sampler, workers, split):
    made, how = lambda: make_dls(sampler, workers), {"split_batches": split}
    one, whole = fit(made, Log()), fit(made, Log(), distributed=how)
    quick = (sampler, workers, split) in QUICK
    for epoch, steps in [(1, 2)] if quick else [(0, 1), (1, 2), (1, "trained"), (0, "ended")]:
        stopped = fit(made, Log((epoch, steps)), distributed=how)
        of_rank0 = distributed.broadcast(stopped.state)
        state = of_rank0[0], *stopped.state[1:]  # the random states are this rank's own
        assert distributed.same_everywhere(
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
        for last in range(later + 1, EPOCHS):
            assert alone(by_one, last) == alone(one, last)
    for epoch, steps in ((0, 1), (1, 3))[quick:]:
        stopped = fit(made, Log((epoch, steps)))
        again = fit(made, Log(), stopped.state, distributed=how)
        assert alone(stopped, epoch) + samples(again, epoch) == alone(one, epoch), (epoch, steps)
        for last in range(epoch + 1, EPOCHS):
            assert samples(again, last) == alone(one, last)


@pytest.mark.slow
def test_a_loader_that_a_callback_puts_in_place_goes_on():
    def made():
        dls = make_dls("shuffled", "no workers")
        dls.cbs = [Larger()]
        return dls

    how = {"split_batches": True}
    whole, stopped = fit(made, Log(), distributed=how), fit(made, Log((1, 1)), distributed=how)
    assert fit(made, Log(), stopped.state, distributed=how).seen == whole.seen[stopped.count :]


def stream(workers, n=22):
    return lambda: DataLoaders(DataLoader(Stream(n), 4, **WORKERS[workers]), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "split"), [("no workers", True), pytest.param("workers", False, marks=pytest.mark.soak)]
)
@pytest.mark.filterwarnings("ignore:.*batches of this epoch are read again")
def test_t8_a_stream_goes_on_in_another_number_of_ranks(workers, split):
    made, how = stream(workers, 24), {"split_batches": split, "uneven": "join"}
    one, whole = fit(made, Log()), fit(made, Log(), distributed=how)
    for epoch, steps in ((1, 2), (1, "trained")):
        stopped = fit(made, Log((epoch, steps)), distributed=how)
        again = fit(made, Log(), stopped.state, distributed=how)
        assert again.seen == whole.seen[stopped.count :], (epoch, steps)
    stopped = fit(made, Log((1, 1)), distributed=how)
    del stopped.seen[stopped.count :]  # the ranks leave together, one step later
    before = fit(made, Log((1, 2)))
    assert alone(before, 1) + samples(fit(made, Log(), before.state, distributed=how), 1) == alone(one, 1)
    assert samples(stopped, 1) + alone(fit(made, Log(), stopped.state), 1) == alone(one, 1)


@pytest.mark.parametrize(
    ("empties", "split"), mostly_slow([(True, False), (False, False), (False, True)], slow=[(False, True)])
)
@pytest.mark.filterwarnings("ignore:.*batches of this epoch are read again", "ignore:the data of rank")
def test_t9_a_stream_with_a_state_goes_on_in_the_order_of_its_epoch(empties, split):
    """Also where the ranks end unevenly; on as many of them, on one, and from one."""

    def made():
        data = Remembering(empties)
        data.n = 24 + 2 * RANKS  # whose last batches are not for all ranks
        return DataLoaders(DataLoader(data, 4), device="cpu")

    how = {"split_batches": split}
    one, whole = fit(made, Log()), fit(made, Log(), distributed=how)
    for epoch in range(EPOCHS):
        read = samples(whole, epoch)
        assert read == alone(one, epoch)[: len(read)]
        assert len(read) > 24 - 4 * RANKS
    for epoch, steps in ((1, 2), (1, "trained"), (0, "ended")):
        stopped = fit(made, Log((epoch, steps)), distributed=how)
        again = fit(made, Log(), stopped.state, distributed=how)
        assert again.seen == whole.seen[stopped.count :], (epoch, steps)
    stopped = fit(made, Log((1, 1)), distributed=how)
    rest = alone(fit(made, Log(), stopped.state), 1)
    assert rest == alone(one, 1)[-len(rest) :]
    assert len(rest) == 24 + 2 * RANKS - stopped.state[0]["samples"]
    for place in ((1, RANKS), (0, "ended")):
        rest = samples(fit(made, Log(), fit(made, Log(place)).state, distributed=how), 1)
        before = 4 * RANKS * (place[0] == 1)
        assert rest == alone(one, 1)[before : before + len(rest)] != []


@pytest.mark.filterwarnings("ignore:the data of rank")
@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_t9_a_stream_of_batches_with_a_state_goes_on_at_its_place(split):
    class Batches(Remembering):
        def __iter__(self):
            for x, y in super().__iter__():
                yield torch.stack([x] * RANKS), torch.stack([y] * RANKS)

    made = lambda: DataLoaders(DataLoader(Batches(True), None), device="cpu")  # noqa: E731
    how = {"split_batches": split}
    whole, stopped = (fit(made, Log(stop), distributed=how) for stop in (None, (1, 2)))
    assert fit(made, Log(), stopped.state, distributed=how).seen == whole.seen[stopped.count :]


@pytest.mark.slow
@pytest.mark.parametrize("n", [26, pytest.param(28, marks=pytest.mark.slow)])  # the last batch is a short or a full one
@pytest.mark.parametrize("empties", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_goes_on_behind_the_last_batch_of_a_stream_with_a_state(n, empties):
    """Also of the random numbers that it draws, where the model draws none."""

    class Quiet(Log):
        draws = False

    def made():
        data = Remembering(empties)
        data.n = n
        return DataLoaders(DataLoader(data, 4), device="cpu")

    how = {"split_batches": True}
    whole = fit(made, Quiet(), distributed=how)
    stopped = fit(made, Quiet((0, 7)), distributed=how)
    again = fit(made, Quiet(), stopped.state, distributed=how)
    assert again.seen == whole.seen[stopped.count :] != []


def test_an_epoch_that_cannot_be_read_again_is_refused():
    class Stateful(DataLoader):
        """Stands for torchdata's: it has the state of its dataset."""

        def state_dict(self):
            return {"n": 1}

        def load_state_dict(self, state):
            pass

    persistent = lambda: DataLoader(Remembering(False), 4, **WORKERS["persistent"])  # noqa: E731
    for make, place, why in (
        (lambda: Stateful(Stream(24), 4), (1, 2), "that of the Stateful of one process"),
        (persistent, (0, "ended"), "its state is in loader workers that stay"),
    ):
        made = lambda make=make: DataLoaders(make(), device="cpu")  # noqa: E731
        stopped = fit(made, Log(place))
        with pytest.raises(ValueError, match=f"epoch 1 of the .* cannot be read again as it was.*{why}"):
            fit(made, Log(), stopped.state, distributed={})


class Part(Remembering):
    """A part of its own for each rank, of different lengths."""

    def __init__(self):
        super().__init__(empties=False)
        self.n = 20 + 4 * distributed.rank()
        self.random.seed(distributed.rank())


class Numbered(Stream):
    def __init__(self):
        self.n = 20 + distributed.rank()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*batches of this epoch are read again")
def test_a_part_without_a_state_is_read_again_with_the_random_numbers_of_its_epoch():
    made = lambda: DataLoaders(DataLoader(Shuffled(), 4), device="cpu")  # noqa: E731
    how = {"sharded": True}
    whole = fit(made, Log(), distributed=how)
    for place in ((0, 2), (1, 3), (0, "ended")):
        stopped = fit(made, Log(place), distributed=how)
        again = fit(made, Log(), stopped.state, stopped.own, distributed=how)
        assert again.seen == whole.seen[stopped.count :] != [], place


@pytest.mark.soak
@pytest.mark.parametrize("uneven", ["stop", "join"])
@pytest.mark.filterwarnings("ignore:the data of rank", "ignore:.*batches of this epoch are read again")
def test_parts_of_ranks_go_on_each_by_its_own_state(uneven):
    how = {"sharded": True, "uneven": uneven}
    for kind in (Part, Numbered):
        made = lambda kind=kind: DataLoaders(DataLoader(kind(), 4), device="cpu")  # noqa: E731
        whole = fit(made, Log(), distributed=how)
        for place in ((0, 1), (1, 3), (1, 5), (1, "trained"), (0, "ended")):
            stopped = fit(made, Log(place), distributed=how)
            rest = kind is Part and uneven == "stop" and RANKS > 2 and place == (0, "ended")  # of the last rank's data
            told = pytest.warns(UserWarning, match="had not been read to their end") if rest and LAST else nullcontext()
            with told:
                again = fit(made, Log(), stopped.state, stopped.own, distributed=how)
            assert rest or again.seen == whole.seen[stopped.count :], place
    stopped = fit(made, Log((1, 2)), distributed=how)
    with pytest.raises(ValueError, match=f"was read in {RANKS} parts by 1 worker each"):
        fit(made, Log(), stopped.state)


@pytest.mark.slow
def test_augmentation_differs_by_rank_unless_it_is_reproducible():
    made = lambda: make_dls("shuffled", "workers", valid=False)  # noqa: E731
    drawn = {
        x[1] for mine in distributed.all_gather(fit(made, Log(), distributed={}).seen) for seen in mine for x in seen[4]
    }
    assert len(drawn) == 2 * N  # of two epochs: no random number comes twice
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        one = {tuple(x) for seen in fit(made, Log()).seen for x in seen[4]}
        ranks = distributed.all_gather(fit(made, Log(), distributed={"split_batches": True}).seen)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {tuple(x) for mine in ranks for seen in mine for x in seen[4]} == one
