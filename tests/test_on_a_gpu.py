"""On a GPU the library does what it does on a CPU, also with what only a GPU has: NCCL, pinned memory, its kernels."""

import copy
import json
import subprocess
from functools import partial

import pytest
import torch
from helpers import make_classes, make_data, make_learner, same_weights
from launching import SCRIPTS, WAYS, environment, run_script
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from learnerkit import (
    EMA,
    SWA,
    ActivationCheckpointing,
    Callback,
    CheckpointCallback,
    DataLoaders,
    Dice,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    MixUp,
    Recorder,
    accuracy,
    set_seed,
)

pytestmark = pytest.mark.gpu


def double_data(n=40, seed=0):
    """Inputs in float64, and classes."""
    x, y = make_classes(n, 6, seed=seed).tensors
    return TensorDataset(x.double(), y)


def net(width=16):
    """A small classifier with a norm."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3))


def trained(device, epochs=2, model=None, cbs=(), data=double_data, **kwargs):
    """A learner that has trained in order of the data, in float64 unless there is a model."""
    dls = DataLoaders(DataLoader(data(40), 8), DataLoader(data(16, seed=1), 8), device=device)
    model = net().double() if model is None else model
    kwargs = {"lr": 0.05, "metrics": accuracy} | kwargs
    learn = Learner(dls, model, nn.CrossEntropyLoss(), cbs=list(cbs), **kwargs)
    with learn.no_bar(), learn.no_logging():
        learn.fit(epochs)
    return learn


def close(a, b, by):
    """Assert that two models have about the same parameters and buffers."""
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=by, atol=by)


# Numbers


JOBS = {
    "plain": dict,
    "SGD": lambda: {"opt_func": partial(SGD, momentum=0.9, weight_decay=0.01)},
    "accumulation": lambda: {"cbs": [GradientAccumulation(n_batches=2), GradientClip(0.5)]},
    "averages": lambda: {"cbs": [EMA(0.9)]},
    "SWA": lambda: {"cbs": [SWA(1)]},
    "recomputing": lambda: {"cbs": [ActivationCheckpointing()]},
    "loss weights": lambda: {"loss_weight": "sum"},
}


@pytest.mark.parametrize("job", JOBS)
def test_a_fit_equals_one_on_the_cpu(job):
    there, here = trained("cuda", **JOBS[job]()), trained("cpu", **JOBS[job]())
    torch.testing.assert_close(there.recorder.losses, here.recorder.losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(there.recorder.values, here.recorder.values, rtol=1e-9, atol=1e-9)
    preds = [learn.get_preds()[0] for learn in (there, here)]
    assert {p.device.type for p in preds} == {"cpu"}
    torch.testing.assert_close(*preds, rtol=1e-8, atol=1e-8)


def test_a_checkpoint_goes_on_bit_by_bit(tmp_path):
    ends = 7

    class Interrupt(Callback):
        order = 20_000

        def after_batch(self):
            if self.training and self.train_iter == ends:
                raise KeyboardInterrupt

    def learner():
        set_seed(0)
        dls = DataLoaders.from_datasets(make_classes(40, 6), make_classes(16, 6, seed=1), bs=8, device="cuda")
        cbs = [MixedPrecision("fp16"), EMA(0.9), MixUp(), Interrupt()]
        cbs.append(CheckpointCallback(tmp_path, every=1, resume=True))
        cbs.append(Recorder(train_metrics=True))
        model = nn.Sequential(nn.Dropout(0.2), net())
        return Learner(dls, model, nn.CrossEntropyLoss(), cbs=cbs, metrics=Dice(), lr=0.05)

    def ended(learn):
        with learn.no_bar(), learn.no_logging():
            learn.fit(3)
        return learn

    with pytest.raises(KeyboardInterrupt):
        ended(learner())
    ends = None
    resumed = ended(learner())
    assert resumed.recorder.iters[-1] == 15
    whole = learner()
    whole.remove_cb(CheckpointCallback)
    ended(whole)
    assert same_weights(whole.model, resumed.model)
    assert whole.recorder.losses == resumed.recorder.losses
    assert whole.recorder.values == resumed.recorder.values


def test_a_state_goes_to_the_cpu_and_back():
    there = trained("cuda")
    state = copy.deepcopy(there.state_dict())
    here = trained("cpu", epochs=1)
    here.load_state_dict(state)
    assert {p.device.type for p in here.model.parameters()} == {"cpu"}
    assert same_weights(here.model.cpu(), copy.deepcopy(there.model).cpu())
    for learn in (here, there):
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
    close(here.model.cpu(), there.model.cpu(), 1e-9)


def test_files_go_from_a_gpu_to_the_cpu(tmp_path):
    there = trained("cuda")
    there.path = tmp_path
    there.save("saved")
    here = trained("cpu", epochs=1)
    here.path = tmp_path
    here.load("saved")
    assert same_weights(here.model, copy.deepcopy(there.model).cpu())


# What only a GPU does


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_pinned_and_copied_without_a_wait(workers):
    pinned = []
    data = TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)
    dls = DataLoaders.from_datasets(data, data, bs=8, device="cuda", num_workers=workers)
    learn = Learner(dls, net(), nn.CrossEntropyLoss(), lr=0.01)
    assert dls.device.type == "cuda"
    for batch in dls.train:
        pinned += [t.is_pinned() for t in batch]
    assert pinned == [True] * 16

    def strict(cb):
        torch.cuda.set_sync_debug_mode("error" if cb.training and 0 < cb.iter < 7 else "default")

    try:
        with learn.no_logging():
            learn.fit(2, cbs=Callback(before_batch=strict, after_batch=strict, order=1000))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert next(learn.model.parameters()).is_cuda


def test_a_dataset_on_the_gpu_is_read_without_a_wait():
    data = TensorDataset(torch.randn(64, 6, device="cuda"), torch.arange(64, device="cuda") % 3)
    learn = Learner(DataLoaders.from_datasets(data, data, bs=8, device="cuda"), net(), nn.CrossEntropyLoss(), lr=0.01)

    def strict(cb):
        torch.cuda.set_sync_debug_mode("error" if cb.training and 0 < cb.iter < 7 else "default")

    try:
        with learn.no_logging():
            learn.fit(2, cbs=Callback(after_batch=strict, order=1000))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_samples_that_are_on_the_gpu_are_not_pinned():
    data = [(x.cuda(), y) for x, y in make_classes(32, 6)]
    learn = Learner(DataLoaders.from_datasets(data, data, bs=8, device="cuda"), net(), nn.CrossEntropyLoss(), lr=0.01)
    with learn.no_logging():
        learn.fit(1)
    assert learn.predict(learn.dls.one_batch()[0][0]).pred.shape == (3,)
    assert learn.get_preds(dl=learn.dls.test_dl([x for x, _ in data]))[0].shape == (32, 3)


def test_metrics_of_torchmetrics_follow_the_predictions():
    classification = pytest.importorskip("torchmetrics.classification")
    metrics = {"own": accuracy, "theirs": classification.MulticlassAccuracy(3, average="micro")}
    learn = trained("cuda", metrics=metrics)
    own, theirs = learn.final_record[-2:]
    assert own == pytest.approx(theirs)


@pytest.mark.parametrize("opt_func", [AdamW, partial(SGD, momentum=0.9)])
def test_the_fused_optimizer_is_chosen_and_does_what_the_plain_one_does(opt_func):
    fused, plain = trained("cuda", opt_func=opt_func), trained("cuda", opt_func=partial(opt_func, fused=False))
    assert fused.opt.param_groups[0]["fused"] is True
    assert not plain.opt.param_groups[0]["fused"]
    close(fused.model, plain.model, 1e-9)


def test_the_scaler_skips_a_step_that_overflows_and_scales_as_the_optimizer_steps():
    def spoil(cb):
        if cb.training and cb.train_iter == 2:
            cb.learn.loss_grad = cb.loss_grad * 1e38

    scales = []
    note = Callback(after_batch=lambda cb: scales.append(cb.mixed_precision.scaler.get_scale()), order=50)
    note.run_valid = False
    cbs = [MixedPrecision("fp16", init_scale=1024.0), Callback(before_backward=spoil), note, GradientClip()]
    learn = trained("cuda", 1, net(), cbs, data=partial(make_classes, n_in=6))
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0]
    assert learn.mixed_precision.skipped == 1
    assert all(p.isfinite().all() for p in learn.model.parameters())
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}


def test_on_one_gpu_data_parallel_trains_as_without_it():
    one = trained("cuda")
    dls = DataLoaders(DataLoader(double_data(), 8), DataLoader(double_data(16, seed=1), 8), device="cuda")
    learn = Learner(dls, net().double(), nn.CrossEntropyLoss(), metrics=accuracy, lr=0.05)
    if torch.cuda.device_count() > 1:
        pytest.skip("there are several GPUs")
    with learn.no_bar(), learn.no_logging(), learn.parallel_ctx(), pytest.warns(UserWarning, match="there is 1"):
        learn.fit(2)
    close(learn.model, one.model, 1e-12)


def test_memory_that_does_not_suffice_is_explained():
    size = torch.cuda.get_device_properties(0).total_memory
    learn = make_learner(DataLoaders(DataLoader(make_data(8), 4), device="cuda"))
    ask = Callback(before_batch=lambda cb: torch.empty(2 * size, dtype=torch.uint8, device="cuda"))
    with learn.no_logging(), pytest.raises(torch.OutOfMemoryError) as caught:
        learn.fit(1, cbs=ask)
    text = "\n".join(getattr(caught.value, "__notes__", []))
    assert "SplitBatch" in text or "find_batch_size" in text


def test_a_fit_on_another_stream_reads_what_its_steps_have_made():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = trained("cuda")
    stream.synchronize()
    close(there.model, trained("cuda").model, 1e-12)


# Processes


@pytest.mark.parametrize("way", ["launch", "torchrun"])
def test_a_group_of_one_with_nccl(way):
    found = json.loads(run_script("gpu_alone.py", nproc=1, way=way, gpus=True, timeout=240).splitlines()[-1])
    assert found["backends"] == "cpu:gloo,cuda:nccl"
    for name in ("distrib_ctx", "DDP of the user", "FSDP2 of the user"):
        assert found[name] < 1e-9, name
    assert found["aborted"] == "a collective after the abort raises"


def test_two_ranks_on_one_gpu_equal_one():
    found = json.loads(run_script("gpu_shared.py", nproc=2, way="torchrun", gpus=True, timeout=300).splitlines()[-1])
    assert found["ranks"] == 2
    for name, apart in found["apart"].items():
        assert apart < 1e-9, name
    assert found["ends"] == {"nan": [True, True], "cancel": [True, True]}


def test_nobody_waits_for_ever_in_nccl_when_a_rank_fails():
    """The first collective of NCCL, in which rank 0 waits, cannot be aborted: its launcher ends rank 0."""
    command = [*WAYS["torchrun"](2), SCRIPTS / "gpu_blocked.py"]
    done = subprocess.run(command, env=environment(gpus=True), capture_output=True, text=True, timeout=150)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ZeroDivisionError: meant" in done.stderr, done.stdout + done.stderr
    assert "the collective has returned" not in done.stderr
