"""Texts on several ranks: the same batches and numbers as on one process, and a fit that goes on after a break."""

import pytest
import torch
from text_jobs import Bag, Next, OwnNext, count_next, make_data, make_stream
from torch.nn import functional as F

from learnerkit import Callback, CheckpointCallback, GradientAccumulation, Learner, distributed, set_seed

MODELS = {"classes": (make_data, Bag, F.cross_entropy), "next": (make_stream, Next, F.cross_entropy),
          "own loss": (make_stream, OwnNext, None)}  # fmt: skip


class Reads(Callback):
    """The texts that this rank has trained on, step by step, and the most tokens in a batch."""

    order = 20
    run_valid = False

    leave: tuple | None = None  # the epoch and the batch at which the fit is interrupted

    def __init__(self):
        super().__init__()
        self.steps, self.most = [], 0

    def before_batch(self):
        if (self.epoch, self.iter) == self.leave:
            raise KeyboardInterrupt
        ids = self.x["input_ids"][: self.batch_size]
        self.most = max(self.most, ids.numel())
        self.steps.append([self.dls.data.codec.decode(row) for row in ids.tolist()])


def make_learner(name, cbs=None):
    data, model, loss = MODELS[name]
    data = data()
    set_seed(3)
    dls = data.dataloaders(tokens=64, seq_len=16, device="cpu")
    count = count_next if loss is None else None
    model = model(data.vocab_size).double()
    return Learner(dls, model, loss, loss_weight=count, lr=0.02, wd=0.01, cbs=[Reads, *(cbs or [])])


def weights(learn):
    return {k: v.clone() for k, v in learn.model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*each train a whole copy")  # that is what is compared with
@pytest.mark.ranks(slow=[2], soak=[3])
def test_ranks_see_the_batches_of_one_process_and_come_to_its_numbers():
    for name in MODELS:
        alone, together = make_learner(name), make_learner(name)
        set_seed(4)
        alone.fit(2)
        set_seed(4)
        with together.distrib_ctx(split_batches=True):
            together.fit(2)
            preds = together.get_preds()[0] if name == "classes" else None
        read = [sum(step, []) for step in zip(*distributed.all_gather(together.reads.steps), strict=True)]
        assert read == alone.reads.steps, name
        torch.testing.assert_close(weights(together), weights(alone), rtol=1e-9, atol=1e-12, msg=name)
        torch.testing.assert_close(together.recorder.values, alone.recorder.values, rtol=1e-9, atol=1e-12, msg=name)
        if preds is not None:
            torch.testing.assert_close(preds, alone.get_preds()[0], rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2, soak=[3])
def test_by_default_each_rank_takes_whole_batches_within_the_budget():
    learn = make_learner("classes")
    with learn.distrib_ctx():
        learn.fit(1)
    assert learn.reads.most <= 64
    everything = [text for rank in distributed.all_gather(learn.reads.steps) for step in rank for text in step]
    data = learn.dls.data
    assert sorted(everything) == sorted(data.decode(sample) for sample in data.train_ds)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_fit_goes_on_where_it_was_stopped(name):
    whole, *parts = (make_learner(name, [GradientAccumulation(n_batches=2)]) for _ in range(3))
    set_seed(4)
    whole.fit(2)
    set_seed(4)
    saving = {"every": 1, "resume": True}
    parts[0].reads.leave = (1, 3)
    with pytest.raises(KeyboardInterrupt):
        parts[0].fit(2, cbs=CheckpointCallback("run", **saving))
    parts[1].fit(2, cbs=CheckpointCallback("run", **saving))
    assert parts[1].reads.steps == whole.reads.steps  # those before the break are part of its state
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), parts[1].model.parameters(), strict=True))
