"""Iterable datasets on several ranks: every sample where it belongs, and no rank waits for another's data."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from helpers import mostly_slow, mostly_soak
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from learnerkit import Callback, CancelEpochException, DataLoaders, GradientAccumulation, Learner, accuracy, distributed
from learnerkit.distributed import facts

pytestmark = pytest.mark.ranks(2, soak=[3])

RANK, N = distributed.rank(), distributed.world_size()


class Stream(IterableDataset):
    """n samples whose first number is their place; `shuffled` by the global generator."""

    def __init__(self, n, shuffled=False, aware=False):
        self.n, self.shuffled, self.aware = n, shuffled, aware

    def __iter__(self):
        info = get_worker_info()
        step = info.num_workers if self.aware and info else 1
        first = info.id if self.aware and info else 0
        order = torch.randperm(self.n).tolist() if self.shuffled else range(self.n)
        for i in list(order)[first::step]:
            x = torch.tensor([i, i % 3, i % 5, 1.0], dtype=torch.float64) / 10
            yield x, torch.tensor(i % 2)


class Sized(Stream):
    def __len__(self):
        return self.n


class OwnPart(IterableDataset):
    """A dataset that gives each rank its own part: rank r has sizes[r] samples."""

    def __init__(self, sizes):
        self.n = sizes[RANK]

    def __iter__(self):
        for i in range(self.n):
            yield torch.full((4,), float(i), dtype=torch.float64), torch.tensor(i % 2)


class Seen(Callback):
    """The samples of each training step on this rank."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def before_batch(self):
        if self.training:
            self.steps.append(places(self.xb[0][: self.batch_size]))


def places(x):
    """Those of the samples in a batch of a `Stream`."""
    return (x[:, 0] * 10).round().int().tolist()


