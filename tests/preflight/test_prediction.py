"""What a step needs of the memory is predicted: within 10 % of the live tensors of real steps, and without a trace."""

import copy
import gc
import random
import time
from functools import partial

import numpy as np
import pytest
import torch
from helpers import mostly_soak, same_weights, weights
from launching import in_time
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    EMA,
    ActivationCheckpointing,
    Callback,
    DataLoaders,
    GradientAccumulation,
    Learner,
    MixedPrecision,
    TabularData,
    TextData,
    tabular_learner,
    text_learner,
    unet_learner,
    vision_learner,
)
from learnerkit.inspection.undoing import held_tensors, move_to_device
from learnerkit.losses import weighting_of
from learnerkit.preflight.prediction import Prediction, fake_steps, predict_memory, real_steps
from learnerkit.torch_internals import LiveBytes
from learnerkit.values import n_bytes


def learner(model, x, y, loss=None, **kwargs):
    return Learner(DataLoaders([(x, y)] * 4, device="cpu"), model, loss or nn.CrossEntropyLoss(), **kwargs)


def mlp(bs=32, model=None, **kwargs):
    layers = [nn.Linear(50, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Dropout(0.1), nn.Linear(200, 10)]
    return learner(model or nn.Sequential(*layers), torch.randn(bs, 50), torch.randint(10, (bs,)), **kwargs)


def conv(bs=6):
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return learner(model, torch.randn(bs, 3, 24, 24), torch.randint(10, (bs,)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(100, 32), nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.body(self.table(x))[0][:, -1])


def lstm(bs=16):
    return learner(Recurrent(), torch.randint(100, (bs, 30)), torch.randint(5, (bs,)))


def language(bs=8):
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.Sequential(nn.Embedding(200, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 200))
    x, loss = torch.randint(200, (bs, 20)), lambda pred, y: F.cross_entropy(pred.mT, y)
    return learner(model, x, x, loss)


def image_data(n=16, size=64, classes=10):
    return TensorDataset(torch.rand(n, 3, size, size), torch.arange(n) % classes)


def timm_model(name, **kwargs):
    timm = pytest.importorskip("timm")
    dls = DataLoaders(DataLoader(image_data(), 4), device="cpu")
    return Learner(dls, timm.create_model(name, num_classes=10, **kwargs), nn.CrossEntropyLoss())


def vision():
    from torchvision import models

    dls = DataLoaders(DataLoader(image_data(), 4), DataLoader(image_data(), 4), device="cpu")
    return vision_learner(dls, models.resnet18, 10)


def unet(n=8, size=64, bs=2, device="cpu", net="resnet18"):
    from torchvision import models

    data = TensorDataset(torch.rand(n, 3, size, size), torch.randint(3, (n, size, size)))
    dls = DataLoaders.from_datasets(data, data, bs=bs, device=device, classes=list("abc"))
    return unet_learner(dls, getattr(models, net))


def tabular(n=200, bs=32, device="cpu", layers=(200, 100)):
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"town": rng.choice(["Oslo", "Bonn"], n), "area": rng.normal(90, 30, n)})
    frame["dear"] = frame["area"] > 90
    dls = TabularData.from_df(frame, "dear", ["town"], ["area"]).dataloaders(bs=bs, device=device)
    return tabular_learner(dls, layers)


def text():
    texts = [f"this is text number {i}, of {word} words" for i, word in enumerate(["few", "many"] * 100)]
    data = TextData.from_texts(texts, ["a", "b"] * 100, vocab_size=300)
    return text_learner(data.dataloaders(tokens=256, device="cpu"), size=32)


def transformer(kind, device="cpu", shape=(8, 32), vocab=200, width=64, depth=2, heads=2, inner=128):
    transformers = pytest.importorskip("transformers")
    special = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {
        "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads, "intermediate_size": inner
    }  # fmt: skip
    ids = torch.randint(5, vocab, shape)
    labels = ids
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=vocab, num_labels=3, **sizes)
        model, labels = transformers.BertForSequenceClassification(config), torch.arange(len(ids)) % 3
    elif kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=vocab, n_embd=width, n_layer=depth, n_head=heads, **special)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = {"num_key_value_heads": heads // 2, "loss_type": "ForCausalLM"}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocab, **config, **sizes))
    return Learner(DataLoaders([{"input_ids": ids, "labels": labels}] * 4, device=device), model)


def measured(learn):
    """The most bytes that are alive at a time in a fit of several steps."""
    live = LiveBytes()
    live.note(held_tensors(learn.model, learn.loss_func))
    live.note(t for opt in learn.opts for state in opt.state.values() for t in state.values())
    with live, learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-5)
    return live.peak


