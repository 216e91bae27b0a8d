"""What a step of several ranks sees, who says it, and the rates that go with it."""

import contextlib
import io

import pytest
import torch
from helpers import make_data, mostly_slow
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, distributed, linear_warmup, scaled_lr

pytestmark = pytest.mark.ranks(2, soak=[3])


class Stream(IterableDataset):
    def __iter__(self):
        yield from make_data(96)


def learner(stream=False, bs=8):
    torch.manual_seed(0)
    loader = DataLoader(Stream(), bs) if stream else DataLoader(make_data(96), bs)
    return Learner(DataLoaders(loader, device="cpu"), nn.Linear(4, 1), nn.MSELoss(), opt_func=SGD)


def printed(use):
    """What this rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        use()
    return out.getvalue()


CASES = {
    "rows": (False, {}), "rows, two batches": (False, {"n_batches": 2}), "rows, 40 samples": (False, {"n_samples": 40}),
    "a stream": (True, {}), "a stream, two batches": (True, {"n_batches": 2}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("split", mostly_slow([False, True], True))
@pytest.mark.parametrize("name", mostly_slow(CASES, "rows, two batches", slow=["a stream"]))
def test_a_step_is_said_once_by_rank_0(name, split):
    stream, group = CASES[name]
    n, learn, seen = distributed.world_size(), learner(stream), []
    whole = 8 if split else 8 * n
    batches = group.get("n_batches") or -(-group.get("n_samples", 1) // whole)
    assert learn.effective_batch_size == 8  # outside
    cbs = [GradientAccumulation(**group)] if group else []
    with learn.no_logging(), learn.distrib_ctx(split_batches=split):
        assert learn.effective_batch_size == whole
        out = printed(lambda: [learn.fit(1, 0.01, cbs=cbs), learn.fit(1, 0.01, cbs=cbs)])

        class Shares(Callback):
            def after_batch(self):
                seen.append(self.dl.share.size)

        learn.fit(1, 0.01, cbs=[*cbs, Shares()])
    step = whole * batches
    assert sum(distributed.all_gather(sum(seen[:batches]))) == step
    text = f"8 (cut for {n} processes)" if split else f"8 x {n} processes"
    text += f" x {batches} batches" if batches > 1 else ""
    assert out == (f"{text} = {step} samples a step\n" if distributed.is_main() else "")


@pytest.mark.slow
def test_rates_are_those_of_the_whole_step():
    n, found = distributed.world_size(), {}
    for split in (False, True):
        learn = learner()
        with learn.no_logging(), learn.distrib_ctx(split_batches=split):
            out = printed(lambda: learn.fit_flat_cos(1, scaled_lr(0.01, at=8)))  # noqa: B023
            found[split] = learn.recorder.lrs[0]
            learn.fit(1, linear_warmup(0.5, scaled_lr(0.01, at=8)), cbs=GradientAccumulation(n_batches=2))
            assert learn.recorder.lrs[-1] == pytest.approx(found[split] * 2)
            assert learn.recorder.lrs[0] == 0
        factor = 1 if split else n
        said = (
            f"learning rate 0.01 x {factor} = {0.01 * factor}: {8 * factor} samples a step, rather than 8 (linear rule"
        )
        assert (said in out) == distributed.is_main(), out
    assert found == {False: pytest.approx(0.01 * n), True: pytest.approx(0.01)}


def test_lr_find_says_where_its_rates_hold():
    n, learn = distributed.world_size(), learner()
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx():
        out = printed(lambda: learn.lr_find(num_it=12, show_plot=False))
    said = f"these rates hold at {8 * n} samples a step, 8 x {n} processes"
    assert (said in out) == distributed.is_main(), out
