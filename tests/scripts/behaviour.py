"""Checks what DistributedCallback and `world` promise, on any number of processes above one; ends with 'all well'."""

import contextlib
import io
import random
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from checking import all_checks, leave, run
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    Callback,
    DataLoaders,
    DistributedCallback,
    Learner,
    accuracy,
    on_rank0,
    rank0_first,
    set_seed,
    unwrap,
    world,
)
from learnerkit.parallel.watch import PeerError

OUT = Path(sys.argv[1])
N = world.world_size()


def raises(error, match):
    class Check:
        def __enter__(self):
            return self

        def __exit__(self, kind, e, tb):
            assert kind is not None, f"nothing was raised; expected {error}: {match}"
            assert issubclass(kind, error), e
            assert match in str(e), str(e)
            return True

    return Check()


def make_learner(model=None, n=23, bs=4, cbs=None, **kwargs):
    torch.manual_seed(3)
    x = torch.randn(n, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    dls = DataLoaders.from_datasets(data, data, bs=bs, device="cpu")
    model = model or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return Learner(dls, model, nn.CrossEntropyLoss(), path=OUT, lr=0.05, cbs=cbs, **kwargs)


def same(x):
    return all(torch.equal(torch.as_tensor(x), other) for other in world.all_gather(torch.as_tensor(x)))


def weights_agree(learn):
    return all(same(t) for t in learn.model.state_dict().values())


@contextlib.contextmanager
def captured():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        yield out


def check_world():
    rank = world.rank()
    assert world.all_gather(rank) == list(range(N))
    assert [int(t) for t in world.all_gather(torch.tensor(rank))] == list(range(N))
    assert world.reduce(rank + 1) == N * (N + 1) // 2
    assert world.reduce(float(rank), "mean") == (N - 1) / 2
    assert world.reduce(torch.tensor([rank, -rank]), "max").tolist() == [N - 1, 0]
    assert world.reduce(rank, "min") == 0
    assert world.broadcast({"from": rank}) == {"from": 0}
    assert world.broadcast(torch.tensor(rank)).item() == 0
    pieces = [(i, torch.full((i % 3, 2), i)) for i in range(7) if i % N == rank]
    whole = world.gather_pieces(pieces)
    assert [t.shape[0] for t in whole] == [i % 3 for i in range(7)]
    assert (world.gather_pieces(pieces, "rank0") is not None) == (rank == 0)
    assert not world.same_everywhere(rank)
    assert world.same_everywhere([1, 2])
    world.barrier()
    with world.no_collectives("the test"), raises(RuntimeError, "the test called world.reduce"):
        world.reduce(1)


def check_rank0_first():
    file = OUT / "first"
    was_there = rank0_first(lambda: (file.exists(), file.touch())[0])
    assert was_there == (world.rank() > 0)

    @rank0_first(per_node=True)
    def second(name, suffix=""):
        path = OUT / (name + suffix)
        found = path.exists()
        path.touch()
        return found

    assert second("second", suffix="!") == (world.rank() > 0)

    def fails():
        raise OSError("no such host")

    with raises(OSError if world.is_main() else RuntimeError, "no such host"):
        rank0_first(fails)
    assert on_rank0(lambda: world.rank())() == (0 if world.is_main() else None)


def check_seeds():
    set_seed(5)
    start = torch.rand(1)
    assert same(start)
    learn = make_learner()
    set_seed(5)
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1)
    assert not same(torch.rand(1))  # dropout differs by rank from here on


def check_fit():
    """Rank 0 speaks and saves, ranks agree, and everything is put back."""
    inside = []

    class Look(Callback):
        def before_epoch(self):
            inside.append(type(self.model).__name__)

        def before_batch(self):
            if self.training:
                assert isinstance(self.model, DistributedDataParallel)
                assert not any(k.startswith("module.") for k in _saved_keys(self.learn))
            else:
                assert not isinstance(self.model, DistributedDataParallel)
            self.learn.log_metric("rank", float(world.rank()))

    learn = make_learner(metrics=accuracy, cbs=Look())
    model, logger, dls = learn.model, learn.logger, list(learn.dls.loaders)
    with captured() as out, learn.distrib_ctx(sync_bn=False) as inner:
        assert inner is learn
        learn.fit(2)
        learn.save("model")
    assert set(inside) == {"Sequential"}
    assert bool(out.getvalue()) == world.is_main()
    if world.is_main():
        assert out.getvalue().split("\n")[0].split() == [
            "epoch", "train_loss", "valid_loss", "accuracy", "rank", "time",
        ]  # fmt: skip
    assert world.same_everywhere((learn.recorder.values, learn.recorder.losses, learn.recorder.iters))
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
    assert sorted(p.name for p in (OUT / "models").iterdir()) == ["alone.pth", "model.pth"]
    world.barrier()


