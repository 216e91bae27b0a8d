"""ActivationCheckpointing: the numbers are those without it, less is kept, and nothing of it stays on the model."""

import copy
import pickle

import pytest
import torch
from helpers import make_data, make_dls, make_learner, raises, raising, read_report, same_weights
from torch import nn
from torch.utils.data import DataLoader

from learnerkit import (
    EMA,
    ActivationCheckpointing,
    ActivationStats,
    Callback,
    Compile,
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
)


class Block(nn.Module):
    """A block whose forward pass counts its calls; subclasses say what is in it."""

    def __init__(self):
        super().__init__()
        self.calls, self.inner, self.drop = [], nn.Linear(4, 4), nn.Dropout(0.3)

    def forward(self, x):
        self.calls.append(self.training)
        return x + self.change(x)

    def change(self, x):
        return self.drop(self.inner(x).tanh())


class Attention(Block):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def change(self, x):
        h = self.inner(x)[:, None] * torch.arange(3.0)[:, None]
        return self.drop(self.attention(h, h, h)[0].mean(1))


class Normed(Block):
    """With statistics that each forward pass changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def change(self, x):
        return self.drop(self.norm(self.inner(x)).relu())


class Stateful(Block):
    """With a buffer, and attributes, that a forward pass uses before it changes them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.count, self.last = 0, torch.zeros(4)

    def change(self, x):
        h = self.inner(x) * self.scale.clone() + self.last / (1 + self.count)
        self.scale.mul_(1.1).add_(h.detach().mean(0))
        self.count, self.last = self.count + 1, h.detach().mean(0)
        return h.tanh() * h.sigmoid()


class Named(Block):
    """Takes keywords, which functions around its forward have too, and a mapping, and returns a tuple."""

    def forward(self, x, *, debug, more, module, forward):
        self.calls.append(self.training)
        return x + self.change(x) * debug * forward + module.sin(), {"more": more["more"].sin() + x.mean()}


class Dense(Block):
    """Takes a list, to which the model then adds what it returns, and itself too."""

    def forward(self, found):
        x = torch.stack(found).mean(0)
        found.append(x.sin())
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, kind, n=3):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([kind() for _ in range(n)]), nn.Linear(4, 1)

    def forward(self, x):
        more, found = {"more": x.mean()}, [x]
        for block in self.blocks:
            if isinstance(block, Named):
                x, more = block(x, debug=x.tanh(), more=more, module=x, forward=2.0)
            elif isinstance(block, Dense):
                x = block(found)
                found.append(x)
            else:
                x = block(x)
        return self.head(x) + 0.01 * more["more"]


def net(kind, frozen=0):
    torch.manual_seed(3)
    model = Net(kind)
    for block in model.blocks[:frozen]:
        block.requires_grad_(False)
    return model


def learner(model, *cbs):
    torch.manual_seed(4)
    return make_learner(make_dls(20, 6, 4), model, lr=0.01, cbs=[*cbs])


def fitted(model, *cbs, n=2):
    learn = learner(model, *cbs)
    learn.fit(n)
    assert torch.tensor(learn.recorder.values).isfinite().all()
    return learn


CASES = {
    "dropout": (Block, 0, list),
    "attention with dropout": (Attention, 0, list),
    "BatchNorm": (Normed, 0, list),
    "buffers and attributes": (Stateful, 0, list),
    "keywords, a mapping and a tuple": (Named, 0, list),
    "a list that grows": (Dense, 0, list),
    "a frozen first block": (Normed, 1, list),
    "accumulation": (Normed, 0, lambda: [GradientAccumulation(n_batches=3), GradientClip(0.1)]),
    "autocast": (Attention, 0, lambda: [MixedPrecision("bf16")]),
    "an average of the weights": (Normed, 0, lambda: [EMA(0.9)]),
}


