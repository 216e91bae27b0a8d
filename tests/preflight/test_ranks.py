"""check_distributed: what it compares, which faults it finds, and that it leaves nothing behind."""

import os
import random
import re
import signal
import subprocess
import tempfile
import time

import numpy as np
import psutil
import pytest
import torch
from helpers import end_workers, make_classes, make_learner, make_model, python, read_report, same_weights, weights
from launching import SCRIPTS, run_script
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from learnerkit import Callback, DataLoaders, Learner, MixUp, accuracy, distributed
from learnerkit.preflight.ranks import check_distributed
from learnerkit.utils import unwrap


@pytest.fixture(scope="module", autouse=True)
def imported():
    """torch imports its compiler with the first optimizer: once, rather than in every forked process."""
    make_learner(opt_func=torch.optim.AdamW).fit(0)


@pytest.fixture(autouse=True)
def files_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("learnerkit-*")) == []


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def soak(*values):
    return pytest.param(*values, marks=pytest.mark.soak)


def make_dls(n=60, bs=8, **kwargs):
    data = make_classes(n)
    return DataLoaders(DataLoader(data, bs, **{"shuffle": True} | kwargs), DataLoader(data, bs), device="cpu")


def make(model=None, loss_func=None, dls=None, **kwargs):
    kwargs = {"opt_func": torch.optim.AdamW, "lr": 1e-2, "metrics": accuracy} | kwargs
    return make_learner(dls or make_dls(), model or make_model(n_out=3), loss_func or nn.CrossEntropyLoss(), **kwargs)


def verdict(capsys, learn, **kwargs):
    """(what check_distributed returned, the mark and text of each topic, all it printed)"""
    found = check_distributed(learn, **kwargs)
    out, err = capsys.readouterr()
    assert err == ""
    return found, read_report(out.partition("\n")[2])[0], out


def marked(report, mark):
    return {topic for topic, (its, _) in report.items() if its == mark}


NAMES = {"samples", "losses", "weights", "validation", "predictions"}


# What is right


def batch_norm_and_dropout():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def weighted():
    return make_dls(shuffle=False, sampler=WeightedRandomSampler(torch.linspace(0.1, 1, 60), 30))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 5, 2, batch_first=True, dropout=0.5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.rnn(x[..., None])[0][:, -1])


class Single(nn.Module):
    """Computes in float32, whatever it gets and holds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return F.linear(x.float(), self.linear.weight, self.linear.bias)


class PartlySingle(nn.Module):
    """Computes in what it gets, but for a part."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x)
        return F.linear(h.float(), self.last.weight.float(), self.last.bias.float()).to(h)


class RandomStart(Callback):
    "Each process draws this by itself, with the seeds of their parent."

    only_fit = True

    def before_fit(self):
        with torch.no_grad():
            self.model[0].bias.fill_(random.random() + np.random.rand())


class Stream(IterableDataset):
    def __iter__(self):
        yield from make_classes(30)


def whole_batches():
    batches = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10, 11]]
    return DataLoaders(DataLoader(make_classes(30), batch_size=None, sampler=batches), device="cpu")


def streams():
    return DataLoaders(DataLoader(Stream(), 8), DataLoader(Stream(), 8), device="cpu")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        slow(lambda: make(dls=DataLoaders.from_datasets(make_classes(50), make_classes(20), bs=8, device="cpu")), ""),
        soak(lambda: make(dls=weighted()), "each global batch the same, each sample once (30 samples)"),
        soak(lambda: make(Recurrent()), "dropout was off (1)"),
        soak(lambda: make(loss_func=nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0]), reduction="sum")), ""),
        soak(
            lambda: make(dls=DataLoaders(DataLoader(make_classes(20), 8), device="cpu"), cbs=Noise(rank=5)), "3 steps"
        ),
        soak(lambda: make().to_distributed(), ""),
        soak(lambda: make(cbs=RandomStart()), ""),
        slow(lambda: make(dls=streams()), "(30 samples)"),
        slow(lambda: make(dls=whole_batches()), "(12 samples)"),
    ],
    ids=[
        "mlp",
        "weighted",
        "rnn",
        "weights",
        "no validation",
        "distributed",
        "random start",
        "stream",
        "whole batches",
    ],
)
def test_other_right_learners_pass(case, says, capsys):
    check_that_it_passes(case(), says, capsys)