def sparse(n=4, device="cpu"):
    """Words in bags, whose gradients are sparse."""
    words = torch.arange(n * 8).view(n, 8) % 1000
    dls = DataLoaders([(words, torch.arange(n) % 5)] * 4, device=device)
    model = nn.EmbeddingBag(1000, 64, sparse=True), nn.Linear(64, 5)
    return Learner(dls, nn.Sequential(*model), nn.CrossEntropyLoss(), opt_func=torch.optim.SGD)


QUICK = {"MLP": mlp, "convolutions": conv}

TABLE = {
    "LSTM": lstm, "language model": language, "vision_learner": vision, "unet_learner": unet, "tabular": tabular,
    "text": text,
    **{name: partial(timm_model, name) for name in ("resnet18", "efficientnet_b0", "convnext_atto")},
    **{kind: partial(transformer, kind) for kind in ("bert", "gpt2", "llama")},
}  # fmt: skip


def test_sparse_gradients_are_predicted():
    learn = sparse()
    found = predict_memory(learn)
    assert isinstance(found, Prediction), found
    assert found.peak == pytest.approx(measured(learn), rel=0.02)
    sparse_one = torch.sparse_coo_tensor([[0, 3]], torch.ones(2, 5), (9, 5), check_invariants=True)
    assert n_bytes([sparse_one, torch.ones(3)]) == 2 * 8 + 2 * 5 * 4 + 3 * 4


@pytest.mark.parametrize("kind", QUICK)
def test_a_peak_is_predicted(kind):
    learn = QUICK[kind]()
    found = predict_memory(learn, on=[fake_steps])
    assert isinstance(found, Prediction), found
    assert found.peak == pytest.approx(measured(learn), rel=0.02)
    n = 5 * found.batch_size
    larger = measured(QUICK[kind](n))
    assert found.at(n) == pytest.approx(larger, rel=0.02)
    real = predict_memory(QUICK[kind](), on=[real_steps])
    assert real.peak == pytest.approx(found.peak, rel=0.02)
    assert real.at(n) == pytest.approx(larger, rel=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", mostly_soak(TABLE, "LSTM", "tabular", "bert"))
def test_the_peaks_of_other_models_are_predicted(kind):
    torch.manual_seed(0)
    learn, start = TABLE[kind](), time.process_time()
    found = predict_memory(learn)
    assert in_time(time.process_time() - start, 6)  # at most 3 s, of which a busy machine makes more
    assert isinstance(found, Prediction), found
    assert found.peak == pytest.approx(measured(learn), rel=0.1)


def test_its_parts_are_those_of_the_learner():
    learn = mlp()
    found = predict_memory(learn)
    learn.fit(1, cbs=Keeps())
    params = sum(p.nbytes for p in learn.model.parameters())
    state = sum(t.nbytes for s in learn.opt.state.values() for t in s.values())
    assert found[:3] == (params, params, state)
    assert found.batch_size == 32
    assert found.peak > params * 2 + state
    frozen = mlp()
    frozen.model[0].requires_grad_(False)
    assert predict_memory(frozen).gradients == params - sum(p.nbytes for p in frozen.model[0].parameters())


class Keeps(Callback):
    pass


@pytest.fixture(scope="module")
def plain():
    """The prediction without callbacks."""
    return predict_memory(conv())


@pytest.mark.slow
@pytest.mark.parametrize(
    "cb", [GradientAccumulation(n_batches=2), MixedPrecision("bf16"), ActivationCheckpointing()], ids=repr
)
def test_callbacks_take_part(plain, cb):
    added = predict_memory(conv(), cbs=[cb])
    learn = conv()
    learn.add_cb(cb)
    own = predict_memory(learn)
    assert added == own
    assert own.peak == pytest.approx(measured(learn), rel=0.1)
    assert (own.peak > plain.peak) is isinstance(cb, GradientAccumulation)
    cb.run = False
    assert predict_memory(learn) == plain


def facts(learn):
    tensors = dict(learn.model.named_parameters()) | dict(learn.model.named_buffers())
    grads = {name: p.grad for name, p in learn.model.named_parameters()}
    modes = [m.training for m in learn.model.modules()]
    seeds = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    state = None if learn.opt is None else copy.deepcopy(learn.opt.state_dict())
    return copy.deepcopy(tensors), copy.deepcopy(grads), modes, seeds, state, {**vars(learn)}


class WithEpoch(nn.CrossEntropyLoss):
    """Reads the learner's epoch."""

    def forward(self, pred, y, *, epoch):
        return super().forward(pred, y) * (1 + 0 * epoch)


@pytest.mark.parametrize("way", [fake_steps, real_steps])
@pytest.mark.parametrize("fitted", [False, True])
def test_predicting_memory_changes_nothing(way, fitted):
    learn = mlp(loss=WithEpoch())
    if fitted:
        learn.fit(1)
    calls = []
    learn.model[0].register_forward_hook(lambda *args: calls.append(args))
    learn.model.eval()
    before, values = facts(learn), weights(learn.model)
    weighting = weighting_of(learn)
    weighted = {**vars(weighting)}
    found = predict_memory(learn, on=[way])
    assert isinstance(found, Prediction), found
    after = facts(learn)
    assert same_weights(values, learn.model)
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert all(grad is None for grad in after[1].values()) or fitted
    assert (before[2], before[3]) == (after[2], after[3])
    assert str(before[4]) == str(after[4])
    assert before[5].keys() == after[5].keys()
    assert [name for name in before[5] if before[5][name] is not after[5][name] and name != "_scaler_state"] == []
    assert all(value is weighted[name] for name, value in vars(weighting).items())
    assert bool(calls) is (way is real_steps)  # what a hook keeps is no fake tensor


def test_torchs_own_hooks_take_part():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(50, 400)), nn.ReLU(), nn.Linear(400, 10))
    learn = mlp(model=model)
    found = predict_memory(learn, on=[fake_steps])
    assert isinstance(found, Prediction), found
    assert found.peak == pytest.approx(measured(learn), rel=0.1)