@pytest.mark.parametrize("name", CASES)
def test_all_numbers_are_those_without_it(name):
    kind, frozen, make = CASES[name]
    plain, drawn = fitted(net(kind, frozen), *make()), torch.rand(3)
    one = fitted(net(kind, frozen), *make(), ActivationCheckpointing())
    assert same_weights(plain.model, one.model)
    assert plain.recorder.values == one.recorder.values
    assert torch.equal(torch.rand(3), drawn)
    for with_it, without in list(zip(one.model.blocks, plain.model.blocks, strict=True))[frozen:]:
        assert with_it.calls.count(True) == 2 * without.calls.count(True)
        assert with_it.calls.count(False) == without.calls.count(False)
        if kind is Stateful:
            assert (with_it.count, with_it.last.tolist()) == (without.count, without.last.tolist())


def test_batch_norm_counts_each_batch_once():
    learn = fitted(net(Normed), ActivationCheckpointing())
    assert {int(block.norm.num_batches_tracked) for block in learn.model.blocks} == {10}


def test_a_graph_may_be_used_twice():
    def gradients(model):
        torch.manual_seed(5)
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters()]

    plain, model = net(Stateful), net(Stateful)
    with ActivationCheckpointing().recomputed(model):
        found = gradients(model)
    assert all(map(torch.equal, found, gradients(plain)))
    assert same_weights(plain, model)


def test_units_inside_each_other_change_no_number():
    plain, one = fitted(net(Normed)), fitted(net(Normed), ActivationCheckpointing([Normed, "blocks.*.norm", "head"]))
    assert same_weights(plain.model, one.model)
    assert plain.recorder.values == one.recorder.values


def test_named_modules_alone_are_computed_again():
    for modules in ("blocks.1", ["blocks.1"], (name for name in ["blocks.1"])):
        learn = fitted(net(Block), ActivationCheckpointing(modules), n=1)
        learn.fit(1)
        assert [block.calls.count(True) for block in learn.model.blocks] == [10, 20, 10]
    model = Net(lambda: Block())
    model.blocks[2] = Normed()
    learn = fitted(model, ActivationCheckpointing(Normed), n=1)
    assert [block.calls.count(True) for block in learn.model.blocks] == [5, 5, 10]
    learn = fitted(net(Block), ActivationCheckpointing([]), n=1)
    assert [block.calls.count(True) for block in learn.model.blocks] == [5, 5, 5]


def test_wrong_names_are_told():
    learn = learner(net(Block), ActivationCheckpointing("block.*"))
    with raises(ValueError, "Net has no module 'block.*', which modules= names"):
        learn.fit(1)
    with raises(ValueError, "say by modules=[...]"):
        make_learner(model=nn.Linear(4, 1), cbs=ActivationCheckpointing()).fit(1)
    learn.validate()


def test_a_block_that_changes_its_inputs_is_told():
    blocks = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(3)]
    learn = learner(nn.Sequential(*blocks, nn.Linear(4, 1)), ActivationCheckpointing())
    with raises(RuntimeError, "modified by an inplace operation", "write inplace=False in it"):
        learn.fit(1)
    learn.remove_cb(ActivationCheckpointing)
    learn.fit(1)


def test_a_block_that_computes_something_else_is_told():
    class Cached(Block):
        def forward(self, x):
            self.calls.append(True)
            h = self.inner(x)
            return h.sin() * h.cos() if len(self.calls) == 1 else h

    model = Net(Cached, 2)
    with raises(RuntimeError, "torch.utils.checkpoint: ", "model.config.use_cache = False"):
        fitted(model, ActivationCheckpointing())


def test_a_block_that_fails_only_the_second_time_is_told():
    class Grows(Block):
        def forward(self, x):
            self.calls.append(x.detach())
            return self.inner(x * torch.cat(self.calls)[:, :1])

    with raises(RuntimeError, "The size of tensor a", "model.config.use_cache = False", "in blocks.0 (Grows)"):
        fitted(Net(Grows, 1), ActivationCheckpointing("blocks.*"))


# The model


