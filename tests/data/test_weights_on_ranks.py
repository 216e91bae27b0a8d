"""Weighted draws and weighted losses on several ranks: the samples and numbers of one process, also after a break."""

from functools import partial

import pytest
import torch
from language.test_data_on_ranks import Reads
from text_jobs import Bag, make_data
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, CheckpointCallback, DataLoaders, Learner, distributed, set_seed, text_learner


class Rows(Callback):
    """The rows that this rank has trained on, step by step."""

    name = "reads"
    order = 20
    run_valid = False

    leave: tuple | None = None  # the epoch and the batch at which the fit is interrupted

    def __init__(self):
        super().__init__()
        self.steps = []

    def before_batch(self):
        if (self.epoch, self.iter) == self.leave:
            raise KeyboardInterrupt
        self.steps.append(self.x[: self.batch_size, 0].int().tolist())


def of_rows(cbs=()):
    set_seed(3)
    x = torch.arange(60.0).reshape(60, 1).double()
    ds = TensorDataset(x, (x[:, 0] >= 54).long())
    dls = DataLoaders.from_datasets(ds, ds, bs=7, weights="balanced", device="cpu")
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]).double())
    return Learner(dls, nn.Linear(1, 2).double(), loss, lr=1e-3, cbs=[Rows, *cbs])


def of_texts(cbs=()):
    data = make_data()
    set_seed(3)
    dls = data.dataloaders(tokens=64, weights={"animal": 1, "food": 5}, device="cpu")
    model = Bag(data.vocab_size).double()
    torch.set_default_dtype(torch.float64)
    try:
        return text_learner(dls, model, class_weights=[1, 3], lr=0.02, cbs=[Reads, *cbs])
    finally:
        torch.set_default_dtype(torch.float32)


MAKE = {"rows": of_rows, "texts": of_texts}


def fitted(learn, **how):
    set_seed(4)
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(**how):
        learn.fit(2)
    return learn


@pytest.mark.filterwarnings("ignore:.*each train a whole copy")  # that is what is compared with
@pytest.mark.ranks(2, soak=[3])
@pytest.mark.parametrize("name", MAKE)
def test_ranks_draw_the_samples_of_one_process_and_come_to_its_numbers(name):
    alone, together = MAKE[name](), fitted(MAKE[name](), split_batches=True)
    set_seed(4)
    with alone.no_logging(), alone.no_bar():
        alone.fit(2)
    read = [sum(step, []) for step in zip(*distributed.all_gather(together.reads.steps), strict=True)]
    assert read == alone.reads.steps
    first, second = read[: len(read) // 2], read[len(read) // 2 :]
    assert list(map(len, first)) != [0] * len(first)
    assert sorted(sum(first, [])) != sorted(sum(second, []))  # each epoch is drawn anew
    assert len(sum(first, [])) == len(sum(second, [])) == len(alone.dls.train_ds)
    for a, b in zip(alone.model.parameters(), together.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(together.recorder.values, alone.recorder.values, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
def test_a_fit_goes_on_in_mid_epoch_with_the_draws_that_were_left(name):
    whole, *parts = (MAKE[name]() for _ in range(3))
    saving = partial(CheckpointCallback, "run", every=1, resume=True)
    parts[0].reads.leave = (1, 3)
    for learn, cbs in ((whole, None), (parts[0], saving()), (parts[1], saving())):
        set_seed(4 if learn is not parts[1] else 5)
        with learn.no_logging(), learn.no_bar():
            if learn is parts[0]:
                with pytest.raises(KeyboardInterrupt):
                    learn.fit(2, cbs=cbs)
            else:
                learn.fit(2, cbs=cbs)
    assert parts[1].reads.steps == whole.reads.steps  # those before the break are part of its state
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), parts[1].model.parameters(), strict=True))
