"""Parameters whose memory is that of files."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from learnerkit import CheckpointError, DataLoaders, Learner, files
from learnerkit.files import fitted, read_mapped
from learnerkit.large.mapped import Mapped, check_values


class Tied(nn.Module):
    """Two layers with one weight, and a first weight that is drawn once more."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.second.weight = self.first.weight
        nn.init.normal_(self.first.weight, std=0.02)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        return self.head(self.second(self.first(x))) * self.scale - self.mean


def values(model):
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_that_is_made_in_a_file_has_the_values_of_any_other():
    torch.manual_seed(3)
    expected, state = values(Tied()), torch.get_rng_state()
    torch.manual_seed(3)
    mapped = Mapped()
    model = mapped.make(Tied)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.first.weight is model.second.weight
    for _ in range(2):
        assert same(values(model), expected)
        mapped.release()
    with torch.no_grad():
        model.head.weight.add_(1)
    mapped.release()  # what has been written stays
    assert torch.equal(model.head.weight, expected["head.weight"] + 1)


def test_its_memory_is_given_back():
    def resident():
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Rss")) / 1024

    mapped = Mapped()
    model = mapped.make(lambda: nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(8))))
    before = resident()
    assert model(torch.zeros(2000)).shape == (2000,)
    whole = resident() - before
    mapped.release()
    assert whole > 100, "megabytes: all of the weights have been read"
    assert resident() - before < whole / 4


def test_no_hook_stays_behind():
    def fails():
        raise KeyError("made nothing")

    with pytest.raises(KeyError):
        Mapped().make(fails)
    layer = nn.Linear(3, 3)
    address = layer.weight.data_ptr()
    nn.Sequential(layer)
    assert layer.weight.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("meta", [True, False])
def test_a_file_gives_values_and_ties_stay(tmp_path, dtype, meta):
    source = Tied()
    weights = {name: t.to(dtype) if t.ndim else t for name, t in values(source).items() if name != "second.weight"}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    mapped = Mapped()
    with torch.device("meta" if meta else "cpu"):
        model = Tied() if meta else mapped.make(Tied)
    model.mean = torch.zeros(3)  # a buffer is no parameter
    mapped.fill(model, fitted(read_mapped(tmp_path), model, strict=True).weights)
    assert model.first.weight is model.second.weight
    expected = {name: value.to(torch.float32) for name, value in weights.items()}
    assert same({name: t for name, t in values(model).items() if name != "second.weight"}, expected)
    check_values(model)


def test_a_directory_of_several_files_is_read_by_its_index(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=97, n_positions=16, n_embd=24, n_layer=3, n_head=2)
    source = transformers.GPT2LMHeadModel(config)
    source.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(files.weight_files(tmp_path)) > 2
    learn = Learner(DataLoaders([torch.zeros(2, 3)]), transformers.GPT2LMHeadModel(config))
    assert learn.load(tmp_path, with_opt=False) is learn
    assert same(values(learn.model), values(source))


def test_a_model_on_the_meta_device_needs_a_file(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    learn = Learner(DataLoaders([(x, y)]), model, nn.MSELoss())
    with pytest.raises(ValueError, match="the parameters weight, bias are on the meta device and have no values"):
        learn.fit(1)
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, tmp_path / "net.safetensors")
    learn.load(tmp_path / "net.safetensors", with_opt=False)
    learn.fit(1, 0.0)
    assert torch.equal(learn.model.weight, torch.ones(2, 3))
    assert learn.mapped is None


def test_a_buffer_without_values_is_named():
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(ValueError, match="the parameters scale, first.weight"):
        check_values(model)
    Mapped().fill(model, values(Tied()))
    with pytest.raises(ValueError, match="the buffers mean are on the meta device"):
        check_values(model)


@pytest.mark.parametrize("meta", [False, True])
def test_buffers_are_loaded_with_the_parameters(meta, tmp_path):
    expected = Tied()
    expected.mean.fill_(3)
    file = tmp_path / "net.safetensors"
    files.save_weights(expected.state_dict(), file)
    learn = Learner(DataLoaders([(torch.randn(4, 7), torch.randn(4, 3))]), Tied().to("meta") if meta else Tied())
    if not meta:
        learn.mapped = Mapped()
        learn.model = learn.mapped.make(Tied)
    learn.load(file)
    assert learn.mapped is not None
    assert same(values(learn.model), values(expected))


def test_a_function_makes_the_model_of_a_learner():
    data = DataLoaders([(torch.randn(4, 7), torch.randn(4, 3))])
    torch.manual_seed(5)
    expected = values(Tied())
    torch.manual_seed(5)
    learn = Learner(data, lambda: Tied(), nn.MSELoss())
    assert same(values(learn.model), expected)
    learn.fit(1)
    with pytest.raises(TypeError, match="pass an nn.Module"):
        Learner(data, lambda: 3, nn.MSELoss())


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_mapped(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_mapped(tmp_path)