def check_that_it_passes(learn, says, capsys):
    found, report, out = verdict(capsys, learn)
    assert found is True
    assert marked(report, "ok") == NAMES
    assert says in " ".join(out.split())
    assert out.endswith("\nall is well\n")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "single"), [(PartlySingle, True), soak(Single, True), (lambda: None, False)])
def test_the_rounding_of_float32_is_told_from_that_of_float64(model, single, capsys):
    found, report, _ = verdict(capsys, make(model()))
    assert found is True
    text = "rounding of float32, in which the learner computes, or a part of it"
    assert any(text in said for _, said in report.values()) == single, report


@pytest.mark.slow
def test_more_ranks_than_samples_in_a_batch_can_be_checked(capsys):
    found, report, out = verdict(capsys, make(dls=make_dls(7, 2)), n=3, steps=9)
    assert found is True
    assert out.startswith("check_distributed: 3 CPU processes against 1, 4 steps of 2 samples")
    assert "(7 samples)" in report["samples"][1]


@pytest.mark.slow
def test_one_step_of_one_sample_can_be_checked(capsys):
    found, report, out = verdict(capsys, make(dls=make_dls(2, 1)), steps=1)
    assert found is True
    assert out.startswith("check_distributed: 2 CPU processes against 1, 1 step of 1 sample; ")
    assert "(1 sample)" in report["samples"][1]


# Planted faults


class Noise(Callback):
    def __init__(self, rank):
        super().__init__()
        self.where = rank

    def after_step(self):
        if distributed.rank() == self.where and self.iter == 2:
            with torch.no_grad():
                unwrap(self.model)[0].bias.add_(0.1)


class RandomData(Dataset):
    def __init__(self):
        self.data = make_classes(60)

    def __len__(self):
        return 60

    def __getitem__(self, i):
        return self.data[random.randrange(60)]


class RandomOrder:
    """A sampler that no seed reaches."""

    def __len__(self):
        return 60

    def __iter__(self):
        return iter(random.SystemRandom().sample(range(60), 60))  # no seed makes ranks draw alike


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(F.dropout(x, 0.5, self.training))


class Centred(Functional):
    def forward(self, x):
        return self.linear(x if self.training else x - x.mean(0))


class Mean(Functional):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x)


class NumpyNoise(Functional):
    def forward(self, x):
        return self.linear(x * np.random.rand() if self.training else x)


class Scaled(Callback):
    run_valid = False

    def after_loss(self):  # by the size of its own part of the batch
        self.learn.loss_grad = self.loss_grad * self.batch_size


class Words(Dataset):
    """Sentences of other lengths, padded."""

    def __len__(self):
        return 60

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        x, labels = torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
        labels[1 + i % 5 :] = -100
        return {"x": x, "labels": labels}


class OwnLoss(nn.Module):
    """A model that makes its own loss over tokens; with a `penalty` it is not their mean cross-entropy."""

    def __init__(self, penalty):
        super().__init__()
        self.body, self.penalty = make_model(n_out=3), penalty

    def forward(self, x, labels):
        logits = self.body(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.mT, labels) + self.penalty * logits.square().mean()}


def own_loss(penalty):
    dls = DataLoaders(DataLoader(Words(), 8), device="cpu")
    return Learner(dls, OwnLoss(penalty), opt_func=torch.optim.SGD, lr=0.1)


@pytest.mark.slow
def test_a_models_own_loss_over_tokens_is_counted_and_arguments_of_ddp_are_passed_on(capsys):
    learn = own_loss(0.0)
    learn.model.unused = nn.Linear(4, 3)
    assert verdict(capsys, learn, find_unused_parameters=True)[0] is True
    with pytest.raises(TypeError, match="did you mean 'wrap'"):
        check_distributed(make(), wrapp="used")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:comm_hook='bf16' rounds the gradients")
