"""Models that are too large to be whole: made, trained, read and written by ranks that have their rows alone."""

import io
import re
import warnings
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import (
    EMA,
    ActivationCheckpointing,
    Callback,
    CheckpointCallback,
    DataLoaders,
    GradientClip,
    Learner,
    PeerError,
    mae,
    set_seed,
    world,
)
from learnerkit.checkpoints import storage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
on_ranks = pytest.mark.ranks(2, slow=[3])
slow_on_ranks = pytest.mark.ranks(slow=[2], soak=[3])

RANK, N = world.rank(), world.world_size()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(17, 29), nn.Linear(29, 17)

    def forward(self, x):
        return x + self.b(self.a(x).tanh())


class Net(nn.Module):
    """Sizes that no number of ranks divides, tied weights, and a weight that is drawn once more at the end."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(13, 17), nn.ModuleList(Block() for _ in range(3))
        self.again, self.last = nn.Linear(17, 13), nn.Linear(13, 5)
        self.twin = nn.Linear(17, 13)
        self.twin.weight = self.again.weight
        self.scale = nn.Parameter(torch.ones(()))
        for block in self.blocks:
            nn.init.normal_(block.a.weight, std=0.2)
        self.double()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.again(x) + self.twin(x).tanh()) * self.scale


def data(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(*(torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (13, 5)))


def learner(cbs=None, model=Net, seed=1, **kwargs):
    set_seed(seed)
    dls = DataLoaders.from_datasets(data(37, 0), data(11, 1), bs=8)
    made = (lambda: model()) if model is Net else model
    return Learner(dls, made, nn.MSELoss(), metrics=mae, cbs=cbs, **kwargs)


def sharded(learn):
    return learn.distrib_ctx(shard=True, split_batches=True, timeout=60)


def saved(learn, name):
    """The weights that a learner saves, on every rank."""
    learn.save(Path(name).absolute())
    world.barrier()
    return load_file(name)


def weights_alone(steps, **kwargs):
    """The weights of a run in this process alone."""
    with world.alone():
        learn = learner(**kwargs)
        steps(learn)
    return learn.model.state_dict(), learn


def close(found, expected):
    """The same weights; a file has tied ones once."""
    assert found.keys() == expected.keys() - {"twin.weight"}
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-9, atol=1e-11)


def fits(learn):
    learn.fit_one_cycle(2, 1e-2)
    learn.fit(1, 1e-3)


@on_ranks
def test_a_model_that_a_function_makes_stays_divided_and_equals_one_process():
    learn = learner([EMA(0.9), GradientClip(0.5)])
    with sharded(learn):
        first = learn.validate()
        assert learn.shards.stays
        fits(learn)
        values, predictions = learn.validate(), learn.get_preds()[0]
        found = saved(learn, "net.safetensors")
    assert learn.shards is not None
    mine = sum(p.to_local().nbytes for p in learn.model.parameters() if p.ndim)
    whole = sum(p.numel() * p.itemsize for p in learn.model.parameters())
    rows = max(len(p) if p.ndim else 0 for p in learn.model.parameters())
    assert mine <= whole / N * (1 + N / rows), "bytes of a rank"
    expected, alone = weights_alone(lambda one: (one.validate(), fits(one)), cbs=[EMA(0.9), GradientClip(0.5)])
    close(found, expected)
    with world.alone():
        torch.testing.assert_close(values, alone.validate(), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(predictions, alone.get_preds()[0], rtol=1e-9, atol=1e-11)
        assert first == pytest.approx(learner().validate(), rel=1e-9)


@slow_on_ranks
def test_what_needs_a_whole_model_says_so():
    learn = learner()
    with sharded(learn):
        learn.fit(1)
        for call in (lambda: learn.predict(torch.zeros(13).double()), learn.summary, lambda: learn.export("net.pt2")):
            with pytest.raises(RuntimeError, match=rf"needs a whole model, and this one is divided among {N} ranks"):
                call()
        learn.export(Path("exported.safetensors").absolute())
        world.barrier()
        exported, found = load_file("exported.safetensors"), saved(learn, "net.safetensors")
        assert exported.keys() == found.keys()
        assert all(torch.equal(exported[name], found[name]) for name in found)
    for call in (lambda: learn.fit(1), learn.validate):
        with pytest.raises(RuntimeError, match="call it inside `with learn.distrib_ctx"):
            call()


@slow_on_ranks
def test_trials_leave_shards_as_they_were():
    learn = learner()
    with sharded(learn):
        learn.fit(1)
        before = saved(learn, "before.safetensors")
        learn.lr_find(num_it=12, show_plot=False)
        assert learn.check()
        learn.scaling_report(4, forecast=False, show=False)
        after = saved(learn, "after.safetensors")
        assert all(torch.equal(before[name], after[name]) for name in before)
        learn.add_cb(Raises("after_backward"))
        with pytest.raises((ValueError, PeerError)):
            learn.lr_find(num_it=12, show_plot=False)


class Raises(Callback):
    """Raises an error once, on the last rank."""

    def __init__(self, event):
        super().__init__(order=50, **{event: lambda cb: cb.strike()})
        self.done = False

    def strike(self):
        if RANK == N - 1 and not self.done and self.learn.train_iter >= 2:
            self.done = True
            raise ValueError("on purpose")


@slow_on_ranks
@pytest.mark.parametrize("event", ["before_batch", "after_loss", "before_validate"])
def test_after_an_error_the_next_fit_goes_on_with_the_shards(event):
    learn = learner()
    with sharded(learn):
        with pytest.raises((ValueError, PeerError), match="on purpose"):
            learn.fit(2, 1e-2, cbs=Raises(event))
        assert learn.shards.failed
        learn.fit(1, 1e-2)
        found = saved(learn, "after.safetensors")
        assert not learn.shards.failed
    taken = {"before_batch": 2, "after_loss": 2, "before_validate": 5}[event]

    def steps(alone):
        alone.fit(None, 1e-2, n_steps=taken)
        alone.fit(1, 1e-2)

    if event == "before_validate":  # else the second epoch has another order in a fit of fewer steps
        close(found, weights_alone(steps)[0])


@slow_on_ranks
def test_weights_come_from_files_by_the_rows_of_a_rank():
    whole = learner()
    with world.alone():
        source = Net()
        torch.manual_seed(9)
        for p in source.parameters():
            nn.init.normal_(p, std=0.1) if p.ndim else None
        if RANK == 0:
            Learner(whole.dls, source, nn.MSELoss()).save(Path("given.safetensors").absolute())
    world.barrier()
    with torch.device("meta"):
        meta = Net()
    found = {}
    for kind, model in (("function", Net), ("meta", meta), ("whole", Net())):
        learn = learner(model=model)
        learn.load(Path("given.safetensors").absolute(), with_opt=False)
        set_seed(4)
        with sharded(learn):
            learn.fit(1, 1e-2)
            found[kind] = saved(learn, f"{kind}.safetensors")

    def steps(alone):
        alone.load(Path("given.safetensors").absolute(), with_opt=False)
        set_seed(4)
        alone.fit(1, 1e-2)

    expected, _ = weights_alone(steps)
    for name in found:
        close(found[name], expected)


@slow_on_ranks
def test_ranks_share_the_writing_of_a_checkpoint():
    path = Path("run").absolute()
    learn = learner([CheckpointCallback(path)])
    with sharded(learn), patch.object(storage, "_SHARED_BYTES", 64):
        learn.fit(1, 1e-2)
        found = saved(learn, "net.safetensors")
    (folder,) = [each for each in path.iterdir() if each.is_dir() and each.name != "ends"]
    names = sorted(each.name for each in folder.glob("model*"))
    assert names == [*(f"model-{i + 1:05d}-of-{N:05d}.safetensors" for i in range(N)), "model.safetensors.index.json"]
    sizes = [(folder / name).stat().st_size for name in names[:N]]
    assert max(sizes) < 2 * sum(sizes) / N
    with world.alone():
        other = learner(model=Net())
        other.load(folder, with_opt=False)
        close(found, other.model.state_dict())
    learn.checkpoint.to_dcp(Path("dcp").absolute())
    world.barrier()
    if RANK == 0:
        from torch.distributed import checkpoint as dcp

        model = Net()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id="dcp", no_dist=True)
        close(found, state["model"])


@slow_on_ranks
@pytest.mark.parametrize("sync", [True, False])
def test_sums_of_several_batches(sync):
    from learnerkit import GradientAccumulation

    learn = learner(GradientAccumulation(n_batches=3))
    with learn.distrib_ctx(shard=True, split_batches=True, sync=sync):
        fits(learn)
        found = saved(learn, "net.safetensors")
    close(found, weights_alone(fits, cbs=GradientAccumulation(n_batches=3))[0])


@slow_on_ranks
def test_recomputed_activations_of_shards_change_nothing():
    learn = learner([ActivationCheckpointing()])
    with sharded(learn):
        fits(learn)
        found = saved(learn, "net.safetensors")
    close(found, weights_alone(fits)[0])


@slow_on_ranks
def test_a_rank_that_saves_alone_is_told_who_has_not_come():
    learn = learner()
    with sharded(learn), patch.object(world, "meet", partial(world.meet, timeout=2)):
        learn.fit(1)
        if RANK == 0:
            with pytest.raises(PeerError, match="waited 2 s for rank"):
                learn.save("net")
        world.barrier()


@slow_on_ranks
def test_check_tells_the_bytes_of_a_rank():
    learn = learner()
    with sharded(learn), redirect_stdout(io.StringIO()) as printed:
        assert learn.check()
    if RANK == 0:
        text = " ".join(printed.getvalue().split())
        assert re.search(rf"on this rank, of 28.5 KB, 28.5 KB, 57\S* KB that are divided among {N} ranks", text), text


@slow_on_ranks
def test_the_report_has_the_collectives_of_shards():
    learn = learner()
    with sharded(learn), warnings.catch_warnings(action="ignore"):
        report = learn.scaling_report(4, show=False)
    assert {"all-gather", "reduce-scatter"} <= report.parts.keys()
    assert all(seconds > 0 for seconds in report.parts["all-gather"])
    assert "network" not in report.without
    assert any("divided among the ranks" in note for note in report.notes)
