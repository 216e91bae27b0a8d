"""DistributedCallback on real ranks: what it does, and what it leaves behind."""

import contextlib
import gc
import io
import random
import warnings
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_data, raises, step_gradient
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Subset, TensorDataset

from learnerkit import (
    EMA,
    Callback,
    CheckpointCallback,
    CSVLogger,
    DataLoaders,
    DistributedCallback,
    EarlyStoppingCallback,
    GradientClip,
    GradientNoiseScale,
    Learner,
    Profiler,
    ValidateEvery,
    accuracy,
    distributed,
    error_rate,
    on_rank0,
    set_seed,
)
from learnerkit.optim import make_groups, make_optimizer
from learnerkit.parallel.watch import PeerError
from learnerkit.shards import gathered
from learnerkit.utils import unwrap

pytestmark = pytest.mark.ranks(2, soak=["torchrun", 3])

N = distributed.world_size()


def make_learner(model=None, n=23, bs=4, cbs=None, **kwargs):
    torch.manual_seed(3)
    x = torch.randn(n, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    dls = DataLoaders.from_datasets(data, data, bs=bs, device="cpu")
    model = model or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return Learner(dls, model, nn.CrossEntropyLoss(), lr=0.05, cbs=cbs, **kwargs)


def same(x):
    return all(torch.equal(torch.as_tensor(x), other) for other in distributed.all_gather(torch.as_tensor(x)))


def weights_agree(learn):
    return all(same(t) for t in learn.model.state_dict().values())


@contextlib.contextmanager
def captured():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        yield out


def test_a_seed_is_that_of_all_ranks_until_the_fit_whose_dropout_differs():
    set_seed(5)
    start = torch.rand(1)
    assert same(start)
    learn = make_learner()
    set_seed(5)
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1)
    assert not same(torch.rand(1))  # dropout differs by rank from here on


def test_a_buffer_that_is_expanded_gets_rank_0s_values():
    model = nn.Linear(4, 2)
    model.register_buffer("mask", torch.full((1, 2), 1.0 + distributed.rank()).expand(3, 2))
    learn = make_learner(model)
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1)
    assert model.mask.tolist() == [[1.0, 1.0]] * 3
    assert model.mask.stride() == (0, 1)


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta state")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr"])
def test_a_sparse_buffer_gets_rank_0s_values(kind):
    dense = torch.eye(4) * (1 + distributed.rank())
    sparse = dense.to_sparse(layout=getattr(torch, f"sparse_{kind}"), blocksize=(2, 2) if kind == "bsr" else None)
    model = nn.Linear(4, 2)
    model.register_buffer("edges", sparse)
    learn = make_learner(model)
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1)
    assert torch.equal(learn.model.edges.to_dense(), torch.eye(4))


@pytest.mark.ranks(2, slow=[3], soak=["torchrun"])
def test_ranks_draw_differently_also_where_rank_0_alone_has_drawn_before_the_fit():
    learn = make_learner()
    set_seed(5)
    if distributed.is_main():
        torch.rand(1)  # as for a look at a batch
    with learn.distrib_ctx(), learn.no_logging():
        learn.validate()
    drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
    for ranks in zip(*distributed.all_gather(drawn), strict=True):
        assert len({*ranks}) == N