def make_learner(train, valid=None, bs=4, workers=0, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    loaders = [DataLoader(train, batch_size=bs, num_workers=workers)]
    if valid is not None:
        loaders.append(DataLoader(valid, batch_size=4, num_workers=workers))
    return Learner(DataLoaders(*loaders), model, nn.CrossEntropyLoss(), opt_func=torch.optim.SGD, lr=0.1, **kwargs)


def fit(learn, epochs=2, **options):
    """The warnings of a fit."""
    with warnings.catch_warnings(record=True) as caught, learn.distrib_ctx(**options), learn.no_logging():
        warnings.simplefilter("always")
        learn.fit(epochs)
    assert len(set(map(str, distributed.all_gather([p.tolist() for p in learn.model.parameters()])))) == 1, (
        "ranks differ"
    )
    return [str(w.message) for w in caught if "ended after step" in str(w.message)]


def together(seen):
    """The samples of each step of all ranks."""
    everyone = distributed.all_gather(seen.steps)
    assert len({len(steps) for steps in everyone}) == 1
    return [sorted(sum(ranks, [])) for ranks in zip(*everyone, strict=True)]


def fit_alone(learn, epochs=2):
    """A fit of this process by itself, like those of the others."""
    learn.logger = lambda row: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learn.fit(epochs)


def same_weights(alone, learn):
    for a, b in zip(alone.model.parameters(), learn.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def batches(n, size):
    return [list(range(n))[i : i + size] for i in range(0, n, size)]


@pytest.mark.parametrize("split", mostly_soak([True, False], False), ids=["batches cut", "batches per rank"])
@pytest.mark.parametrize(
    ("n", "workers", "aware"),
    mostly_slow([(23, 0, False), (22, 2, True), (3, 0, False)], (23, 0, False), (3, 0, False)),
)
def test_joined_ranks_use_all_data_in_the_batches_of_one_process(n, workers, aware, split):
    """Weights and losses are those of one process, too."""
    seen = Seen()
    learn = make_learner(Stream(n, aware=aware), Stream(11), workers=workers, cbs=seen, metrics=accuracy)
    assert fit(learn, split_batches=split, uneven="join") == []
    found = list(DataLoader(Stream(n, aware=aware), batch_size=4, num_workers=workers))
    per_step = 1 if split else N
    steps = [[torch.cat(t) for t in zip(*found[i : i + per_step], strict=True)] for i in range(0, len(found), per_step)]
    assert together(seen) == [sorted(places(x)) for x, _ in steps] * 2, together(seen)
    alone = make_learner(Stream(n), Stream(11), metrics=accuracy)
    alone.dls = DataLoaders(steps, alone.dls.valid)
    fit_alone(alone)
    same_weights(alone, learn)
    torch.testing.assert_close(alone.recorder.values, learn.recorder.values, rtol=1e-9, atol=1e-9)


def test_without_join_all_stop_with_the_first_and_rank_0_says_which_that_was():
    seen = Seen()
    told = fit(make_learner(Stream(8 * N - 4), cbs=seen), epochs=1)  # the last rank lacks a second batch
    assert together(seen) == batches(4 * N, 4 * N)
    expected = "ended after step 1, and all ranks stopped with it, although others had more; uneven='join'"
    assert len(told) == (RANK == 0), told
    assert all(expected in text for text in told), told


def test_batches_that_are_cut_are_those_of_one_process_to_the_last():
    seen = Seen()
    assert fit(make_learner(Stream(4 * 3 + 1), cbs=seen), split_batches=True) == []
    assert together(seen) == batches(13, 4) * 2


def test_a_batch_that_is_cut_leaves_no_rank_a_single_sample_for_its_batch_norm():
    seen = Seen()
    learn = make_learner(Stream(4 * N + 3), bs=2 * N, cbs=seen)
    learn.model.insert(1, nn.BatchNorm1d(5).double())
    fit(learn, split_batches=True)
    assert together(seen) == batches(4 * N + 3, 2 * N) * 2
    assert all(len(step) != 1 for step in seen.steps)


def test_ranks_that_end_together_say_nothing():
    seen = Seen()
    assert fit(make_learner(Stream(8 * N), cbs=seen), epochs=1) == []
    assert together(seen) == batches(8 * N, 4 * N)


def test_a_dataset_that_shuffles_does_so_alike_on_every_rank_and_anew_in_every_epoch():
    seen = Seen()
    torch.manual_seed(RANK)
    fit(make_learner(Stream(24, shuffled=True), cbs=seen), split_batches=True, uneven="join")
    steps = together(seen)
    first, second = steps[:6], steps[6:]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(24))
    assert first != second


def test_workers_draw_what_they_draw_on_one_process():
    seen, alone = Seen(), Seen()
    fit_alone(make_learner(Stream(24, shuffled=True), workers=1, cbs=alone), 1)
    learn = make_learner(Stream(24, shuffled=True), Stream(11, shuffled=True), workers=1, cbs=seen)
    fit(learn, 1, split_batches=True)
    assert together(seen) == [sorted(step) for step in alone.steps]
    torch.manual_seed(RANK)
    with learn.distrib_ctx(), learn.no_logging():
        inputs, *_ = learn.get_preds(with_input=True)
    assert sorted(places(inputs)) == list(range(11))


@pytest.mark.parametrize("sizes", mostly_slow([[9, 3, 5], [8, 0, 4], [0, 8, 4]], [8, 0, 4]), ids=str)
def test_a_dataset_that_shares_itself_out_is_left_alone(sizes):
    """A rank without any data keeps the others company."""
    seen = Seen()
    assert fit(make_learner(OwnPart(sizes), cbs=seen), epochs=1, sharded=True, uneven="join") == []
    assert sum(map(len, together(seen))) == sum(sizes[:N])
    seen = Seen()
    told = fit(make_learner(OwnPart(sizes), cbs=seen), epochs=1, sharded=True)
    assert len(together(seen)) == min(-(-size // 4) for size in sizes[:N])
    assert len(told) == (RANK == 0)


class Counting(DataLoader):
    """Counts the samples of its batches as it yields them, as mosaicml-streaming's loader does."""

    counted = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.counted += len(batch[0])
            yield batch


def test_a_loader_that_looks_at_its_batches_gets_them_as_they_are():
    sizes = []
    note = Callback(after_batch=lambda cb: sizes.append((cb.batch_size, cb.dl.counted)))
    learn = make_learner(OwnPart([9, 3, 5]), cbs=note)
    learn.dls = DataLoaders(Counting(OwnPart([9, 3, 5]), 4), device="cpu")
    fit(learn, 1, sharded=True, uneven="join")
    assert sizes == ([(4, 4), (4, 8), (1, 9)], [(3, 3), (0, 3), (0, 3)], [(4, 4), (1, 5), (0, 5)])[RANK]


def test_r35_parts_of_40_and_24_samples_stop_together_at_the_shorter():
    seen = Seen()
    told = fit(make_learner(OwnPart([40, 24, 40]), cbs=seen), epochs=2, sharded=True)
    assert [len(step) for step in together(seen)] == [4 * N] * 6 * 2
    assert [text.partition(",")[0] for text in told] == ["the data of rank 1 ended after step 6"] * 2 * (RANK == 0)


class Made(IterableDataset):
    """Samples that the model makes: how many steps it has taken, and how often it was asked."""

    def __init__(self, n):
        self.n, self.learn = n, None

    def __iter__(self):
        for i in range(self.n):
            yield torch.tensor([float(self.learn.steps), float(i)] * 2, dtype=torch.float64), torch.tensor(i % 2)


class CountSteps(Callback):
    """Counts the steps that the model has taken, and compares with what the batch was made with."""

    run_valid = False

    def before_fit(self):
        self.learn.steps, self.late = 0, []

    def before_batch(self):
        self.late.append((self.learn.steps - self.x[: self.batch_size, 0]).abs().sum().item())

    def after_step(self):
        self.learn.steps += 1


@pytest.mark.parametrize(
    "options",
    mostly_slow(
        [{}, {"split_batches": True}, {"sharded": True}, {"sharded": True, "uneven": "join"}],
        {"split_batches": True}, {"sharded": True, "uneven": "join"},
    ),
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:sharded=True says")
def test_data_that_the_model_makes_are_made_by_the_model_of_that_step(options):
    sharded = "sharded" in options
    made = Made(20 if sharded or options else 20 * N)
    made.n -= 4 * RANK * sharded  # so that ranks end at different steps
    count = CountSteps()
    made.learn = make_learner(made, cbs=count)
    made.learn.steps = 0
    fit(made.learn, epochs=1, **options)
    assert len(count.late) == (5 - (N - 1) if sharded and "uneven" not in options else 5)
    assert not any(count.late)


def test_a_rank_that_leaves_between_two_steps_of_a_stream_takes_the_others_along():
    for ranks in (RANK == 0, True):

        def leave(cb, ranks=ranks):
            if cb.training and cb.iter == 1 and ranks:
                raise CancelEpochException

        seen = Seen()
        learn = make_learner(OwnPart([24] * 3), cbs=[seen, Callback(after_batch=leave)])
        fit(learn, epochs=1, sharded=True, timeout=30)
        assert len(together(seen)) in (2, 3)  # at the latest with the next step


@pytest.mark.parametrize(
    ("n", "size"), [(23, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(40, 2), (23, 4), (21, 4)])]
)
def test_groups_of_batches_are_the_steps_of_one_process(n, size):
    """Also where ranks end in the middle of one."""
    learn = make_learner(Stream(n), cbs=GradientAccumulation(n_batches=size))
    fit(learn, split_batches=True, uneven="join")
    alone, whole = (
        make_learner(Stream(n), cbs=GradientAccumulation(n_batches=size)),
        make_learner(Stream(n), bs=4 * size),
    )
    fit_alone(alone)
    fit_alone(whole)
    same_weights(alone, learn)
    same_weights(whole, learn)
    for name in ("losses", "lrs", "iters", "values"):
        torch.testing.assert_close(getattr(learn.recorder, name), getattr(alone.recorder, name), rtol=1e-9, atol=1e-9)
    assert all(p.grad is None for p in learn.model.parameters())


def test_evaluation_takes_each_sample_once_in_order():
    learn = make_learner(Stream(23), Stream(11), metrics=accuracy)
    with learn.distrib_ctx(uneven="join"), learn.no_logging():
        preds, targets = learn.get_preds()
    alone = learn.model(torch.stack([x for x, _ in Stream(11)]))
    torch.testing.assert_close(preds, alone.detach())
    assert targets.tolist() == [i % 2 for i in range(11)]


def test_validation_by_the_loader_of_training_is_not_cut_short_as_that_is():
    learn = make_learner(OwnPart([12, 4, 4]))
    learn.dls = DataLoaders(learn.dls.train, learn.dls.train, device="cpu")
    fit(learn, 1, sharded=True)
    with torch.no_grad():
        x, y = map(torch.stack, zip(*learn.dls.train.dataset, strict=True))
        total = nn.functional.cross_entropy(learn.model(x), y, reduction="sum")
    found = distributed.reduce(torch.stack([total, torch.tensor(len(y), dtype=total.dtype)]))
    assert learn.recorder.values[-1][1] == pytest.approx((found[0] / found[1]).item(), rel=1e-9)


def test_a_dataset_with_a_length_lets_schedules_run():
    learn = make_learner(Sized(23), Stream(11), metrics=accuracy)
    with learn.distrib_ctx(uneven="join"), learn.no_logging():
        learn.fit_one_cycle(1, 0.1)
    assert len(learn.recorder.lrs) == -(-23 // (4 * N))


def test_ranks_that_begin_with_the_same_data_are_told_that_these_are_not_parts():
    facts._warned.clear()
    with (
        pytest.warns(UserWarning, match="ranks 0, 1.* are the same.*leave sharded=True out")
        if RANK == 0
        else nullcontext(),
        make_learner(Stream(8), Stream(5)).distrib_ctx(sharded=True) as learn,
        learn.no_logging(),
    ):
        learn.validate()


class Divided(Stream):
    """Gives each rank samples of its own."""

    def __iter__(self):
        yield from list(super().__iter__())[RANK::N]


def test_ranks_that_should_read_alike_and_do_not_are_told_that_these_may_be_parts():
    for dataset, told in ((Divided(24), True), (Stream(24, shuffled=True), False)):
        facts._warned.clear()
        with warnings.catch_warnings(record=True) as caught, make_learner(dataset).distrib_ctx() as learn:
            warnings.simplefilter("always")
            with learn.no_logging():
                learn.fit(1)
        found = [text for w in caught if "sharded=True" in (text := str(w.message))]
        assert len(found) == (told and RANK == 0), found