def test_in_a_fit_the_model_is_what_it_was_and_copies_of_it_are_their_own():
    model, seen = net(Normed), []
    names, classes = list(model.state_dict()), [type(m) for m in model.modules()]

    def look(cb):
        if not cb.training:
            return
        seen.append(list(cb.model.state_dict()) == names and [type(m) for m in cb.model.modules()] == classes)
        for other in (copy.deepcopy(cb.model), pickle.loads(pickle.dumps(cb.model))):
            before = {name: value.clone() for name, value in cb.model.state_dict().items()}
            with torch.no_grad():
                for p in other.parameters():
                    p.zero_()
            other.train()(torch.ones(3, 4)).sum().backward()
            seen.append(same_weights(before, cb.model.state_dict()))
            seen.append(other.head.bias.grad.item() == 3 and other(torch.ones(3, 4)).max().item() < 0.011)

    learner(model, ActivationCheckpointing(), Callback(after_pred=look)).fit(1)
    assert set(seen) == {True}


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_nothing_stays_on_the_model(error):
    def forward(x):
        return x * 2

    model = net(Normed)
    model.blocks[1].forward = forward
    before = [dict(vars(m)) for m in model.modules()]
    cbs = [ActivationCheckpointing(), *([] if error is None else [raising("after_pred", error)])]
    if error is None:
        fitted(model, *cbs)
    else:
        with pytest.raises(error):
            fitted(model, *cbs)
    after = [dict(vars(m)) for m in model.modules()]
    assert [x.keys() for x in before] == [x.keys() for x in after]
    assert model.blocks[1].forward is forward
    assert pickle.dumps(model.blocks[0])


def test_evaluation_leaves_the_model_alone():
    learn, found = learner(net(Block), ActivationCheckpointing()), []
    look = Callback(after_pred=lambda cb: found.append("forward" in vars(cb.model.blocks[0])))
    learn.validate(cbs=look)
    learn.get_preds(cbs=look)
    assert set(found) == {False}
    learn.fit(1, cbs=look)
    assert True in found


def test_hooks_that_record_see_each_batch_once():
    one, plain = (fitted(net(Block), ActivationStats(), *cbs) for cbs in ((ActivationCheckpointing(),), ()))
    assert one.activation_stats.steps == plain.activation_stats.steps
    assert one.activation_stats.layers == plain.activation_stats.layers


def test_the_rate_finder_keeps_less_too():
    calls = []
    look = Callback(after_backward=lambda cb: calls.append(len(cb.model.blocks[0].calls)))
    learner(net(Block), ActivationCheckpointing(), look).lr_find(num_it=10, show_plot=False)
    assert calls[:3] == [2, 4, 6]


def test_replicas_of_data_parallel_are_left_as_they_are():
    model = net(Block)

    def wrap(cb):
        cb.learn.model = nn.DataParallel(model)

    def unwrap(cb):
        cb.learn.model = model

    learn = learner(model, Callback(before_fit=wrap, cleanup_fit=unwrap), ActivationCheckpointing())
    with pytest.warns(
        UserWarning, match="ActivationCheckpointing leaves the model as it is: DataParallel makes copies"
    ):
        learn.fit(1)
    assert model.blocks[0].calls.count(True) == 5


class Plain(Normed):
    """Without what a compiled graph cannot have."""

    def forward(self, x):
        return x + self.norm(self.inner(x)).relu()


@pytest.mark.soak
def test_a_compiled_model_computes_the_same():
    plain = fitted(net(Plain))
    compiled = fitted(net(Plain), Compile(backend="aot_eager"), ActivationCheckpointing())
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(compiled.model.state_dict()[name], value)
    assert {int(block.norm.num_batches_tracked) for block in compiled.model.blocks} == {10}