def _saved_keys(learn):
    path = OUT / f"inside-{world.rank()}.pth"
    learn.save(path, with_opt=False)
    return torch.load(path, weights_only=True) if world.is_main() else {}


def check_default_batches():
    """Without split_batches a step has a whole batch for every rank, and the last one is spread."""
    sizes = []

    class Sizes(Callback):
        def after_batch(self):
            if self.training:
                sizes.append(self.batch_size)

    learn = make_learner(n=23, bs=4, cbs=Sizes())
    with learn.distrib_ctx(sync_bn=False), learn.no_logging():
        learn.fit(1)
    steps = list(zip(*world.all_gather(sizes), strict=True))
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


def check_a_sampler_of_ones_own():
    """It draws alike on every rank, and anew in every epoch."""
    epochs = {}

    class Look(Callback):
        def before_batch(self):
            if self.training:
                epochs.setdefault(self.epoch, []).extend(self.xb[0][:, 0].tolist())

    learn = make_learner(cbs=Look())
    data = learn.dls.train_ds
    learn.dls.loaders[0] = DataLoader(data, batch_sampler=Shuffled())
    random.seed(world.rank())  # ranks whose own generators differ
    with learn.distrib_ctx(split_batches=True), learn.no_logging():
        learn.fit(2)
    together = [sorted(sum(rank, [])) for rank in zip(*world.all_gather([epochs[0], epochs[1]]), strict=True)]
    assert together == [sorted(data.tensors[0][:, 0].tolist())] * 2
    assert epochs[0] != epochs[1]


def check_ranks_start_alike():
    """Weights and optimizer state that differ between ranks are rank 0's after fit has started."""
    learn = make_learner(opt_func=torch.optim.AdamW)
    with learn.no_logging():
        with learn.distrib_ctx():
            learn.fit(1)
        state = next(iter(learn.opt.state.values()))
        state["exp_avg"] += world.rank()
        with torch.no_grad():
            learn.model[0].weight += world.rank()
        with learn.distrib_ctx():
            learn.fit(1)
    assert weights_agree(learn)
    assert all(same(t) for s in learn.opt.state.values() for t in s.values())
    with learn.distrib_ctx(), raises(ValueError, "differs between ranks in its epochs (rank 0: 1, rank 1: 2"):
        learn.fit(1 + world.rank())
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1)