def test_gradients_that_a_hook_rounds_are_told(capsys):
    found, report, _ = verdict(capsys, make(), comm_hook="bf16")
    assert found is False
    assert report["reason"][1].startswith("comm_hook='bf16' rounds the gradients on their way")


class Lengths(torch.utils.data.Dataset):
    """Samples of different lengths."""

    def __len__(self):
        return 32

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randn(3 + i % 7, 4, generator=generator), i % 2


def pad(samples):
    rows, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(labels)


class PaddedMean(nn.Module):
    """Sees the padding."""

    def __init__(self):
        super().__init__()
        self.body = make_model(n_out=3)

    def forward(self, x):
        return self.body(x).mean(1)


def highest(pred, target):
    return pred.max()


@pytest.mark.parametrize(
    ("case", "wrong", "says", "reason"),
    [
        slow(
            lambda: make(cbs=Noise(1)),
            NAMES - {"samples"},
            {
                "losses": r"step 4: [\d.]+ on all ranks together, [\d.]+ on one process",
                "weights": r"^0.weight\[0, 0\]: [-\d.]+ on rank [01], [-\d.]+ on one process$",
            },
            "a callback that acts on some ranks alone: after step 3 the ranks differ in parameter 0.bias",
        ),
        (
            lambda: make(loss_func=lambda pred, target: F.cross_entropy(pred, target).square()),
            NAMES - {"samples"},
            {"losses": r"step 1: "},
            "the loss is not a mean over samples: give the Learner loss_weight=",
        ),
        slow(
            lambda: make(dls=DataLoaders(DataLoader(RandomData(), 8), device="cpu")),
            NAMES,
            {"samples": r"step 1: sample \d has other data on rank [01] than on one process"},
            "the dataset gives other data for a sample each time",
        ),
        soak(
            lambda: make(dls=make_dls(shuffle=False, sampler=RandomOrder())),
            NAMES,
            {"samples": r"step 1: rank 0 read sample \d+ in place of \d+"},
            "the sampler is random in itself",
        ),
        soak(
            lambda: make(Functional()),
            NAMES - {"samples"},
            {"weights": r"linear.weight\[0, 0\]: [-\d.]+ on rank [01], [-\d.]+ on one process"},
            "draws random numbers in a step",
        ),
        slow(
            lambda: make(cbs=Scaled(), opt_func=torch.optim.SGD),
            NAMES - {"samples"},
            {"losses": r"step 2: "},
            "gradients that depend on how a batch is split",
        ),
        soak(
            lambda: own_loss(3.0),
            NAMES - {"samples"},
            {"losses": r"step 1: "},
            "the model makes its own loss, and it is not known what that averages over: it is taken for the mean over",
        ),
        slow(
            lambda: make(PaddedMean(), dls=DataLoaders(DataLoader(Lengths(), 8, collate_fn=pad), device="cpu")),
            NAMES - {"samples"},
            {"losses": r"step 1: "},
            "each rank pads its piece of a batch to the longest sample in it",
        ),
        (lambda: make(metrics=highest), {"validation"}, {"validation": "metric 1: "}, "a metric that is not a mean"),
        slow(
            lambda: make(loss_func=lambda pred, target: 1e6 * F.cross_entropy(pred, target), metrics=highest),
            {"validation"},
            {"validation": "metric 1: "},
            "a metric that is not a mean",
        ),
        pytest.param(
            lambda: make(Mean()),
            {"weights"},
            {"weights": "mean"},
            "the model changes a buffer by the rank's own samples: ",
            marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore:each rank makes mean")],
        ),
        slow(lambda: make(cbs=MixUp()), NAMES - {"samples"}, {"losses": "step 1: "}, "draws random numbers in a step"),
        slow(lambda: make(NumpyNoise()), NAMES - {"samples"}, {"losses": "step 1: "}, "draws random numbers in a step"),
        soak(lambda: make(Centred()), {"validation", "predictions"}, {"predictions": r"output 0\[0, 0\]"}, "a metric"),
    ],
    ids=[
        "one rank",
        "loss",
        "dataset",
        "sampler",
        "dropout",
        "gradient",
        "own loss",
        "padding",
        "metric",
        "metric beside a large loss",
        "buffer",
        "mixing",
        "numpy",
        "predictions",
    ],  # fmt: skip
)
def test_a_planted_fault_is_found(case, wrong, says, reason, capsys):
    found, report, _ = verdict(capsys, case())
    assert found is False
    assert marked(report, "!!") == wrong
    assert marked(report, "ok") == NAMES - wrong
    for name, pattern in says.items():
        assert re.search(pattern, report[name][1]), report[name]
    mark, text = report["reason"]
    assert mark == "??"
    assert reason in text