@pytest.mark.ranks(2, slow=[3], soak=["torchrun"])
def test_rank_0_speaks_and_saves_the_ranks_agree_and_all_is_put_back():
    inside = []

    class Look(Callback):
        def before_epoch(self):
            inside.append(type(self.model).__name__)

        def before_batch(self):
            assert self.model is model  # callbacks see the user's own, which nothing is wrapped around
            if self.training:
                assert not any(k.startswith("module.") for k in _saved_keys(self.learn))
            self.learn.log_metric("rank", float(distributed.rank()))

    learn = make_learner(metrics=accuracy, cbs=Look())
    model, logger, dls = learn.model, learn.logger, list(learn.dls.loaders)
    with captured() as out, learn.distrib_ctx(sync_bn=False) as inner:
        assert inner is learn
        learn.fit(2)
        learn.save("model")
    assert set(inside) == {"Sequential"}
    assert bool(out.getvalue()) == distributed.is_main()
    if distributed.is_main():
        step, header = out.getvalue().split("\n")[:2]
        assert step.endswith("samples a step")
        assert header.split() == [
            "epoch", "train_loss", "valid_loss", "accuracy", "rank", "time",
        ]  # fmt: skip
    assert distributed.same_everywhere((learn.recorder.values, learn.recorder.losses, learn.recorder.iters))
    assert learn.model is model
    assert learn.logger is logger
    assert all(a is b for a, b in zip(learn.dls.loaders, dls, strict=True))
    assert not any(isinstance(cb, DistributedCallback) for cb in learn.cbs)
    assert weights_agree(learn)
    # One file, written by rank 0, complete when load returns on any rank.
    saved = {k: v.clone() for k, v in learn.model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.zero_()
    learn.load("model")
    assert all(torch.equal(v, saved[k]) for k, v in learn.model.state_dict().items())
    on_rank0(learn.save)("alone")  # nobody waits
    learn.load("alone")
    assert sorted(p.name for p in (Path("models")).iterdir()) == ["alone.pth", "model.pth"]
    distributed.barrier()


def _saved_keys(learn):
    path = Path(f"inside-{distributed.rank()}.pth").absolute()
    learn.save(path, with_opt=False)
    return torch.load(path, weights_only=True) if distributed.is_main() else {}


def test_by_default_a_step_has_a_whole_batch_for_every_rank_and_the_last_is_spread():
    sizes = []

    class Sizes(Callback):
        def after_batch(self):
            if self.training:
                sizes.append(self.batch_size)

    learn = make_learner(n=23, bs=4, cbs=Sizes())
    with learn.distrib_ctx(sync_bn=False), learn.no_logging():
        learn.fit(1)
    steps = list(zip(*distributed.all_gather(sizes), strict=True))
    assert len(steps) == -(-6 // N)
    assert [sum(step) for step in steps] == [min(4 * N, 23 - 4 * N * i) for i in range(len(steps))]
    assert all(max(step) - min(step) <= 1 for step in steps)


class Shuffled:
    """A batch sampler that shuffles with python's global generator."""

    def __len__(self):
        return 6

    def __iter__(self):
        order = list(range(23))
        random.shuffle(order)
        for i in range(0, 23, 4):
            yield order[i : i + 4]


def test_a_sampler_of_ones_own_draws_alike_on_every_rank_and_anew_in_every_epoch():
    epochs = {}

    class Look(Callback):
        def before_batch(self):
            if self.training:
                epochs.setdefault(self.epoch, []).extend(self.xb[0][:, 0].tolist())

    learn = make_learner(cbs=Look())
    data = learn.dls.train_ds
    learn.dls.loaders[0] = DataLoader(data, batch_sampler=Shuffled())
    random.seed(distributed.rank())  # ranks whose own generators differ
    with learn.distrib_ctx(split_batches=True), learn.no_logging():
        learn.fit(2)
    together = [sorted(sum(rank, [])) for rank in zip(*distributed.all_gather([epochs[0], epochs[1]]), strict=True)]
    assert together == [sorted(data.tensors[0][:, 0].tolist())] * 2
    assert epochs[0] != epochs[1]


def test_what_differs_between_ranks_is_rank_0s_after_the_start_of_a_fit():
    """Weights and optimizer state that differ between ranks are rank 0's after fit has started."""
    learn = make_learner(opt_func=torch.optim.AdamW)
    with learn.no_logging():
        with learn.distrib_ctx():
            learn.fit(1)
        state = next(iter(learn.opt.state.values()))
        state["exp_avg"] += distributed.rank()
        with torch.no_grad():
            learn.model[0].weight += distributed.rank()
        with learn.distrib_ctx():
            learn.fit(1)
    assert weights_agree(learn)
    assert all(same(t) for s in learn.opt.state.values() for t in s.values())
    with learn.distrib_ctx(), raises(ValueError, "differs between ranks in its epochs (rank 0: 1, rank 1: 2"):
        learn.fit(1 + distributed.rank())
    with learn.distrib_ctx(), raises(ValueError, "differs between ranks in its learning rates (rank 0: [0.1], rank 1"):
        learn.fit(1, 0.1 + distributed.rank())
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1)


@pytest.mark.parametrize("kind", ["subsets", "tensors", "lists"])
def test_data_that_are_not_the_same_on_all_ranks_are_told_once(kind):
    """Data that were drawn or split at random without a seed are told; equal data are not."""
    warned = []
    for rank in (0, distributed.rank()):
        data = make_data(24, seed=rank)
        order = torch.randperm(24, generator=torch.Generator().manual_seed(rank)).tolist()
        sets = {"tensors": data, "subsets": Subset(make_data(24), order), "lists": list(data)}
        dls = DataLoaders.from_datasets(make_data(24), sets[kind], bs=6, device="cpu")
        learn = Learner(dls, nn.Linear(4, 1), nn.MSELoss())
        with warnings.catch_warnings(record=True) as caught, learn.no_logging(), learn.distrib_ctx():
            warnings.simplefilter("always")
            learn.fit(1)
            learn.fit(1)
        warned.append(sum("not the same on all ranks" in str(w.message) for w in caught))
    assert warned == [0, distributed.is_main()]


@pytest.mark.slow
def test_a_callback_that_was_made_otherwise_on_another_rank_is_named_at_once():
    class Mine(Callback):
        def __init__(self, every):
            super().__init__()
            self.every = every

    class Clip(GradientClip):
        pass

    learn = make_learner(cbs=[Mine(distributed.rank()), *([EarlyStoppingCallback()] if distributed.is_main() else [])])
    different = {
        "CheckpointCallback(every=) (rank 0: 5, rank 1: 6": CheckpointCallback("run", every=5 + distributed.rank()),
        "ValidateEvery(n=) (rank 0: 5, rank 1: 6": ValidateEvery(5 + distributed.rank()),
        "GradientNoiseScale(every=) (rank 0: None, rank 1: 3": GradientNoiseScale(3 if distributed.rank() else None),
        "GradientClip(max_norm=) (rank 0: 1.0, 2.0, rank 1: 1.0, 3.0": [GradientClip(), Clip(2.0 + distributed.rank())],
    }
    for words, cbs in different.items():
        with learn.distrib_ctx(), raises(ValueError, f"fit differs between ranks in its {words}"):
            learn.fit(1, cbs=cbs)
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1, cbs=[GradientClip(), ValidateEvery(3), CSVLogger(f"rank {distributed.rank()}.csv")])
    assert learn.early_stopping if distributed.is_main() else True