@pytest.mark.slow
def test_later_fits_reuse_compiled_code():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    learn, counts = learner(net(Plain), Compile(backend=backend), ActivationCheckpointing()), []
    learn.model.blocks[0] = learn.model.blocks[1] = learn.model.blocks[2] = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for _ in range(3):
        learn.fit(1)
        counts.append(len(graphs))
    assert counts[0] == counts[2] > 0
    fitted(learn.model, ActivationCheckpointing(), n=1)  # another callback, with which the first one does not interfere
    learn.model.blocks[0].forward = lambda x: x
    learn.fit(1)
    assert len(graphs) > counts[2]


# What it saves


def wide():
    torch.manual_seed(3)
    block = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*block, nn.BatchNorm1d(32), nn.Linear(32, 1))


def wide_learner(*cbs):
    data = make_data(64, 32)
    dls = DataLoaders(DataLoader(data, 32), DataLoader(data, 32), device="cpu")
    return Learner(dls, wide(), nn.MSELoss(), cbs=[*cbs])


class Kept(Callback):
    """Collects the tensors that the first training batch keeps for its backward pass, from outside of the model."""

    def __init__(self):
        super().__init__()
        self.tensors, self._hooks = [], None

    def before_batch(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.collect, lambda t: t)
        self._hooks.__enter__()

    def collect(self, t):
        # torch 2.10 saves an empty tensor with the inputs of each unit that is recomputed.
        if self.training and self.train_iter == 0 and t.numel():
            self.tensors.append(t)
        return t

    def after_pred(self):
        self._hooks.__exit__()

    def places(self):
        return [t.data_ptr() for t in self.tensors]

    def shapes(self):
        return [t.shape for t in self.tensors]


def test_of_each_block_only_its_input_is_kept_for_the_backward_pass():
    every, kept, inputs = Kept(), Kept(), []
    wide_learner(every).fit(1)
    learn = wide_learner(kept, ActivationCheckpointing())
    for block in learn.model[:4]:
        block.register_forward_pre_hook(lambda block, args: inputs.append(args[0].detach()))
    learn.fit(1)
    assert kept.places()[:4] == [x.data_ptr() for x in inputs[:4]]
    # The norm and the last layer keep what they keep anyway; the blocks would keep 23 tensors more.
    assert kept.shapes()[4:] == every.shapes()[23:]
    assert len(every.tensors) == 31


def test_the_check_says_what_it_saves_and_takes(capsys):
    learn, before = wide_learner(ActivationCheckpointing()), wide()
    assert learn.check()
    report, verdict = read_report(capsys.readouterr().out)
    # The inputs of 4 blocks and of the norm and the last layer, each 4 KB, and two times 32 statistics; else two
    # results of Tanh in each block instead of its input.
    expected = "24.2 KB are kept for the backward pass instead of 40.2 KB; it takes"
    assert report["activations"][0] == "ok"
    assert report["activations"][1].startswith(expected), report
    assert report["activations"][1].endswith("% more time than to keep them")
    assert verdict == "all is well"
    assert same_weights(learn.model, before)
    assert all(p.grad is None for p in learn.model.parameters())
    assert not any("forward" in vars(m) for m in learn.model.modules())
    wide_learner().check()
    assert "activations" not in read_report(capsys.readouterr().out)[0]


def test_the_check_measures_the_batch_that_the_model_gets(capsys):
    def convert(cb):
        cb.learn.xb = (cb.xb[0].float(),)

    learn = wide_learner(ActivationCheckpointing(), Callback(before_batch=convert))
    learn.dls.loaders[:] = [[(x.double(), y) for x, y in dl] for dl in learn.dls.loaders]
    assert learn.check()
    assert "24.2 KB are kept" in capsys.readouterr().out


def test_the_check_says_where_all_activations_are_too_many(capsys, monkeypatch):
    model = wide()

    def fail(module, inputs):
        if torch.is_grad_enabled() and "forward" not in vars(model[0]):
            raise torch.OutOfMemoryError

    model.register_forward_pre_hook(fail)
    learn = wide_learner(ActivationCheckpointing())
    learn.model = model
    assert learn.check()
    report, _ = read_report(capsys.readouterr().out)
    assert report["activations"][1].endswith("kept for the backward pass; all of them are more than the device holds")