def check_batch_norm():
    """No rank is left with a single sample; buffers end alike; one warning on the CPU; nothing stays converted."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for fits in (2, 1):
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
            learn = make_learner(model, n=4 * N + 3, bs=4)
            with learn.distrib_ctx(split_batches=True), learn.no_logging():
                for _ in range(fits):
                    learn.fit(1)
            assert type(model[1]) is nn.BatchNorm1d
            assert weights_agree(learn)
    told = [str(w.message) for w in caught if "sync_bn" in str(w.message)]
    assert len(told) == (1 if world.is_main() else 0), told  # once a process


def check_a_lone_last_sample():
    """A step of one sample over all ranks is found before training; one that has company on a rank is none."""
    for n, split, lone in (
        (4 * N + 1, False, True), (8 * N + 5, False, False), (9, True, True), (4 * N + 2, False, False)
    ):  # fmt: skip
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        learn = make_learner(model, n=n, bs=4)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        # A rank that has not come as far leaves with another's error.
        refused = raises((ValueError, PeerError), "its last batch has 1 of its") if lone else contextlib.nullcontext()
        with learn.distrib_ctx(split_batches=split, sync_bn=False), learn.no_logging(), refused:
            learn.fit(1)
        if world.is_main():  # a rank without data may have had its forward pass
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) == lone


class OwnTokens(nn.Module):
    """Makes its own loss over words, of which 0 is padding, or -100 where there is any."""

    def __init__(self):
        super().__init__()
        self.body, self.more = nn.Embedding(9, 9), nn.Parameter(torch.zeros(9))

    def forward(self, ids, labels):
        logits = self.body(ids) + self.more
        ignored = -100 if (labels < 0).any() else 0
        return {"logits": logits, "loss": F.cross_entropy(logits.mT, labels, ignore_index=ignored)}


def check_a_models_own_loss():
    """What one rank's batch shows of it holds on all ranks, and one of them says what is not known."""
    for at, padding, ranks in ((0, 0, [0]), (1, 0, [N - 1]), (0, -100, []), (0, None, [])):
        torch.manual_seed(3)
        words, counts = torch.randint(1, 9, (8 * N + 1, 5)), []
        if padding is not None:
            words[4 * N * (at + 1) - 4 : 4 * N * (at + 1), 2:] = padding  # in one batch of the last rank
        dls = DataLoaders(DataLoader([{"ids": row.clamp(min=0), "labels": row} for row in words], 4), device="cpu")
        model = OwnTokens()
        if padding is None:
            nn.init.zeros_(model.body.weight)  # each mean is log(9) at first
        count = Callback(after_loss=lambda cb, seen=counts: seen.append(int(cb._loss_count)))
        # The last batch has a sample for rank 0 alone. To wrap anew, and so to begin anew, leaves the ranks together.
        thaw = Callback(before_epoch=lambda cb: unwrap(cb.model).body.requires_grad_(cb.epoch > 0))
        world._warned.clear()
        learn = Learner(dls, model, cbs=[count, thaw])
        with warnings.catch_warnings(record=True) as caught, learn.distrib_ctx(timeout=60), learn.no_logging():
            warnings.simplefilter("always")
            learn.fit(2)
        told = [str(w.message) for w in caught if "it is not known what that averages over" in str(w.message)]
        assert len(told) == (world.rank() in ranks), (at, padding, told)
        left_out = 12 if padding == -100 and world.rank() == N - 1 else 4 if padding is None else 0
        assert counts[:2] == [20 - left_out, 20], counts


def check_modes():
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


def check_random_streams_of_evaluation():
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


def check_middle_of_fit():
    """validate and get_preds from a callback in training: right, and without a trace."""
    found = []

    class Inner(Callback):
        def after_pred(self):
            if self.training and self.train_iter == 1:
                before = (self.dl, self.batch, self.iter, self.training, self._sharded, self.model)
                found.append((self.learn.validate(), self.learn.get_preds()[0].sum().item()))
                after = (self.dl, self.batch, self.iter, self.training, self._sharded, self.model)
                assert all(a is b for a, b in zip(before, after, strict=True))

    runs = []
    for cbs in ([], [Inner()]):
        learn = make_learner(cbs=cbs)
        with learn.distrib_ctx(), learn.no_logging():
            learn.fit(2)
        runs.append((learn.recorder.values, learn.recorder.losses))
    assert runs[0] == runs[1]
    assert len(found) == 1
    assert world.same_everywhere(found)


def check_predictions():
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
    assert (part[0] is None) == (not world.is_main())


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.d = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.d(self.g(x))


def check_options():
    with raises(ValueError, "python -m learnerkit.launch --nproc 2"):
        make_learner().distrib_ctx(nproc=2)
    with raises(TypeError, "did you mean 'bucket_cap_mb'"):
        DistributedCallback(bucket_cap_mbs=3)
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
    assert any("each train a whole copy" in str(w.message) for w in caught) == world.is_main()
    learn = make_learner()
    learn.to_distributed().detach_distributed()
    assert not any(isinstance(cb, DistributedCallback) for cb in learn.cbs)
    learn.dls.loaders[0] = DataLoader(learn.dls.train_ds, batch_size=4, drop_last=True, shuffle=True)
    with learn.distrib_ctx(gradient_as_bucket_view=True), learn.no_logging():
        learn.fit_one_cycle(2, 0.1)
    assert weights_agree(learn)


def check_cleanup_is_silent():
    class Talks(Callback):
        def cleanup_fit(self):
            world.barrier()

    learn = make_learner(cbs=Talks())
    with learn.distrib_ctx(), learn.no_logging(), raises(RuntimeError, "Talks.cleanup_fit called world.barrier"):
        learn.fit(1)
    learn.remove_cb(Talks)
    with learn.distrib_ctx(), learn.no_logging():
        learn.fit(1)


def main(rank=None, n=None):
    run(all_checks(globals()))


if __name__ == "__main__":
    warnings.simplefilter("error")
    assert N > 1
    assert not dist.is_initialized()
    main()
    assert dist.is_initialized()
    leave()
