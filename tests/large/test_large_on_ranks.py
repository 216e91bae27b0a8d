"""Models that are too large to be whole: made, trained, read and written by ranks that have their rows alone."""

import gc
import io
import re
import warnings
import weakref
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from helpers import mostly_soak
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
    distributed,
    mae,
    push_to_hub,
    set_seed,
)
from learnerkit.checkpoints import storage
from learnerkit.distributed import PeerError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
on_ranks = pytest.mark.ranks(2, soak=[3])
slow_on_ranks, soak_on_ranks = pytest.mark.ranks(slow=[2], soak=[3]), pytest.mark.ranks(soak=[2, 3])

RANK, N = distributed.rank(), distributed.world_size()


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
    distributed.barrier()
    return load_file(name)


def weights_alone(steps, **kwargs):
    """The weights of a run in this process alone."""
    with distributed.alone():
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
    with distributed.alone():
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
        distributed.barrier()
        exported, found = load_file("exported.safetensors"), saved(learn, "net.safetensors")
        assert exported.keys() == found.keys()
        assert all(torch.equal(exported[name], found[name]) for name in found)
    for call in (lambda: learn.fit(1), learn.validate):
        with pytest.raises(RuntimeError, match="call it inside `with learn.distrib_ctx"):
            call()


@soak_on_ranks
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
@pytest.mark.parametrize("event", mostly_soak(["before_batch", "after_loss", "before_validate"], "after_loss"))
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


@soak_on_ranks
def test_weights_come_from_files_by_the_rows_of_a_rank():
    whole = learner()
    with distributed.alone():
        source = Net()
        torch.manual_seed(9)
        for p in source.parameters():
            nn.init.normal_(p, std=0.1) if p.ndim else None
        if RANK == 0:
            Learner(whole.dls, source, nn.MSELoss()).save(Path("given.safetensors").absolute())
    distributed.barrier()
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
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # in torch 2.10 itself
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
    with distributed.alone():
        other = learner(model=Net())
        other.load(folder, with_opt=False)
        close(found, other.model.state_dict())
    learn.checkpoint.to_dcp(Path("dcp").absolute())
    distributed.barrier()
    if RANK == 0:
        from torch.distributed import checkpoint as dcp

        model = Net()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id="dcp", no_dist=True)
        close(found, state["model"])


@slow_on_ranks
@pytest.mark.parametrize("sync", [True, False])
def test_sums_of_several_batches_are_those_of_one_process(sync):
    from learnerkit import GradientAccumulation

    learn = learner(GradientAccumulation(n_batches=3))
    with learn.distrib_ctx(shard=True, split_batches=True, sync=sync):
        fits(learn)
        found = saved(learn, "net.safetensors")
    close(found, weights_alone(fits, cbs=GradientAccumulation(n_batches=3))[0])


@soak_on_ranks
def test_recomputed_activations_of_shards_change_nothing():
    learn = learner([ActivationCheckpointing()])
    with sharded(learn):
        fits(learn)
        found = saved(learn, "net.safetensors")
    close(found, weights_alone(fits)[0])


@slow_on_ranks
def test_a_rank_that_saves_alone_is_told_who_has_not_come():
    learn = learner()
    with sharded(learn), patch.object(distributed, "meet", partial(distributed.meet, timeout=2)):
        learn.fit(1)
        if RANK == 0:
            with pytest.raises(PeerError, match="waited 2 s for rank"):
                learn.save("net")
        distributed.barrier()


@slow_on_ranks
def test_all_ranks_push_a_model_that_stays_divided():
    class Hub:
        def __init__(self, token):
            pass

        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, folder_path, **kwargs):
            pushed.update(load_file(Path(folder_path, "model.safetensors")))

    learn, pushed = learner(), {}
    with sharded(learn), patch("huggingface_hub.HfApi", Hub):
        learn.fit(1)
        push_to_hub(learn, "ann/net")
        found = saved(learn, "net.safetensors")
    assert pushed.keys() == (found.keys() if RANK == 0 else set())
    assert all(torch.equal(pushed[name], found[name]) for name in pushed)


@slow_on_ranks
def test_check_tells_the_bytes_of_a_rank():
    learn = learner()
    with sharded(learn), redirect_stdout(io.StringIO()) as printed:
        assert learn.check()
    if RANK == 0:
        text = " ".join(printed.getvalue().split())
        assert re.search(rf"on this rank, of 28.5 KB, 28.5 KB, 57\S* KB that are divided among {N} ranks", text), text
        assert re.search(r"a batch keeps \S+ KB for its backward pass", text), text


@soak_on_ranks
def test_the_report_has_the_collectives_of_shards():
    learn = learner()
    with sharded(learn), warnings.catch_warnings(action="ignore"):
        report = learn.scaling_report(4, show=False)
    assert {"all-gather", "reduce-scatter"} <= report.parts.keys()
    assert all(seconds > 0 for seconds in report.parts["all-gather"])
    assert "network" not in report.without
    assert any("divided among the ranks" in note for note in report.notes)