class Asks(nn.Module):
    """It reads values."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(50, 10)

    def forward(self, x):
        return self.body(x) if x.sum() < 1e6 else self.body(2 * x)


def test_where_values_are_read_real_steps_tell():
    learn = mlp(model=Asks())
    why = predict_memory(learn, on=[fake_steps])
    assert isinstance(why, str)
    assert "DataDependent" in why
    found = predict_memory(learn)
    assert found.peak == pytest.approx(measured(learn), rel=0.1)


def test_few_samples_beside_many_weights_tell_of_many_samples():
    layers = (nn.Linear(50, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 10))
    found = predict_memory(mlp(8, nn.Sequential(*layers)), on=[real_steps])
    assert found.at(1600) == pytest.approx(measured(mlp(1600, nn.Sequential(*layers))), rel=0.3)


def test_an_error_is_the_reason_and_is_printed_by_nobody(capfd):
    assert "shape" in predict_memory(mlp(model=nn.Sequential(nn.Linear(50, 8), Adds(), nn.Linear(8, 10))))
    assert capfd.readouterr() == ("", "")


class Adds(nn.Module):
    def forward(self, x):
        return x + torch.ones(3)


def test_what_cannot_be_known_is_said():
    assert "divides each batch" in predict_memory(mlp(cbs=parallel()))
    graphs = DataLoaders([(torch.randn(6, 3), torch.randn(2, 1))] * 2, device="cpu")
    assert "where the samples of" in predict_memory(Learner(graphs, nn.Linear(3, 1), nn.MSELoss()))
    assert "read only once" in predict_memory(Learner(DataLoaders(iter([1])), nn.Linear(3, 1), nn.MSELoss()))
    learn = mlp()
    vars(learn)["_step"] = learn._step
    assert "a step of your own" in predict_memory(learn)


def parallel():
    from learnerkit import DataParallelCallback

    return DataParallelCallback()


def test_samples_in_another_dimension_are_counted_beside_values_on_the_host():
    x, y = torch.randn(7, 12, 4), torch.randn(7, 12, 1)
    learn = Learner(DataLoaders([(x, y)] * 2, device="cpu", batch_dim=1), nn.Linear(4, 1), nn.MSELoss())
    found = predict_memory(learn)
    assert found.batch_size == 12
    assert 7 * 4 * 5 < found.per_sample < 7 * 4 * 12
    named = [{"x": torch.randn(6, 4), "name": list("abcdef"), "id": np.arange(6), "y": torch.randn(6, 1)}] * 2
    learn = Learner(DataLoaders(named, device="cpu", target_keys="y"), Named(), nn.MSELoss())
    found = predict_memory(learn, on=[fake_steps])
    assert isinstance(found, Prediction), found


class Named(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, x, name, id):
        assert len(x) == len(name) == len(id)
        return super().forward(x)


def test_lines_tell_how_many_fit():
    found = Prediction(10, 10, 20, 8.0, 30.0, 60, 4, ((50.0, 0.0), (42.0, 4.0), (30.0, 8.0)))
    assert (found.at(1), found.at(4), found.at(5), found.at(10)) == (50, 60, 70, 110)
    assert found.largest(100) == 7  # 92 are used
    assert found.largest(54) == 0
    assert found.fits(100, 7)
    assert not found.fits(100, 8)
    more = found.with_more(5)
    assert (more.at(1), more.peak, more.at(10), more.base) == (55, 65, 115, 35.0)


class OnlyInTraining(Learner):
    """Uses the second layer in training alone."""

    def _loss(self):
        super()._loss()
        if self.training:
            self.loss_grad = self.loss_grad + self.model[1].weight.square().sum() + self.model[1].bias.square().sum()


@pytest.mark.parametrize("on", [fake_steps, real_steps])
def test_what_a_learner_does_in_training_alone_takes_part(on):
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 500))
    model.forward = model[0].forward
    rows = [(torch.randn(8, 6), torch.arange(8) % 2)]
    learn = OnlyInTraining(DataLoaders(rows, rows, device="cpu"), model, nn.CrossEntropyLoss())
    learn.validate()
    assert predict_memory(learn, on=[on]).gradients == n_bytes(model.parameters())


class WithPool(Learner):
    """Keeps what the model has made, as a GAN does for its critic."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pool = []

    def _step(self):
        super()._step()
        self.pool.append(self.pred.detach())


