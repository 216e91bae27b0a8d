"""A model of timm with its optimizers, schedules, MixUp and average of the weights; two processes equal one."""

from functools import partial

import pytest
import torch
from helpers import mostly_soak, results_of
from torch import nn
from torch.utils.data import TensorDataset

from learnerkit import Callback, ChannelsLast, DataLoaders, Learner, accuracy, set_seed

SIZE, CLASSES = 16, 3


def make_images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    x = 0.3 * torch.randn(n, 1, SIZE, SIZE, generator=generator) + y[:, None, None, None] - 1
    return TensorDataset(x.double(), y)


def vit():
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224", img_size=SIZE, patch_size=8, embed_dim=16, depth=1, num_heads=2, in_chans=1,
        num_classes=CLASSES,
    )  # fmt: skip


def resnet():
    import timm

    return timm.create_model("resnet10t", num_classes=CLASSES, in_chans=1)


class Schedule(Callback):
    """A schedule of timm's, which counts epochs."""

    @staticmethod
    def made(opt):
        from timm.scheduler import CosineLRScheduler

        return CosineLRScheduler(opt, t_initial=3, warmup_t=1, warmup_lr_init=1e-4)

    def before_fit(self):
        self.schedule = self.made(self.opt)

    def before_epoch(self):
        self.schedule.step(self.epoch)


class Average(Callback):
    """The average of the weights as timm keeps it."""

    run_valid = False

    def before_fit(self):
        from timm.utils import ModelEmaV3

        self.average = ModelEmaV3(self.model, decay=0.5)

    def after_step(self):
        self.average.update(self.model)


class Mix(Callback):
    """MixUp as timm has it, of the whole batch on the device."""

    run_valid = False

    def __init__(self):
        from timm.data import Mixup

        super().__init__()
        self.mix = Mixup(mixup_alpha=0.4, num_classes=CLASSES)

    def before_batch(self):
        x, y = self.mix(self.x, self.y)
        self.learn.xb, self.learn.yb = (x,), (y.double(),)


JOBS = {"vit": (vit, (Schedule, Average)), "mixup": (vit, (Mix,)), "resnet": (resnet, (ChannelsLast, Average))}


def make_learner(name):
    from timm.optim import create_optimizer_v2

    set_seed(1)
    dls = DataLoaders.from_datasets(make_images(16, 0), make_images(11, 1), bs=8, valid_bs=4, device="cpu")
    model, cbs = JOBS[name]
    adam = partial(create_optimizer_v2, opt="adamw", weight_decay=0.05)
    loss = nn.CrossEntropyLoss()
    return Learner(dls, model().double(), loss, opt_func=adam, lr=0.01, metrics=accuracy, cbs=[cb() for cb in cbs])


def fit(name):
    learn = make_learner(name)
    with learn.distrib_ctx(split_batches=True, sync_bn=False), learn.no_logging(), learn.no_bar():
        learn.fit(3)
    found = {
        "values": learn.recorder.values,
        "rates": learn.recorder.lrs,
        "weights": {k: v.clone() for k, v in learn.model.state_dict().items()},
    }
    if hasattr(learn, "average"):
        found["average"] = {k: v.clone() for k, v in learn.average.average.module.state_dict().items()}
    return found


found = results_of(fit)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_model_of_timm_learns(found, name):
    run = found[1, name][0]
    assert run["values"][-1][0] < run["values"][0][0]
    assert run["values"][-1][2] > 0.6
    if name == "vit":
        assert run["rates"][:4] == pytest.approx([1e-4, 1e-4, 0.0075, 0.0075], rel=1e-6)
    if "average" in run:
        assert run["average"].keys() == run["weights"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_soak(JOBS, "mixup"), ids=[f"2-ranks-{name}" for name in JOBS])
def test_a_model_of_timm_trains_alike_on_all_ranks(found, name):
    first, second = found[2, name]
    if name == "resnet":  # the statistics of BatchNorm in the average are each process's own
        del first["average"], second["average"]
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    if name == "vit":  # the others draw on each rank, or have statistics of a rank's samples
        torch.testing.assert_close(first, found[1, name][0], rtol=1e-8, atol=1e-9)
    assert first["values"][-1][2] > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("cbs", [(), (Schedule,)], ids=["alone", "scheduled"])
def test_the_layer_decay_of_timm_stays(cbs):
    from timm.optim import create_optimizer_v2

    def make(_groups, lr):
        return create_optimizer_v2(model, opt="adamw", lr=lr, layer_decay=0.5)

    def note(cb):
        rates.append([group["lr"] for group in cb.opt.param_groups])

    model, rates = vit(), []
    dls = DataLoaders.from_datasets(make_images(16, 0), bs=8, device="cpu")
    cbs = [Callback(before_step=note), *(cb() for cb in cbs)]
    learn = Learner(dls, model.double(), nn.CrossEntropyLoss(), opt_func=make, cbs=cbs)
    with learn.no_logging(), learn.no_bar():
        learn.fit(3)
    opt, expected = make(None, 1e-3), []
    schedule = Schedule.made(opt) if len(cbs) > 1 else None
    for epoch in range(3):
        if schedule is None:
            expected += [[1e-3 * group["lr_scale"] for group in opt.param_groups]] * 2
        else:
            schedule.step(epoch)
            expected += [[group["lr"] for group in opt.param_groups]] * 2
    assert len(set(expected[-1])) > 2
    torch.testing.assert_close(rates, expected)
