"""What a batch counts in its step: against plain loops that take the mean over everything at once."""

import pytest
import torch
from helpers import make_learner, step_gradient, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import Callback, DataLoaders, GradientAccumulation
from learnerkit.gradient_mean import GradientMean, host_count, scale_gradients, zero_loss

PAD = -100


def sequences(n, seed=0, length=5, padded=()):
    """Features (n, length, 4) and classes (n, length) with padding at the ends; some samples are nothing else."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, length, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (n, length), generator=generator)
    y = y.masked_fill(torch.arange(length) >= torch.randint(length + 1, (n, 1), generator=generator), PAD)
    y[list(padded)] = PAD
    return TensorDataset(x, y)


def mean_over_tokens(pred, y):
    """As many write it: of nothing it is a NaN, and so are its gradients."""
    losses, counted = F.cross_entropy(pred.mT, y.clamp(min=0), reduction="none"), y != PAD
    return (losses * counted).sum() / counted.sum()


def count_tokens(y):
    return (y != PAD).sum()


def sum_over_tokens(pred, y):
    return F.cross_entropy(pred.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=PAD)


def make_net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13, equal_nan=True)


def flat_grads(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def plain_loop(data, size, epochs, lr):
    """Steps of `size` samples, by the summed loss over the number of tokens; the gradients, and the epochs' losses."""
    net, grads, losses = make_net(), [], []
    opt = torch.optim.SGD(net.parameters(), lr)
    for _ in range(epochs):
        total = tokens = 0
        for x, y in DataLoader(data, size):
            loss, n = sum_over_tokens(net(x), y), count_tokens(y)
            opt.zero_grad()
            (loss / n.clamp(min=1)).backward()
            grads.append(flat_grads(net))
            opt.step()
            total, tokens = total + loss.item(), tokens + n.item()
        losses.append(total / tokens)
    return net, grads, losses


WAYS = {
    "12": (12, None),
    "4 x 3": (3, {"n_batches": 4}),
    "12 x 1": (1, {"n_batches": 12}),
    "12 samples": (4, {"n_samples": 12}),
}
PADDED = {"some": (), "micro-batches": (0, 1, 2, *range(12, 16), 30, 41, 42), "a step": range(24, 36)}


@pytest.mark.parametrize(
    ("way", "padded"), [(w, p) for w in WAYS for p in PADDED if (w, p) != ("12", "a step")]
)  # a plain batch in which nothing counts is divided by nothing, as in a plain loop
def test_loss_weight_makes_the_true_mean_over_tokens(way, padded):
    bs, size = WAYS[way]
    data, valid = sequences(43, padded=PADDED[padded]), sequences(11, seed=1, padded=(0, 1, 2))
    net, grads, losses = plain_loop(data, 12, 2, 0.3)
    dls = DataLoaders(DataLoader(data, bs), DataLoader(valid, 3), device="cpu")
    learn = make_learner(dls, make_net(), mean_over_tokens, lr=0.3, loss_weight=count_tokens)
    found = []
    look = Callback(before_step=lambda cb: found.append(flat_grads(cb.model)))
    learn.fit(2, cbs=[look, *([GradientAccumulation(**size)] if size else [])])
    close(found, grads)
    close(weights(learn.model), weights(net))
    with torch.no_grad():
        pred, y = net(valid.tensors[0]), valid.tensors[1]
        valid_loss = (sum_over_tokens(pred, y) / count_tokens(y)).item()
    close([row[0] for row in learn.recorder.values], losses)
    close(learn.recorder.values[-1][1], valid_loss)
    close(learn.validate(), [valid_loss])


def test_nothing_weighs_the_batches_of_a_plain_fit():
    seen = set()
    make_learner().fit(1, cbs=Callback(before_backward=lambda cb: seen.add(step_gradient(cb.learn))))
    assert seen == {None}


# Parts


@pytest.mark.parametrize("device_counts", [False, True])
def test_the_mean_is_right_whatever_was_expected(device_counts):
    """Counts on a device, which nobody reads, are stood for by tensors that are not turned into numbers."""
    net = nn.Linear(1, 1, bias=False)
    step = GradientMean(sums=False)
    for counts in ((4, 4, 4), (0, 5, 2), (1, 0, 9), (0, 0, 0), (7, 1, 1)):
        net.zero_grad()
        step.begin(expected=12.0)
        for i, count in enumerate(counts):
            pred = net(torch.tensor([[float(10**i)]]))
            loss = pred.sum() if count or device_counts else pred[:0].mean()
            count = torch.tensor(count) if device_counts else count
            step.weigh(loss, count, pred).backward()
            step.counted = step.counted + count
        scale_gradients(net.parameters(), step.correction())
        expected = sum(c * 10**i for i, c in enumerate(counts)) / max(1, sum(counts))
        assert net.weight.grad.item() == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_sums_is_left_as_it_is():
    step = GradientMean(sums=True)
    step.begin(4.0)
    loss = torch.ones(())
    assert step.weigh(loss, 3, loss) is loss
    step.counted = 9.0
    assert step.correction() == 1.0


@pytest.mark.parametrize(
    ("counted", "tolerance", "factor"), [(4.0, 0.0, 1.0), (4.1, 0.1, 1.0), (8, 0.1, 0.5), (0, 0, 1.0)]
)
def test_the_correction_is_1_within_its_tolerance(counted, tolerance, factor):
    step = GradientMean(sums=False)
    step.begin(4.0)
    step.counted = counted
    assert step.correction(tolerance) == factor


def test_a_loss_of_half_precision_keeps_its_type():
    step = GradientMean(sums=False)
    step.begin(2.0)
    loss = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    assert step.weigh(loss * torch.nan, torch.tensor(0), loss) == 0
    assert step.weigh(loss, 3, loss).dtype == step.weigh(loss, torch.tensor(3), loss).dtype == torch.bfloat16


def test_a_zero_loss_depends_on_all_of_the_output_and_has_no_gradient():
    x, y = torch.full((2,), float("inf"), requires_grad=True), torch.ones(3, requires_grad=True)
    loss = zero_loss({"a": x, "b": [y, torch.ones(1)]})
    loss.backward()
    assert loss == 0
    assert not x.grad.any()
    assert not y.grad.any()


def test_counts_on_the_host_are_numbers():
    assert host_count(torch.tensor(3)) == 3
    assert isinstance(host_count(torch.tensor(3)), int)
    assert host_count(2.5) == 2.5


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_gradients_of_every_kind_are_scaled(factor):
    net = nn.ModuleList([nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(1, 1)])
    net[2].to(torch.bfloat16)
    y = net[2](net[1](net[0](torch.tensor([1, 1, 3]))).to(torch.bfloat16))
    y.float().sum().backward()
    before = [p.grad.to_dense().clone() for p in net.parameters() if p.grad is not None]
    scale_gradients(net.parameters(), factor)
    after = [p.grad.to_dense() for p in net.parameters() if p.grad is not None]
    assert len(before) == 5
    for a, b in zip(after, before, strict=True):
        assert torch.equal(a, b * 0.5)