def test_what_a_step_of_its_own_keeps_has_values():
    rows = [(torch.randn(8, 6), torch.arange(8) % 2)]
    learn = WithPool(DataLoaders(rows, device="cpu"), nn.Linear(6, 2), nn.CrossEntropyLoss())
    assert isinstance(predict_memory(learn, on=[fake_steps]), str)
    assert isinstance(predict_memory(learn), Prediction)
    assert learn.pool
    assert all(type(t) is torch.Tensor for t in learn.pool)


def test_in_a_fit_the_batch_is_the_present_one():
    found = []

    class Asking(Callback):
        def after_pred(self):
            if not self.iter:
                found.append(predict_memory(self.learn))

    learn = mlp(cbs=[Asking(), EMA()])
    learn.fit(1)
    assert found[0].peak == predict_memory(learn).peak


# On a GPU


def on_gpu(model, x, y=None, loss=None, **kwargs):
    batches = [x if y is None else (x, y)] * 3
    return Learner(DataLoaders(batches, device="cuda"), model, loss or nn.CrossEntropyLoss(), **kwargs)


def of_torchvision(name, bs, mode=None):
    from torchvision import models

    cbs = [MixedPrecision(mode)] if mode else []
    return on_gpu(getattr(models, name)(), torch.randn(bs, 3, 224, 224), torch.randint(1000, (bs,)), cbs=cbs)


def wide_mlp():
    layers = [nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 1000)]
    return on_gpu(nn.Sequential(*layers), torch.randn(8192, 1024), torch.randint(1000, (8192,)))


def wide_lstm():
    model = Recurrent()
    model.table, model.body = nn.Embedding(10_000, 512), nn.LSTM(512, 1024, batch_first=True)
    model.head = nn.Linear(1024, 5)
    return on_gpu(model, torch.randint(10_000, (256, 128)), torch.randint(5, (256,)))


ON_GPU = {
    "MLP": wide_mlp,
    "LSTM": wide_lstm,
    "U-Net": partial(unet, 48, 224, 16, "cuda", "resnet34"),
    "tabular": partial(tabular, 3 * 32_768, 32_768, "cuda", (2048, 1024)),
    "resnet50": partial(of_torchvision, "resnet50", 48),
    "resnet50 in bf16": partial(of_torchvision, "resnet50", 48, "bf16"),
    "efficientnet_b0": partial(of_torchvision, "efficientnet_b0", 48),
    "convnext_tiny": partial(of_torchvision, "convnext_tiny", 32),
    "vit_b_16": partial(of_torchvision, "vit_b_16", 32),
    "swin_t": partial(of_torchvision, "swin_t", 32),
    **{
        kind: partial(transformer, kind, "cuda", (16, 256), 10_000, 512, 8, 8, 2048)
        for kind in ("bert", "gpt2", "llama")
    },
}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ON_GPU)
def test_on_a_gpu_the_peak_is_what_its_allocator_tells(kind):
    torch.manual_seed(0)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = torch.ones(2**29, device="cuda")  # which the prediction does not count
    before = torch.cuda.memory_allocated()
    learn = ON_GPU[kind]()
    move_to_device(learn)
    found = predict_memory(learn)
    assert isinstance(found, Prediction), found
    torch.cuda.reset_peak_memory_stats()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-5)
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{kind}: predicted {found.peak / 2**20:.0f} MiB, peak {peak / 2**20:.0f} MiB: {found.peak / peak:.3f}")
    # The kernels of a U-Net's convolutions at full size take more memory themselves.
    assert found.peak == pytest.approx(peak, rel=0.15 if kind == "U-Net" else 0.1)
    assert others.is_cuda