class Heads(Net):
    """Weights and biases of one row, of which some ranks have none."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(17, 1, dtype=torch.float64) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.again(x) + self.twin(x).tanh()) * self.scale + sum(head(x).tanh() for head in self.heads)


@soak_on_ranks
def test_the_state_of_parameters_of_one_row_is_saved():
    learn = learner(model=lambda: Heads())
    with sharded(learn):
        fits(learn)
        learn.save(Path("net.pth").absolute())
        distributed.barrier()
    found = torch.load("net.pth")["opt"]["state"]
    _, alone = weights_alone(fits, model=lambda: Heads())
    torch.testing.assert_close(found, alone.opt.state_dict()["state"], rtol=1e-9, atol=1e-11)


class Side(Net):
    """Has a part that every second batch leaves out."""

    def __init__(self):
        super().__init__()
        self.side, self.calls = nn.Linear(13, 5, dtype=torch.float64), 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x) + (self.side(x) if self.calls % 2 or not self.training else 0)


@pytest.mark.soak
@slow_on_ranks
@pytest.mark.parametrize("sync", mostly_soak([True, False], True))
def test_a_parameter_that_a_later_batch_of_a_step_leaves_out_keeps_its_gradient(sync):
    from learnerkit import GradientAccumulation

    def cbs():
        return GradientAccumulation(n_batches=2)

    learn = learner(cbs(), lambda: Side())
    with learn.distrib_ctx(shard=True, split_batches=True, sync=sync, find_unused_parameters=True):
        fits(learn)
        found = saved(learn, "net.safetensors")
    close(found, weights_alone(fits, cbs=cbs(), model=lambda: Side())[0])


class Loss(nn.Module):
    """Has parameters that no batch uses."""

    def __init__(self):
        super().__init__()
        self.weight, self.unused = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, pred, y):
        return (pred * self.weight - y).square().mean()


@pytest.mark.soak
@slow_on_ranks
def test_parameters_beside_the_model_that_no_rank_uses_stay():
    def made():
        learn = learner(opt_func=partial(torch.optim.AdamW, weight_decay=0.1))
        learn.loss_func = Loss().double()
        learn.create_opt()
        learn.opt.add_param_group({"params": [*learn.loss_func.parameters()]})
        return learn

    learn = made()
    with sharded(learn):
        fits(learn)
    with distributed.alone():
        alone = made()
        fits(alone)
    found, expected = learn.loss_func.state_dict(), alone.loss_func.state_dict()
    assert torch.equal(found["unused"], torch.ones(5).double())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


class Leaves(Net):
    """From the second batch on each rank leaves another block out; one parameter is in no loss."""

    def __init__(self):
        super().__init__()
        self.unused, self.calls = nn.Linear(2, 2, dtype=torch.float64), 0

    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = x if self.calls > 1 and i == RANK % 2 else block(x)
        return self.last(self.again(x) + self.twin(x).tanh()) * self.scale


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was chosen")
@slow_on_ranks
def test_ranks_that_leave_out_different_blocks_are_told():
    learn = learner(model=lambda: Leaves())
    # Blocks are of one size, so that what is gathered would be rows of both.
    with sharded(learn), pytest.raises((ValueError, PeerError), match="each must call the same"):
        learn.fit(1)


class Nested(Callback):
    """Validates once more, in an event of an epoch."""

    def __init__(self, event):
        super().__init__(order=50, **{event: lambda cb: cb.look()})
        self.found, self.inside = [], False

    def look(self):
        if not self.inside:
            self.inside = True
            self.found = self.learn.validate()
            self.inside = False


@slow_on_ranks
@pytest.mark.parametrize("event", mostly_soak(["before_validate", "after_validate", "before_step"], "before_validate"))
@pytest.mark.parametrize("reshard", [True, False])
def test_a_validation_inside_a_validation_does_not_end_it(event, reshard):
    set_seed(1)
    # Three batches, of which rank 0 has one more than the others.
    dls = DataLoaders.from_datasets(data(16 * N, 0), data(8 * (N + 1), 1), bs=8)
    learn = Learner(dls, lambda: Net(), nn.MSELoss(), metrics=mae, cbs=(nested := Nested(event)))
    with learn.distrib_ctx(shard=True, reshard_after_forward=reshard, timeout=60):
        learn.fit(1)
    assert len(nested.found) == 2
    if event != "before_step":
        assert nested.found == pytest.approx(learn.recorder.values[-1][1:], rel=1e-12)


class Scales(Callback):
    """Changes the weights before and after each validation."""

    order = 60

    @torch.no_grad()
    def before_validate(self):
        for p in self.model.parameters():
            p.mul_(1.1)

    @torch.no_grad()
    def after_validate(self):
        for p in self.model.parameters():
            p.mul_(0.9)


@pytest.mark.soak
@slow_on_ranks
@pytest.mark.parametrize("reshard", mostly_soak([True, False], True))
def test_weights_that_change_around_a_validation(reshard):
    learn = learner(Scales())
    with learn.distrib_ctx(shard=True, split_batches=True, reshard_after_forward=reshard):
        fits(learn)
        found = saved(learn, "net.safetensors")
    close(found, weights_alone(fits, cbs=Scales())[0])


@soak_on_ranks
def test_the_optimizers_of_earlier_fits_are_forgotten():
    learn, old = learner(), []
    with sharded(learn):
        for _ in range(3):
            learn.fit(1, 1e-2, reset_opt=True)
            old.append(weakref.ref(learn.opt))
    gc.collect()
    assert [each() is None for each in old] == [True, True, False]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(13, 17), nn.LSTM(17, 19), nn.Linear(19, 5)
        self.double()

    def forward(self, x):
        return self.last(self.rnn(self.first(x)[None])[0][0])


@slow_on_ranks
def test_a_recurrent_layer_has_its_own_weights_again():
    learn = learner(model=Recurrent())
    with sharded(learn):
        learn.fit(1)
    rnn = learn.model.rnn
    assert all(a is b for a, b in zip(rnn._flat_weights, rnn.parameters(), strict=True))