@pytest.mark.filterwarnings("ignore:no step was recorded")
def test_callbacks_and_metrics_that_some_ranks_lack_are_named():
    """An average on rank 0 alone mixes two models in the valid loss; metrics in one place would be averaged as one."""
    first = distributed.is_main()
    for ours, words in (
        (EMA(), "EMA: some ranks are without it"),
        (CSVLogger("first.csv"), ""),
        (Profiler("first"), ""),
    ):
        learn = make_learner(cbs=ours if first else None)
        told = []
        learn.say = told.append
        with learn.no_logging(), learn.distrib_ctx():
            learn.fit(1)
        assert [t.startswith(words) for t in told if "some ranks are" in t] == [True] * bool(words and first)
    learn = make_learner(metrics=accuracy if first else error_rate)
    with learn.distrib_ctx(), raises(ValueError, "differs between ranks in its metrics (rank 0: accuracy, rank 1: err"):
        learn.fit(1)


def test_batch_norm_is_put_back_ends_alike_and_warns_once():
    """No rank is left with a single sample; buffers end alike; one warning on the CPU; nothing stays converted."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for fits in (0, 2, 1):
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
            learn = make_learner(model, n=4 * N + 3, bs=4)
            asked = {"sync_bn": True} if fits else {}
            with learn.distrib_ctx(split_batches=True, **asked), learn.no_logging():
                for _ in range(fits or 1):
                    learn.fit(1)
            assert fits or not any("sync_bn" in str(w.message) for w in caught)  # nobody has asked for it
            assert type(model[1]) is nn.BatchNorm1d
            assert weights_agree(learn)
    told = [str(w.message) for w in caught if "sync_bn" in str(w.message)]
    assert len(told) == (1 if distributed.is_main() else 0), told  # once a process


def test_validation_in_mid_epoch_has_the_statistics_of_rank_0():
    found = []
    look = Callback(before_validate=lambda cb: found.append(same(cb.model[1].running_mean)), order=12)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    learn = make_learner(model, n=16 * N, cbs=[look, ValidateEvery(2)])
    with learn.distrib_ctx(sync_bn=False), learn.no_logging():
        learn.fit(1)
    assert found == [True, True]


@pytest.mark.parametrize(
    ("each", "more", "split", "lone"),
    [(4, 1, False, True), (8, 5, False, False), (0, 9, True, True), (4, 2, False, False)],
)
def test_a_step_of_one_sample_over_all_ranks_is_found_before_training(each, more, split, lone):
    """One that has company on a rank is fine."""
    n = each * N + more
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    learn = make_learner(model, n=n, bs=4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    # A rank that has not come as far leaves with another's error.
    refused = raises((ValueError, PeerError), "its last batch has 1 of its") if lone else contextlib.nullcontext()
    with learn.distrib_ctx(split_batches=split, sync_bn=False), learn.no_logging(), refused:
        learn.fit(1)
    if distributed.is_main():  # a rank without data may have had its forward pass
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) == lone


class OwnTokens(nn.Module):
    """Makes its own loss over words, the mean over those that are not padding; `counts`: it takes their number."""

    def __init__(self, counts):
        super().__init__()
        self.body, self.counts = nn.Embedding(9, 9), counts
        self.accepts_loss_kwargs = counts

    def forward(self, ids, labels, **kwargs):
        logits = self.body(ids)
        if not self.counts:
            return {"logits": logits, "loss": F.cross_entropy(logits.mT, labels)}
        total = F.cross_entropy(logits.mT, labels, reduction="sum")
        return {"logits": logits, "loss": total / kwargs["num_items_in_batch"]}


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_models_own_loss_is_counted_by_one_rule_whatever_a_rank_has(at, counts):
    """And what is not known is told at once, by rank 0."""
    torch.manual_seed(3)
    words, found = torch.randint(1, 9, (8 * N + 1, 5)), []
    words[4 * N * (at + 1) - 4 : 4 * N * (at + 1), 2:] = -100  # in one batch of the last rank
    dls = DataLoaders(DataLoader([{"ids": row.clamp(min=0), "labels": row} for row in words], 4), device="cpu")
    count = Callback(after_loss=lambda cb: found.append(int(cb.loss_count)))
    # The last batch has a sample for rank 0 alone.
    learn = Learner(dls, OwnTokens(counts), cbs=[count])
    with warnings.catch_warnings(record=True) as caught, learn.distrib_ctx(timeout=60), learn.no_logging():
        warnings.simplefilter("always")
        learn.fit(2)
    told = [str(w.message) for w in caught if "it is not known what that averages over" in str(w.message)]
    assert len(told) == (distributed.is_main() and not counts), told
    last = distributed.rank() == N - 1
    assert found[:2] == [8 if last and at == 0 else 20, 8 if last and at == 1 else 20], found


def test_a_run_leaves_eval_mode_and_training_keeps_what_the_user_has_put_there():
    """A run that ends well leaves all modules in eval mode; one that the user has put there stays so in training."""
    seen = []
    look = Callback(before_batch=lambda cb: cb.training and seen.append([m.training for m in unwrap(cb.model)]))
    learn = make_learner(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(8, 2)), cbs=look)
    learn.model[1].eval()
    with learn.distrib_ctx(), learn.no_logging():
        for _ in range(2):
            learn.fit(1)
            learn.get_preds()
            assert not any(m.training for m in learn.model.modules())
    assert {tuple(modes) for modes in seen} == {(True, False, True, True)}


@pytest.mark.slow
def test_evaluation_draws_anew_outside_a_fit_and_gives_streams_back_in_one():
    """Outside a fit each evaluation draws anew, other numbers on each rank; in a fit streams are given back."""

    class MonteCarlo(Callback):
        def before_validate(self):
            unwrap(self.model)[1].train()

        def before_batch(self):
            self.learn.xb = (torch.ones(len(self.x), 4),)

    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 2))
    learn = make_learner(model, n=2 * N, bs=1, cbs=MonteCarlo())
    set_seed(5)
    with learn.distrib_ctx(), learn.no_logging():
        first, second = learn.get_preds()[0], learn.get_preds()[0]
        assert not torch.isclose(first, second).any()
        assert len({row[0].item() for row in first}) == 2 * N  # ranks have streams of their own
        evaluate = Callback(after_step=lambda cb: states.append((torch.get_rng_state(), cb.learn.validate())))
        settle = Callback(after_step=lambda cb: states.append(torch.get_rng_state()), order=1)
        states = []
        learn.fit(1, cbs=[evaluate, settle])
    assert torch.equal(states[0][0], states[1])


def test_validate_and_get_preds_in_the_middle_of_training_leave_no_trace():
    """validate and get_preds from a callback in training: right, and without a trace."""
    found = []

    class Inner(Callback):
        def after_pred(self):
            if self.training and self.train_iter == 1:
                before = (self.dl, self.batch, self.iter, self.training, self.n_ranks > 1, self.model)
                found.append((self.learn.validate(), self.learn.get_preds()[0].sum().item()))
                after = (self.dl, self.batch, self.iter, self.training, self.n_ranks > 1, self.model)
                assert all(a is b for a, b in zip(before, after, strict=True))

    runs = []
    for cbs in ([], [Inner()]):
        learn = make_learner(cbs=cbs)
        with learn.distrib_ctx(), learn.no_logging():
            learn.fit(2)
        runs.append((learn.recorder.values, learn.recorder.losses))
    assert runs[0] == runs[1]
    assert len(found) == 1
    assert distributed.same_everywhere(found)


def test_predictions_are_those_of_one_process_on_every_rank():
    learn = make_learner(n=11)
    with learn.distrib_ctx():
        inputs, preds, targets, decoded, losses = learn.get_preds(with_input=True, with_decoded=True, with_loss=True)
        part = learn.get_preds(on="rank0")
        train_preds, train_targets = learn.get_preds(ds_idx=0)
        soft = learn.get_preds(act=lambda p: p.softmax(1))[0]
    x, y = learn.dls.valid_ds.tensors
    assert torch.equal(inputs, x)
    assert torch.equal(targets, y)
    assert torch.equal(train_targets, y)
    with torch.no_grad():
        assert torch.allclose(preds, learn.model.eval()(x), atol=1e-6)
    assert torch.equal(decoded, preds.argmax(1))
    assert torch.allclose(losses, nn.functional.cross_entropy(preds, y, reduction="none"), atol=1e-6)
    assert torch.allclose(soft.sum(1), torch.ones(11))
    assert (part[0] is None) == (not distributed.is_main())


def test_statistics_that_differ_between_ranks_are_rank_0s_in_an_evaluation():
    learn = make_learner(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    learn.model[1].running_mean += distributed.rank()
    with learn.distrib_ctx():
        learn.get_preds()
    assert weights_agree(learn)


def test_one_loader_may_be_for_training_and_validation():
    learn = make_learner(n=8 * N + 1, metrics=accuracy)
    learn.dls = DataLoaders(learn.dls.valid, learn.dls.valid, device="cpu")
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1)
    with distributed.alone(), learn.no_logging():
        assert learn.recorder.values[-1][1:] == pytest.approx(learn.validate(), rel=1e-5)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.d = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.d(self.g(x))


def test_mistakes_in_the_options_are_named():
    with raises(ValueError, "python -m learnerkit.launch --nproc 2"):
        make_learner().distrib_ctx(nproc=2)
    with raises(TypeError, "did you mean 'bucket_cap_mb'"):
        DistributedCallback(bucket_cap_mbs=3)


def test_after_an_error_in_the_options_nothing_stays_wrapped():
    learn = make_learner(Pair())
    with learn.distrib_ctx(wrap=("g", "d")), learn.no_logging():
        learn.fit(1)
    assert type(learn.model.g) is nn.Linear
    assert weights_agree(learn)
    with learn.distrib_ctx(wrap="h"), learn.no_logging(), raises(ValueError, "names 'h'; Pair has ['g', 'd']"):
        learn.fit(1)
    with warnings.catch_warnings(record=True) as caught, learn.no_logging():
        warnings.simplefilter("always")
        learn.fit(1)
    assert any("each train a whole copy" in str(w.message) for w in caught) == distributed.is_main()


def test_a_learner_that_was_detached_is_distributed_anew():
    learn = make_learner()
    learn.to_distributed().detach_distributed()
    assert not any(isinstance(cb, DistributedCallback) for cb in learn.cbs)
    learn.dls.loaders[0] = DataLoader(learn.dls.train_ds, batch_size=4, drop_last=True, shuffle=True)
    with learn.distrib_ctx(gradient_as_bucket_view=True), learn.no_logging():
        learn.fit_one_cycle(2, 0.1)
    assert weights_agree(learn)


@pytest.mark.filterwarnings("ignore:.* processes each train a whole copy")
def test_each_rank_of_a_learner_whose_ddp_is_switched_off_trains_by_itself():
    alone, off = make_learner(), make_learner(cbs=DistributedCallback())
    off.distributed.run = False
    set_seed(distributed.rank())
    alone.fit(1)
    set_seed(distributed.rank())
    off.fit(1)
    assert off.recorder.values == alone.recorder.values
    assert off.recorder.iters == [6]
    off.distributed.run = True
    off.fit(1)
    assert off.recorder.iters == [6 // distributed.world_size()]


def test_a_cleanup_that_communicates_is_named():
    class Talks(Callback):
        def cleanup_fit(self):
            distributed.barrier()

    learn = make_learner(cbs=Talks())
    with learn.distrib_ctx(), learn.no_logging(), raises(RuntimeError, "Talks.cleanup_fit called distributed.barrier"):
        learn.fit(1)
    learn.remove_cb(Talks)
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1)


def test_a_load_in_a_callback_of_rank_0_is_named_as_users_call_it():
    class Loads(Callback):
        rank0_only = True

        def after_step(self):
            self.learn.load("model")

    learn = make_learner(cbs=Loads())
    with learn.distrib_ctx(), learn.no_logging(), raises(RuntimeError, "Loads.after_step called learn.load:"):
        learn.fit(1)


def test_no_ddp_is_left_to_the_collector():
    """In a forked loader worker its end would be that of a process group whose threads are not there."""
    found = []

    class Look(Callback):
        def before_batch(self):
            if self.training and self.iter:  # the first batch is averaged without it
                found.append(weakref.ref(step_gradient(self.learn).ddp))

        def before_epoch(self):
            self.model[0].requires_grad_(self.epoch != 1)  # another one is made

    learn = make_learner(cbs=Look())
    gc.collect()
    gc.disable()
    try:
        with learn.distrib_ctx(), learn.no_logging():
            learn.fit(3)
        assert len(found) >= 3  # in each epoch another one
        assert not [ref for ref in found if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_draw_differently_on_their_devices_also_where_the_host_has_drawn_on_one_alone(monkeypatch, shared):
    class Module:
        """Stands for torch.cuda."""

        seeds = []
        manual_seed = seeds.append

        @staticmethod
        def get_rng_state():
            return torch.zeros(2) if shared else torch.full((2,), distributed.rank())

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    torch.manual_seed(distributed.rank())
    state = torch.get_rng_state()
    distributed.spread_seeds(torch.device("cuda"))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(Module.seeds) == (shared and not distributed.is_main())


@pytest.mark.parametrize("opt_func", [partial(SGD, momentum=0.9), AdamW])
def test_a_model_that_the_user_has_divided_steps_by_kernels_that_there_are(opt_func):
    distributed.join()
    model = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (N,)))
    opt = make_optimizer(opt_func, make_groups(model, None), 0.1, model)
    before = gathered(model.weight.detach()).clone()
    model(torch.ones(3, 4)).sum().backward()
    opt.step()  # DTensor has the fused kernel of Adam alone
    assert not torch.equal(before, gathered(model.weight.detach()))