class Fails(Callback):
    "On rank 1, in the second batch."

    def __init__(self, how):
        super().__init__()
        self.how = how

    def after_batch(self):
        if distributed.rank() == 1 and self.iter == 1:
            print("not seen")
            self.how()


def raise_error():
    raise LookupError("no such thing")


def test_an_error_on_a_rank_is_shown(capsys):
    found, _, out = verdict(capsys, make(cbs=Fails(raise_error)))
    assert found is False
    assert out.startswith("check_distributed: 2 CPU processes against 1: rank 1 failed\n  Traceback")
    assert "LookupError: no such thing" in out
    assert "test_ranks.py" in out
    assert "not seen" not in out


@pytest.mark.slow
def test_an_error_of_the_learner_itself_is_the_single_process(capsys):
    def loss_func(pred, target):
        raise LookupError("no such loss")

    out = verdict(capsys, make(loss_func=loss_func))[2]
    assert "no such loss" in out
    empty = make()
    empty.dls.loaders[1] = DataLoader(make_classes(0), 4)
    assert "the validation loader is empty: its dataset has 0 samples" in verdict(capsys, empty)[2]


@pytest.mark.soak
def test_a_process_that_dies_is_named(capsys):
    found, _, out = verdict(capsys, make(cbs=Fails(lambda: os.kill(os.getpid(), signal.SIGKILL))))
    assert found is False
    assert "rank 1 failed" in out
    assert "it ended with code -9" in out


@pytest.mark.soak
def test_a_process_that_hangs_is_ended(capsys):
    began = time.monotonic()
    found, _, out = verdict(capsys, make(cbs=Fails(lambda: time.sleep(100))), timeout=8)
    assert found is False
    assert time.monotonic() - began < 60
    assert re.search("not finished when time was up: .*rank 1", out)


# The learner stays as it is


def state_of(learn):
    opt = {i: dict(state) for i, state in learn.opt.state_dict()["state"].items()}
    return {
        "weights": weights(learn.model),
        "opt": {f"{i} {k}": v.clone() for i, state in opt.items() for k, v in state.items()},
        "groups": repr([{k: v for k, v in g.items() if k != "params"} for g in learn.opt.param_groups]),
        "seeds": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "own": learn.dls.train.generator.get_state(),
        "values": (learn.recorder.values, list(learn.recorder.losses), list(learn.recorder.lrs)),
        "attributes": {k: id(v) for k, v in vars(learn).items()},
        "loaders": [(id(dl), sorted(vars(dl)), dl.pin_memory) for dl in learn.dls.loaders],
        "modules": [(type(m), m.training, getattr(m, "p", None)) for m in learn.model.modules()],
        "types": {p.dtype for p in learn.model.parameters()},
        "device": repr(learn.dls),  # says whether it was chosen
        "cbs": list(map(id, learn.cbs)),
    }


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (batch_norm_and_dropout, "-- left out dropout was off (1), BatchNorm used its running statistics (1)"),
        slow(Single, "cannot compute in: RuntimeError: mat1 and mat2 must have the same dtype"),  # which stays as it is
    ],
)
def test_a_right_learner_passes_and_is_untouched(model, says, capsys, tmp_path):
    class Saves(Callback):
        def after_fit(self):
            self.learn.save("model")

    dls = make_dls(generator=torch.Generator().manual_seed(3))
    learn = make(model(), dls=dls, path=tmp_path / "learner")
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    learn.add_cb(Saves())
    learn.model.share_memory()
    before = state_of(learn)
    check_that_it_passes(learn, says, capsys)
    after = state_of(learn)
    for name in before:
        if name in ("weights", "opt"):
            assert same_weights(before[name], after[name]), name
        elif name == "seeds":
            assert torch.equal(before[name][0], after[name][0])
            assert before[name][1:] == after[name][1:]
        elif name == "own":
            assert torch.equal(before[name], after[name])
        else:
            assert before[name] == after[name], name
    assert not (tmp_path / "learner").exists()


