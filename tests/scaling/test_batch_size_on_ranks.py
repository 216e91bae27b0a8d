"""The largest batch that fits on several ranks: they agree, no rank hangs, and each is as it was."""

import contextlib
import io

import pytest
import torch
from helpers import make_data, make_model, raises, same_weights, weights
from torch import nn
from torch.optim import SGD

from learnerkit import Callback, DataLoaders, Learner, distributed
from learnerkit.distributed import PeerError
from learnerkit.scaling import batch_size

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings("ignore:.*each train a whole copy"),  # that is what is compared with
]


def learner(**kwargs):
    dls = DataLoaders.from_datasets(make_data(50, 64), make_data(8, 64, seed=1), bs=4, device="cpu")
    return Learner(dls, make_model(64), nn.MSELoss(), opt_func=SGD, lr=0.1, **kwargs)


def found(learn, memory=2**40, **kwargs):
    """What is found with so much memory on this rank, and what this rank printed."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(batch_size, "memory_of", lambda device: memory)
        return learn.find_batch_size(1.0, **kwargs), out.getvalue()


def test_the_ranks_agree_on_what_fits_on_all():
    learn, rank = learner(), distributed.rank()
    before, state = weights(learn.model), torch.get_rng_state()
    gradients = sum(p.nbytes for p in learn.model.parameters())
    alone = found(learner())[0]
    assert alone.effective == alone.batch_size == 50  # outside each rank is by itself
    with learn.distrib_ctx():
        free, _ = found(learn)
        assert list(free.tried) == [4, 8, 16, 25]  # of 50 samples
        assert free.tried[16] - alone.tried[16] == gradients  # in DDP's buckets
        few, out = found(learn, free.tried[8] if rank else 2**30)
        assert (few.batch_size, few.effective, few.limit) == (8, 16, free.tried[8])
        assert few.tried[16] is None
        assert few.lr == pytest.approx(0.1 * 16 / 8)
        assert out == (f"{few}\n" if distributed.is_main() else "")
        assert distributed.same_everywhere(repr(few))
        wanted, _ = found(learn, few.limit, bs=32)
        assert wanted.n_batches > 1
        assert 2 * wanted.batch_size * wanted.n_batches == wanted.effective
        assert 32 <= wanted.effective < 32 + 2 * wanted.n_batches
        with raises(torch.OutOfMemoryError, "a batch of 1 does not fit", "may take 0.977 KB, 100% of the memory"):
            found(learn, 1000 if rank else 2**30)
        assert same_weights(before, weights(learn.model))
        assert torch.equal(state, torch.get_rng_state())
        assert learn.opt is None
    with learn.no_logging(), learn.distrib_ctx(split_batches=True):
        split, _ = found(learn)
        assert (min(split.tried), split.batch_size, split.effective) == (2, 25, 50)
        learn.fit(1)
    assert distributed.same_everywhere([p.tolist() for p in learn.model.parameters()])


def test_an_error_on_one_rank_is_one_on_all():
    def fail(cb):
        if distributed.rank() == 1 and cb.batch_size == 8:
            raise OSError("the disk is full")

    def talk(cb):
        torch.distributed.all_reduce(torch.ones(1))

    learn = learner(cbs=(cb := Callback(after_loss=fail)))
    with learn.distrib_ctx():
        kind, says = (
            (OSError, "the disk is full") if distributed.rank() else (PeerError, "as rank 1 failed: OSError: the")
        )
        with raises(kind, says):
            found(learn)
        learn.remove_cb(cb)
        with learn.added_cbs(Callback(after_loss=talk)), raises(RuntimeError, "a step in one process called"):
            found(learn)
        assert found(learn)[0].batch_size == 25


def test_a_sharded_model_is_refused():
    learn = learner()
    with learn.distrib_ctx(shard=True), raises(ValueError, "a sharded model", "learn.check(memory=...)"):
        learn.find_batch_size()
