"""Wrappers that look like the module inside them."""

import copy
import io

import pytest
import torch
from torch import nn

from learnerkit import unwrap
from learnerkit.parallel.transparent import wrapped


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.factor, self._kept = nn.Linear(2, 3), 2.0, None

    def forward(self, x):
        return self.body(x) * self.factor

    def score(self, x):
        return self(x).sum()


def test_attributes_and_methods_are_the_modules():
    model = Scorer()
    wrapper = wrapped(nn.DataParallel, model)
    assert isinstance(wrapper, nn.DataParallel)
    assert isinstance(wrapper, Scorer)
    assert not isinstance(wrapper, nn.Sequential)
    assert unwrap(wrapper) is model
    x = torch.ones(1, 2)
    assert torch.equal(wrapper.score(x), model.score(x))
    wrapper.factor = wrapper._kept = 3.0
    assert (model.factor, model._kept) == (3.0, 3.0)
    assert torch.equal(wrapper(x), model(x))
    wrapper.device_ids = [0]  # the wrapper's own
    assert not hasattr(model, "device_ids")
    del wrapper.factor
    assert not hasattr(model, "factor")
    with pytest.raises(AttributeError, match="'Scorer' object has no attribute 'scroe'"):
        wrapper.scroe(x)


def test_names_and_states_are_the_modules():
    model = Scorer()
    wrapper = wrapped(nn.DataParallel, model)
    assert list(wrapper.state_dict()) == list(model.state_dict())
    wrapper.load_state_dict({"body.weight": torch.ones(3, 2), "body.bias": torch.zeros(3)})
    assert model.body.weight.sum() == 6
    assert [name for name, _ in wrapper.named_parameters()] == ["body.weight", "body.bias"]
    assert list(wrapper.parameters())[0] is model.body.weight
    assert list(wrapper.children()) == [model.body]
    assert list(wrapper.modules()) == [model, model.body]
    assert wrapper.get_submodule("body") is model.body
    assert wrapper.eval() is wrapper
    assert (wrapper.training, model.training, model.body.training) == (False, False, False)
    assert wrapper.double() is wrapper
    assert model.body.weight.dtype is torch.float64
    calls = []
    wrapper.register_forward_hook(lambda *_: calls.append(1))
    wrapper(torch.ones(1, 2).double())
    assert calls == [1]


def test_items_are_the_modules_where_it_has_any():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    wrapper = wrapped(nn.DataParallel, model)
    assert len(wrapper) == 2
    assert wrapper[0] is model[0]
    assert list(wrapper) == list(model)
    wrapper[1] = nn.ReLU()
    assert type(model[1]) is nn.ReLU
    alone = wrapped(nn.DataParallel, Scorer())
    assert alone
    with pytest.raises(TypeError, match="has no len"):
        len(alone)


def test_a_copy_is_one_of_the_module():
    model = Scorer()
    wrapper = wrapped(nn.DataParallel, model)
    twin = copy.deepcopy(wrapper)
    assert type(twin) is Scorer
    assert twin.body.weight is not model.body.weight
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Scorer


def test_the_wrapper_is_named_after_torchs():
    class Own(nn.DataParallel):
        pass

    assert type(wrapped(Own, Scorer())).__name__ == "DataParallel"