@pytest.mark.slow
def test_the_learners_loader_workers_live_on(capsys):
    others = set(psutil.Process().children())  # a pool of ranks, for one
    learn = make(dls=make_dls(num_workers=1, persistent_workers=True, multiprocessing_context="fork"))
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    (worker,) = set(psutil.Process().children()) - others
    assert verdict(capsys, learn)[0]
    assert set(psutil.Process().children()) - others == {worker}
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert set(psutil.Process().children()) - others == {worker}
    end_workers(learn.dls)


@pytest.mark.soak
def test_in_a_script_that_has_trained():
    out = run_script("check_distributed.py", "trained", way="python")
    assert "equal" in out.splitlines()
    assert len(out.splitlines()) == 8, out


@pytest.mark.soak
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_however_the_parent_ends_its_processes_do(signum, script_env, short_path):
    env = script_env | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(short_path)}
    command = [python(), str(SCRIPTS / "check_distributed.py"), "stuck"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored, as in the background of a shell
    try:
        run = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.stdout.readline() == "ready\n"
    children = []
    while len(children) < 6:  # three processes, each with a loader worker
        time.sleep(0.1)
        children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signum)
    out, err = run.communicate(timeout=300)
    assert run.returncode == -signum
    assert out == ""
    assert ("KeyboardInterrupt" in err) == (signum == signal.SIGINT)
    assert psutil.wait_procs(children, timeout=60)[1] == []
    if signum == signal.SIGINT:
        assert list(short_path.iterdir()) == []


# Where it cannot be called


def test_under_a_launcher_it_says_where_to_call_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="rank 0 of 2 already: call it in a plain `python` process"):
        check_distributed(make())


def test_the_check_of_ranks_is_refused_during_a_fit():
    learn = make(cbs=Callback(before_fit=lambda cb: check_distributed(cb.learn)))
    with pytest.raises(RuntimeError, match="called during 'fit'"):
        learn.fit(1)


def test_a_model_without_shapes_is_refused():
    with pytest.raises(ValueError, match=r"0.weight of Sequential has no shape .*learn.validate\(\)"):
        check_distributed(make(nn.Sequential(nn.LazyLinear(3))))


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_told(capsys):
    found, report, _ = verdict(capsys, make(loss_func=lambda pred, target: pred.sum() * torch.nan))
    assert found is True
    assert report["losses"] == (
        "??",
        "NaN or infinite values, alike on one process: step 1, step 2, step 3, step 4, step 5",
    )


@pytest.mark.parametrize("wrong", [{"n": 1}, {"n": 2.0}, {"steps": 0}])
def test_bad_numbers_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"got {name}={value!r}; it is a whole number"):
        check_distributed(make(), **wrong)


@pytest.mark.slow
def test_a_process_that_can_fork_no_more_says_so():
    def refuse():  # what torch's autograd says in a fork of a process that has trained on a machine with a GPU
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    with pytest.raises(RuntimeError, match="call it before the first fit"):
        check_distributed(make(cbs=Fails(refuse)))
