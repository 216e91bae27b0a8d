"""The summary of a model: layers, shapes, parameters, memory."""

import pytest
import torch
from helpers import make_classes, make_data, make_dls, make_learner
from torch import nn
from torch.utils.data import DataLoader

from learnerkit import DataLoaders, Learner


class Everything(nn.Module):
    """Two inputs, a shared layer, tied weights, weights of its own, a layer that is not called, attention, a tuple."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.twice = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 2)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.twice.weight

    def forward(self, a, b):
        type(self).trained = self.training  # attributes of the module itself are put back
        x = self.twice(self.twice(a) * self.scale) + b
        x = x + self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
        return self.head(self.dropout(self.norm(x)))


class Mapped(nn.Module):
    """Takes keywords, and returns a mapping."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {"logits": self.body(x), "hidden": (x, x)}


def everything():
    data = [(row[0], row[0] * 2, row[1]) for row in make_data(8, n_out=4)]
    return Learner(DataLoaders(DataLoader(data, 4), n_inp=2, device="cpu"), Everything(), nn.MSELoss())


def test_the_layers_are_those_that_ran_with_each_parameter_once():
    learn = everything()
    learn.model.norm.requires_grad_(False)
    found = learn.summary()
    assert not learn.model.trained
    assert [(layer.name, layer.output, layer.calls) for layer in found.layers] == [
        ("", "4 x 4", 1), ("twice", "4 x 4", 2), ("unused", "", 0), ("attention", "4 x 1 x 4, 4 x 1 x 1", 1),
        ("attention.out_proj", "", 0), ("norm", "4 x 4", 1), ("dropout", "4 x 4", 1), ("head", "4 x 4", 1),
    ]  # fmt: skip
    assert {layer.name: layer.trained for layer in found.layers} == {
        "": "yes", "twice": "yes", "unused": "yes", "attention": "yes", "attention.out_proj": "yes", "norm": "no",
        "dropout": "", "head": "shared",
    }  # fmt: skip
    parameters = list(learn.model.parameters())
    assert sum(layer.parameters for layer in found.layers) == found.total == sum(p.numel() for p in parameters)
    assert found.trainable == found.total - 8
    assert found.weights == 4 * (found.total + 8) + 8  # with the statistics of BatchNorm, and its int64 count
    assert (found.gradients, found.optimizer) == (4 * found.trainable, "AdamW")
    assert 2 * found.gradients <= found.state <= 2.1 * found.gradients + 100
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    assert all(
        word in text for word in ("(the model)", "Linear (x2)", "not called", f"{found.total:,}", "4 x 4, 4 x 4")
    )


def test_kept_activations_and_the_state_of_an_optimizer_that_has_run():
    model = nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 1))
    learn = make_learner(model=model, opt_func=torch.optim.Adam)
    found = learn.summary()
    assert found.kept == 4 * 4 * (4 + 100)  # the batch, and the output of tanh; both layers' weights are not counted
    learn.fit(1)
    assert learn.summary().state == found.state


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_sparse_buffers_and_scripted_parts_are_summed_up():
    body = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 1)))
    body.register_buffer("graph", torch.eye(3).to_sparse())
    found = Learner(DataLoaders(DataLoader(make_data(8), 4), device="cpu"), body, nn.MSELoss()).summary()
    assert found.total == 4 * 4 + 4 + 4 + 1
    assert found.weights == 4 * found.total + 3 * (4 + 2 * 8)  # a value of the buffer has two indices, of 8 bytes


@pytest.mark.parametrize("broken", [False, True])
def test_the_summary_leaves_the_model_as_it_was(broken):
    learn = make_learner(dls=make_dls(train=8))
    learn.dls = DataLoaders(DataLoader(make_data(8), 4, shuffle=True, num_workers=2), device="cpu")
    learn.model.append(nn.BatchNorm1d(1))
    learn.model[2].eval()
    if broken:
        learn.model.append(nn.Linear(7, 7))
    before = {name: t.clone() for name, t in learn.model.state_dict().items()}
    state, modes = torch.get_rng_state(), [m.training for m in learn.model.modules()]
    if broken:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            learn.summary()
    else:
        learn.summary()
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in learn.model.modules()] == modes
    assert all(torch.equal(t, learn.model.state_dict()[name]) for name, t in before.items())
    assert not any(m._forward_hooks for m in learn.model.modules())
    assert all(p.grad is None for p in learn.model.parameters())
    assert (learn.xb, learn.batch, learn.opt) == ((), None, None)


def test_mappings_lazy_layers_and_half_precision_are_summed_up():
    data = [{"x": x, "labels": y} for x, y in make_data(8)]
    learn = Learner(DataLoaders(DataLoader(data, 4), device="cpu"), Mapped())
    (layer,) = learn.summary().layers
    assert (layer.output, learn.summary().inputs) == ("4 x 1", "4 x 4, 4 x 1")
    lazy = make_learner(model=nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)), dls=make_dls(data=make_classes))
    full = lazy.summary()
    assert [layer.parameters for layer in full.layers] == [15, 4]
    assert lazy.to_bf16().summary().layers == full.layers
    once = make_learner(dls=DataLoaders(iter([]), device="cpu"))
    with pytest.raises(ValueError, match="can be read only once"):
        once.summary()
