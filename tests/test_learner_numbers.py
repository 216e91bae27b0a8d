"""A fit is a loop written by hand, bit by bit."""

from functools import partial

import pytest
import torch
from helpers import by_hand, fused_sgd, make_data, make_learner, make_model, same_weights
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from learnerkit import DataLoaders, GradientAccumulation, mae

OPTS = {
    "momentum": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
    "AdamW": partial(AdamW, fused=True),  # which is what the learner chooses
    "AdamW with decay": lambda params, lr: AdamW(params, lr=lr, weight_decay=0.3),
}


@pytest.mark.parametrize("opt_func", OPTS.values(), ids=OPTS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bs", [4, 3])  # 3 leaves a short batch at the end
@pytest.mark.parametrize("with_valid", [False, True])
def test_a_fit_is_a_loop_by_hand(opt_func, dropout, bs, with_valid):
    data = make_data(8)
    valid = [DataLoader(make_data(4, seed=1), 2, shuffle=True)] if with_valid else []
    learn = make_learner(
        DataLoaders(DataLoader(data, bs), *valid, device="cpu"),
        make_model(dropout=dropout),
        opt_func=opt_func,
        lr=0.02,
        metrics=mae,
    )
    model = make_model(dropout=dropout)
    opt = opt_func(model.parameters(), lr=0.02)
    torch.manual_seed(5)
    learn.fit(2)
    learn.fit(1)
    torch.manual_seed(5)
    losses = by_hand(model, DataLoader(data, bs), 3, opt) if dropout == 0 else by_hand_fits(model, data, bs, opt)
    assert same_weights(learn.model, model)
    sizes = [len(x) for x, _ in DataLoader(data, bs)]
    mean = sum(loss * n for loss, n in zip(losses[-len(sizes) :], sizes, strict=True)) / 8
    assert learn.recorder.values[-1][0] == pytest.approx(mean, rel=1e-6)


def by_hand_fits(model, data, bs, opt):
    return by_hand(model, DataLoader(data, bs), 2, opt) + by_hand(model, DataLoader(data, bs), 1, opt)


@pytest.mark.parametrize("from_datasets", [False, True])
@pytest.mark.parametrize("epochs", [(3,), (1, 2), (2, 1, 1)])
@pytest.mark.parametrize("bs", [4, 5])
def test_a_shuffled_fit_sees_the_order_of_a_loop_by_hand(from_datasets, bs, epochs):
    data, valid = make_data(13), make_data(6, seed=1)
    if from_datasets:
        dls = DataLoaders.from_datasets(data, valid, bs=bs, device="cpu")
    else:
        dls = DataLoaders(DataLoader(data, bs, shuffle=True), DataLoader(valid, bs, shuffle=True), device="cpu")
    learn, model = make_learner(dls, lr=0.05), make_model()
    torch.manual_seed(7)
    for n_epoch in epochs:
        learn.fit(n_epoch)
    torch.manual_seed(7)
    by_hand(model, DataLoader(data, bs, shuffle=True), sum(epochs), fused_sgd(model.parameters(), lr=0.05))
    assert same_weights(learn.model, model)


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("n_fits", [0, 1])
def test_a_backward_pass_before_a_fit_is_not_part_of_its_first_step(accumulated, n_fits):
    fits = []
    for tried in (False, True):
        learn = make_learner(cbs=GradientAccumulation(n_batches=2) if accumulated else None)
        for _ in range(n_fits):
            learn.fit(1)
        layer = next(m for m in learn.model.modules() if [*m.parameters(recurse=False)])
        frozen = [p.clone() for p in layer.parameters()]
        if tried:
            x, y = learn.dls.one_batch()
            learn.loss_func(learn.model(x), y).backward()
        layer.requires_grad_(False)
        learn.fit(1)
        assert all(map(torch.equal, layer.parameters(), frozen))
        fits.append(learn.model)
    assert same_weights(*fits)


def test_one_shuffled_epoch_with_dropout_is_a_loop_by_hand():
    learn, model = (
        make_learner(DataLoaders.from_datasets(make_data(12), bs=4), make_model(dropout=0.5)),
        make_model(dropout=0.5),
    )
    torch.manual_seed(7)
    learn.fit(1)
    torch.manual_seed(7)
    by_hand(model, DataLoader(make_data(12), 4, shuffle=True), 1, fused_sgd(model.parameters(), lr=0.1))
    assert same_weights(learn.model, model)


@pytest.mark.parametrize("from_datasets", [False, True])
def test_a_generator_of_ones_own_is_used_and_moves_on(from_datasets):
    data = make_data(12)

    def generator():
        return torch.Generator().manual_seed(11)

    if from_datasets:
        dls = DataLoaders.from_datasets(data, bs=4, device="cpu", generator=generator())
    else:
        dls = DataLoaders(DataLoader(data, 4, shuffle=True, generator=generator()), device="cpu")
    learn, model = make_learner(dls), make_model()
    learn.fit(2)
    torch.manual_seed(99)  # of no importance
    learn.fit(1)
    by_hand(model, DataLoader(data, 4, shuffle=True, generator=generator()), 3, fused_sgd(model.parameters(), lr=0.1))
    assert same_weights(learn.model, model)
