"""DDP from a real kernel and from real prompts: numbers, what comes back, what is shown, and every way to fail."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from kernel import Kernel, alive, gone
from launching import SCRIPTS, environment, run_script

pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

CELLS = """
import os, signal, threading, time
import torch
from torch import nn
from torch.utils.data import Dataset
from typing import NamedTuple
from learnerkit import *
from learnerkit.callbacks.schedule import SchedCos
from learnerkit.utils import unwrap


class Item(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Points(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(n))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return Item(self.x[i], (self.x[i].sum() > 0).long())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.two(self.one(x).relu())


class Where(Callback):
    def __init__(self, seen):
        super().__init__()
        self.seen, self.pids, self.kind, self.model_seen, self.opened = seen, {}, Where, None, None

    def before_fit(self):
        self.seen.append((distributed.rank(), distributed.world_size()))
        self.pids = dict(enumerate(distributed.all_gather(os.getpid())))
        self.model_seen = self.learn.model
        self.opened = threading.Lock()


def right(pred, target):
    return (pred.argmax(1) == target).float().mean()


def make_learner(**kwargs):
    set_seed(7)
    dls = DataLoaders.from_datasets(Points(120), Points(31), bs=16, num_workers=kwargs.pop("num_workers", 0))
    return Learner(dls, Net(), nn.CrossEntropyLoss(), metrics=[right, accuracy], **kwargs)


def children():
    import psutil
    helpers = "resource_tracker", "forkserver"  # Python's own, for shared memory and for starting workers: they stay
    commands = {p.pid: " ".join(p.cmdline()) for p in psutil.Process().children()}
    return [pid for pid, command in commands.items() if not any(helper in command for helper in helpers)]
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    try:
        assert kernel.run(CELLS).error == ""
        yield kernel
    finally:
        kernel.close()


def ask(kernel, expression):
    """The value of an expression in the kernel."""
    shown = kernel.run(f"import json; print(json.dumps({expression}))")
    assert shown.error == "", shown.traceback
    return json.loads(shown.text)


@pytest.fixture(autouse=True)
def no_process_stays(request):
    yield
    if "kernel" in request.fixturenames:
        assert ask(request.getfixturevalue("kernel"), "children()") == []


@pytest.mark.soak
def test_the_numbers_are_those_of_the_launcher(kernel, tmp_path):
    launched = run_script("notebook_job.py", "launched.json", nproc=2)
    assert "Traceback" not in launched
    source = (SCRIPTS / "notebook_job.py").read_text()
    shown = kernel.run(f"import sys; sys.argv = ['', {str(tmp_path / 'cell.json')!r}, '2']\n{source}")
    assert shown.error == "", shown.traceback
    here, there = (json.loads(Path(path).read_text()) for path in (tmp_path / "cell.json", "launched.json"))
    assert here == there


@pytest.mark.slow
def test_everything_comes_back(kernel):
    shown = kernel.run("""
seen = []
where = Where(seen)
learn = make_learner(cbs=where, num_workers=1)
model, opt, first = learn.model, learn.opt, {k: v.clone() for k, v in learn.model.state_dict().items()}
with learn.distrib_ctx(nproc=2, split_batches=True):
    learn.fit(1, 1e-2)
    one = where.pids
    opt, kept = learn.opt, dict(learn.opt.state_dict()["state"][0])
    learn.fit_one_cycle(2, 1e-2)
    assert where.pids == one and os.getpid() not in one.values()
    assert learn.opt is opt and learn.opt.state_dict()["state"][0]["step"] == 3 * 8
    values = learn.validate()
    preds, targets = learn.get_preds()
assert learn.model is model and where.model_seen is model and isinstance(learn.model, Net)
assert where.kind is Where and where.seen is seen and seen == [(0, 2)] * 4 and where.learn is learn
assert any((model.state_dict()[k] != v).any() for k, v in first.items())
assert model.calls == 3 * 8, model.calls
assert len(learn.recorder.values) == 2 and len(learn.recorder.history) == 1 and len(learn.recorder.losses) == 16
assert learn.epoch == 1 and learn.train_iter == 16 and learn._workers is None and learn.task is None
assert values == learn.recorder.values[-1][1:], (values, learn.recorder.values)
assert not any(m.training for m in model.modules())
assert preds.shape == (31, 2)
torch.testing.assert_close(preds, model(learn.dls.valid_ds.x).detach())
assert (preds.argmax(1) == targets).float().mean() == values[-1]
assert next(learn.model.parameters()).grad is None
""")
    assert shown.error == "", shown.traceback
    # The user is told what cannot come back.
    assert shown.text.count("Where.opened (cannot be pickled)") >= 1, shown.text


@pytest.mark.soak
def test_loggers_go_on_from_call_to_call_and_after_the_workers(kernel):
    shown = kernel.run("""
import json
from pathlib import Path
lines, board = JSONLogger("workers.jsonl"), TensorBoardCallback("workers")
learn = make_learner(cbs=[lines, board])
with learn.distrib_ctx(nproc=2, split_batches=True):
    learn.fit(1, 1e-2)
    learn.fit(1, 1e-2)
learn.fit(1, 1e-2)
records = [json.loads(line) for line in Path("workers.jsonl").read_text().splitlines()]
assert [r["step"] for r in records[1:] if "epoch" not in r] == list(range(1, 25)), records
assert len(records) == 1 + 24 + 3 and records[0]["config"]["ranks"] == 2
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(board._id)
found.Reload()
assert [e.step for e in found.Scalars("step/lr")] == list(range(1, 25))
assert [e.step for e in found.Scalars("accuracy")] == [8, 16, 24]
""")
    assert shown.error == "", shown.traceback


@pytest.mark.soak
def test_what_belongs_together_stays_together(kernel):
    "Objects shared by several, optimizers of a callback's own, and what loaders, modules, cells and classes hold."
    shown = kernel.run("""
import functools

count, drawn, options = 0, [], {"seen": set()}

class Critic(Callback):
    runs = 0
    def __init__(self, notes, ema):
        super().__init__()
        self.net = nn.Linear(6, 1)
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.notes, self.ema, self.first = notes, ema, None
    @functools.cached_property
    def width(self):
        return 6
    def before_fit(self):
        type(self).runs += 1
        self.sched = torch.optim.lr_scheduler.StepLR(self.learn.opt, 1000)
        self.learn.add_cb(Callback(after_fit=lambda cb: drawn.append("added")))
    def before_batch(self):
        if self.training and self.iter == 0 and distributed.is_main():
            drawn.append(round(float(self.xb[0].sum()), 6))
    def after_step(self):
        global count
        torch.backends.cudnn.benchmark = False
        count += 1
        options["seen"].add(self.epoch)
        self.sgd.zero_grad(); self.net(self.x).mean().backward(); self.sgd.step()
        self.notes.append(self.width)
        unwrap(self.learn.model).note = ("steps", count)
        with torch.no_grad():
            self.ema.mul_(0.9).add_(unwrap(self.learn.model).one.weight, alpha=0.1)
    def after_fit(self):
        self.first = self.notes[0] if self.first is None else self.first

class Other(Callback):
    def __init__(self, notes):
        super().__init__()
        self.notes = notes
    def after_fit(self):
        self.notes.append(101)

set_seed(5)
notes, ema = [], torch.zeros(16, 6)
critic = Critic(notes, ema)
dls = DataLoaders(torch.utils.data.DataLoader(Points(96), 16, shuffle=True, generator=torch.Generator().manual_seed(3)),
                  torch.utils.data.DataLoader(Points(31), 16))
net = Net()
learn = Learner(dls, net, nn.CrossEntropyLoss(), cbs=[critic, Other(notes)])
before, hook = critic.net.weight.clone(), Critic.after_step
with learn.distrib_ctx(nproc=2, split_batches=True):
    learn.fit(1)
    moved, opt = critic.net.weight.clone(), learn.opt
    assert critic.sched.optimizer is learn.opt and isinstance(opt, torch.optim.AdamW)
    learn.fit(1)
    assert learn.opt is opt and not torch.equal(critic.net.weight, moved) and not torch.equal(moved, before)
    assert critic.sgd.param_groups[0]["params"][0] is critic.net.weight
    assert critic.notes is notes and notes == ([6] * 6 + [101]) * 2, notes
    assert critic.ema is ema and ema.abs().sum() > 0
    assert Critic.runs == 2 and Critic.after_step is hook and critic.first == 6
    assert count == 12 and options["seen"] == {0} and learn.model.note == ("steps", 12)
    sums = [x for x in drawn if x != "added"]
    assert len(sums) == 2 and sums[0] != sums[1], drawn
    assert drawn.count("added") == 2 and len(learn.cbs) == 7, (drawn, learn.cbs)  # the first has a copy
    learn.opt_func = torch.optim.SGD
    learn.fit(1, reset_opt=True)
    assert isinstance(learn.opt, torch.optim.SGD) and learn.opt.param_groups[0]["params"][0] is next(net.parameters())
    learn.fit(1)
learn.fit(1)
assert count == 30, count
""")
    assert shown.error == "", shown.traceback
    assert "Warning" not in shown.text, shown.text


@pytest.mark.soak
def test_weights_that_a_callback_exchanges_come_back(kernel):
    "Averages of the weights, which the model has in validation and in the end; weights that were replaced; and views."
    shown = kernel.run("""
class Average(Callback):
    def before_fit(self):
        self.averages = [p.detach().clone() for p in self.model.parameters()]
    def after_step(self):
        for a, p in zip(self.averages, self.model.parameters()):
            a.lerp_(p.detach(), 0.1)
    def swap(self):
        for a, p in zip(self.averages, self.model.parameters()):
            a.data, p.data = p.data, a.data
    before_validate = cleanup_validate = after_fit = swap

learn, average = make_learner(), Average()
weight = learn.model.one.weight
with learn.distrib_ctx(nproc=2, split_batches=True):
    learn.fit(2, 1e-2, cbs=average)
    in_worker = learn.recorder.values[-1][1]
    assert learn.validate()[0] == in_worker, (learn.validate(), in_worker)
assert abs(learn.validate()[0] - in_worker) < 1e-6 and learn.model.one.weight is weight
alone, average_alone = make_learner(), Average()
alone.fit(2, 1e-2, cbs=average_alone)
for one, other in zip([*learn.model.parameters(), *average.averages],
                      [*alone.model.parameters(), *average_alone.averages], strict=True):
    torch.testing.assert_close(one, other)

def shares(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()

class Exchange(Callback):
    def after_fit(self):
        m, cb = unwrap(self.learn.model), self
        cb.known.data, m.one.weight.data = m.one.weight.data, cb.known.data + 5
        m.two.bias.data = m.two.bias.data + 2
        m.two.weight = nn.Parameter(torch.full_like(m.two.weight, 9.0))
        m.none = torch.ones(2)
        cb.rows = m.one.weight.data.view(-1)
        cb.whole[4] = 7.0

learn, cb = make_learner(), Exchange()
m = learn.model
m.register_buffer("none", None)
vars(cb).update(known=torch.zeros(16, 6), whole=torch.zeros(9))
cb.part = cb.whole[3:6]
weight, part, seen = m.one.weight, cb.part, m.one.bias.detach()
with learn.distrib_ctx(nproc=2):
    learn.fit(1, 0.0, wd=0.0, cbs=cb)
    start = make_learner().model
    assert m.one.weight is weight and (weight == 5).all() and torch.equal(cb.known, start.one.weight)
    assert torch.equal(m.two.bias, start.two.bias + 2)
    assert isinstance(m.two.weight, nn.Parameter) and (m.two.weight == 9).all() and (m.none == 1).all()
    assert (cb.rows == 5).all()
    assert cb.part is part and part.tolist() == [0, 7, 0] and shares(part, cb.whole) and cb.whole.sum() == 7
    learn.fit(1)
    assert shares(seen, m.one.bias) and not torch.equal(seen, start.one.bias)
""")
    assert shown.error == "", shown.traceback
    assert "Warning" not in shown.text, shown.text


@pytest.mark.soak
def test_what_changes_in_place_comes_back(kernel):
    "Into the same lists, dicts and arrays; what is not pickled stays as it is, and so does a dataset."
    shown = kernel.run("""
import collections, random
import numpy as np

class Rows(Metric):
    runs = 0
    def __init__(self):
        super().__init__()
        self.add_state("rows", 0.0)
    def update(self, pred, *targets):
        self.rows += len(pred)
    def compute(self):
        self.runs += 1
        return self.rows

class Notes(Callback):
    def __init__(self):
        super().__init__()
        self.array, self.counter = np.zeros(3), collections.Counter()
        self.python, self.numpy, self.torch = random.Random(1), np.random.default_rng(1), torch.Generator()
        self.fixed, self.last = np.arange(3), collections.deque(maxlen=2)
        self.fixed.flags.writeable = False
        self.lock, self.to_remove = threading.Lock(), True
    def __getstate__(self):
        return {k: v for k, v in vars(self).items() if k != "lock"}
    def draw(self):
        return self.python.random(), float(self.numpy.random()), float(torch.rand((), generator=self.torch))
    def before_fit(self):
        self.lock = threading.Lock()
    def after_batch(self):
        with self.lock:
            self.array[1:] += 1
            self.counter["a"] += 1
            self.last.append(self.iter)
    def after_fit(self):
        self.drawn = self.draw()
        self.dls.valid_ds.x.zero_()
        vars(self).pop("to_remove", None)

notes, rows = Notes(), Rows()
kept = dict(vars(notes))
learn = make_learner(cbs=notes)
learn.metrics = [rows]
with learn.distrib_ctx(nproc=2):
    for n in (1, 2):
        learn.fit(1)
        assert notes.array is kept["array"] and notes.counter is kept["counter"] and notes.lock is kept["lock"]
        assert notes.array.tolist() == [0, n * 5, n * 5] and notes.counter == {"a": n * 5}
        assert list(notes.last) == [3, 0] and not hasattr(notes, "to_remove"), notes.last
        assert learn.metrics[0] is rows and rows.runs == n and learn.recorder.values[-1][2] == 31
        assert learn.dls.valid_ds.x.all()
again = Notes()
assert again.draw() != again.draw() == notes.drawn and again.draw() == notes.draw()
""")
    assert shown.error == "", shown.traceback
    assert "Warning" not in shown.text, shown.text


@pytest.mark.soak
def test_what_a_call_makes_comes_back(kernel):
    "Shapes of lazy layers, buffers that grow, two optimizers, averages and frozen layers; also after an error."
    shown = kernel.run("""
class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.steps = nn.LazyLinear(8), nn.LazyLinear(2), 0
        self.register_buffer("sizes", torch.zeros(0))
    def forward(self, x):
        if self.training:
            self.steps += 1
            self.sizes = torch.cat([self.sizes, torch.ones(1)])
        return self.head(self.body(x).relu())

class Two(Learner):
    def create_opt(self):
        body, head = ([*m.parameters()] for m in (unwrap(self.model).body, unwrap(self.model).head))
        return {"body": torch.optim.SGD(body, 0.1, momentum=0.9), "head": torch.optim.AdamW(head, 0.01)}

class Fails(Callback):
    order = 30
    def after_step(self):
        if self.train_iter == 3:
            raise ZeroDivisionError

def run(learn):
    learn.fit(2)
    for p in learn.model.body.parameters():
        p.requires_grad_(False)
    try:
        learn.fit(1, cbs=Fails())
    except ZeroDivisionError:
        pass
    return learn

def make():
    set_seed(3)
    dls = DataLoaders.from_datasets(Points(120), Points(31), bs=16)
    return Two(dls, Grows(), nn.CrossEntropyLoss(), cbs=EMA(0.9))

learn = make()
model = learn.model
with learn.distrib_ctx(nproc=2, split_batches=True):
    run(learn)
alone = run(make())
assert learn.model is model and type(model.body) is nn.Linear and model.body.in_features == 6, model
assert learn.opt["head"].param_groups[0]["params"][0] is model.head.weight and len(learn.opt) == 2
assert model.steps == alone.model.steps == len(model.sizes) and not model.body.weight.requires_grad
assert learn.ema.n_averaged == alone.ema.n_averaged and learn.train_iter == alone.train_iter == 3
for one, other in zip(model.state_dict().values(), alone.model.state_dict().values(), strict=True):
    torch.testing.assert_close(one, other)
ours, theirs = (l.opt["head"].state_dict()["state"][0]["exp_avg"] for l in (learn, alone))
torch.testing.assert_close(ours, theirs)
learn.fit(1)
""")
    assert shown.error == "", shown.traceback
    assert "could not come back" not in shown.text, shown.text


@pytest.mark.soak
def test_workers_find_the_largest_batch(kernel):
    shown = kernel.run("""
learn = make_learner()
with learn.distrib_ctx(nproc=2):
    found = learn.find_batch_size(bs=30)
assert (found.batch_size, found.effective, found.n_batches, [*found.tried]) == (15, 30, 1, [15]), found
assert learn.opt is None
""")
    assert shown.error == "", shown.traceback
    assert shown.text.count("15 samples fit (") == 1


@pytest.mark.soak
def test_features_of_callbacks_come_back_from_workers(kernel):
    "What they learn, change and show comes back as from a fit of the kernel's own."
    shown = kernel.run("""
from functools import partial
from pathlib import Path
from learnerkit.callbacks.lr_find import SUGGESTIONS

def halves(model):
    return [list(model.one.parameters()), list(model.two.parameters())]

def steep_one(lrs, losses, num_it):
    return lrs[0]

class Names(Callback):
    def before_fit(self):
        self.frozen = [n for n, p in unwrap(self.learn.model).named_parameters() if not p.requires_grad]

def run(learn):
    "Every verb and callback in turn, and what there is to see of it."
    facts, names = [], Names()
    before = [p.detach().clone() for p in learn.model.parameters()]
    found = learn.lr_find(num_it=30, start_lr=1e-4, suggest_funcs=(*SUGGESTIONS, steep_one))
    facts += [list(found), list(found._fields), found.steep_one == found[-1], learn.train_iter, learn.recorder.lrs]
    assert all(map(torch.equal, learn.model.parameters(), before))
    learn.lr_find(num_it=20, show_plot=False)
    learn.fine_tune(2, 1e-2, cbs=names)
    facts += [names.frozen, learn.recorder.values, learn.recorder.lrs, len(learn.recorder.history)]
    assert all(p.requires_grad for p in learn.model.parameters())
    learn.freeze()
    held = learn.model.one.weight.detach().clone()
    learn.fit(1, 1e-2, cbs=names)
    assert torch.equal(learn.model.one.weight, held) and not learn.model.one.weight.requires_grad
    learn.unfreeze()
    facts += [names.frozen]
    save = SaveModelCallback(fname="best")
    learn.fit(3, 0.3, cbs=save)
    facts += [save.best, save.best == learn.validate()[0], Path(save.last_saved_path).exists(), learn.recorder.values]
    learn.load("best", with_opt=False)
    facts += [learn.validate()]
    stop = EarlyStoppingCallback("right", min_delta=2.0, patience=2)
    learn.fit(9, 1e-3, cbs=stop)
    facts += [stop.best, len(learn.recorder.values), learn.epoch]
    learn.to_bf16().add_cbs([GradientClip(0.1), Compile(backend="eager")])
    learn.fit(1, 1e-3)
    assert unwrap(learn.model)._compiled_call_impl is None and learn.model.one.weight.dtype == torch.float32
    facts += [learn.recorder.metric_names, learn.recorder.values]
    learn.to_fp32().remove_cbs([GradientClip, Compile])
    sched = ParamScheduler({"lr": [SchedCos(0.0, 1e-3), SchedCos(1e-3, 1e-2)]})
    learn.fit(n_steps=13, lr=1e-3, cbs=[sched, ValidateEvery(5)])
    facts += [learn.recorder.hps["lr"], learn.train_iter, learn.n_steps, learn.recorder.values]
    preds, targets = learn.tta(n=2, batch_tfms=lambda x: x + 0.1, act=partial(torch.softmax, dim=1))
    facts += [preds.tolist(), targets.tolist(), learn.check()]
    facts += [[g["lr"] for g in learn.opt.param_groups], [p.tolist() for p in learn.model.parameters()]]
    return facts

learn = make_learner(splitter=halves, path="there")
with learn.distrib_ctx(nproc=2, split_batches=True):
    in_workers = run(learn)
""")
    assert shown.error == "", shown.traceback
    assert shown.pictures == 1, shown.pictures
    assert any(": stopping</td>" in page for page in shown.pages)  # among the rows of the table
    assert "all is well" in shown.text
    shown = kernel.run("""
import matplotlib.pyplot as plt
learn = make_learner(splitter=halves, path="here")
here = run(learn)
def close(a, b):
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(close, a, b))
    return abs(a - b) <= 2e-3 * max(abs(b), 1e-2) if isinstance(a, float) else a == b
for i, (one, other) in enumerate(zip(in_workers, here, strict=True)):
    assert close(one, other), (i, one, other)
""")
    assert shown.error == "", shown.traceback


@pytest.mark.soak
def test_settings_of_the_kernels_process_count_in_workers(kernel):
    shown = kernel.run("""
import sys
found = []
def look(cb):
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    found.append((torch.get_default_dtype(), deterministic, cudnn, os.environ.get("SET_LATE")))
learn = make_learner()
learn.dls = DataLoaders.from_datasets([(x.double(), y) for x, y in Points(64)], bs=16)
learn.model.double()
with learn.distrib_ctx(nproc=2):
    try:
        os.environ["SET_LATE"] = "yes"
        os.makedirs("late", exist_ok=True)
        open("late/late_module.py", "w").write("def hook(cb): pass")
        sys.path.append("late")
        import late_module
        learn.add_cb(Callback(after_epoch=late_module.hook))
        set_seed(1, reproducible=True)
        torch.backends.cudnn.deterministic = True
        torch.set_default_dtype(torch.float64)
        learn.fit(1, cbs=Callback(before_fit=look))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    def fails(row):
        raise OSError("the disk is full")
    learn.logger = fails
    try:
        learn.fit(3)
    except OSError as e:
        assert "disk is full" in str(e)
        learn.logger = lambda row: None
    learn.fit(2)
    assert learn.n_epoch == 2
assert found == [(torch.float64, True, (True, False), "yes")], found
""")
    assert shown.error == "", shown.traceback


@pytest.mark.soak
def test_what_is_changed_between_two_calls_counts(kernel):
    shown = kernel.run("""
learn = make_learner()
learn.no_bar()
with learn.distrib_ctx(nproc=2):
    learn.fit(1)
    for p in learn.model.one.parameters():
        p.requires_grad_(False)
    before = learn.model.one.weight.clone(), learn.model.two.weight.clone()
    learn.fit(1)
    assert torch.equal(learn.model.one.weight, before[0]) and not torch.equal(learn.model.two.weight, before[1])
    assert not learn.model.one.weight.requires_grad
    learn.metrics = {"r": right}
    learn.dls.train_ds.x.zero_()
    learn.add_cb(Callback(after_fit=lambda cb: cb.learn.__dict__.update(total=float(cb.dls.train_ds.x.abs().sum()))))
    learn.fit(1)
    assert learn.recorder.metric_names[3] == "r" and learn.total == 0.0
    shared = learn.get_preds(dl=learn.dls.train, act=torch.sigmoid)[0]
    assert len(shared) == 120 and shared.min() >= 0
""")
    assert shown.error == "", shown.traceback


@pytest.mark.soak
def test_rank_0_is_seen_live(kernel):
    shown = kernel.run("""
import matplotlib.pyplot as plt
from IPython.display import HTML
class Talks(Callback):
    def after_epoch(self):
        print(f"rank {distributed.rank()} says hello")
        if distributed.is_main():
            plt.figure(); plt.plot([1, 2]); plt.show()
    def after_fit(self):
        display(HTML(f"rank {distributed.rank()} displays"))
    def after_batch(self):
        time.sleep(0.02)
rows = []
learn = make_learner(cbs=Talks())
with learn.distrib_ctx(nproc=2):
    learn.fit(3)
    learn.logger = rows.append
    learn.fit(2)
""")
    assert shown.error == "", shown.traceback
    assert shown.text.count("rank 0 says hello\n") == 5
    assert "rank 1" not in shown.text
    assert [page for page in shown.pages if "displays" in page] == ["rank 0 displays"] * 2
    assert shown.pictures == 5
    table = shown.pages[0]
    assert table.count("<tr>") == 4
    assert ">right</th>" in table
    assert "<progress" not in table
    assert any("<progress" in text and "loss" in text for _, text in shown.times)
    moments = [moment for moment, text in shown.times if "hello" in text]
    assert moments[2] - moments[0] > 0.1  # as it is printed, not at the end
    assert ask(kernel, "len(rows)") == 2


def press_once(kernel, pressed, shown):
    """Press stop in the fit before which "now" is printed."""
    if "now" in shown.text and "loss" in shown.times[-1][1] and not pressed:
        pressed.append(True)
        kernel.stop()


@pytest.mark.soak
def test_stop_ends_at_a_step_and_leaves_what_was_learnt(kernel):
    pressed = []
    shown = kernel.run(
        """
class Slow(Callback):
    def after_batch(self):
        time.sleep(0.1)
learn = make_learner(cbs=Slow())
where = Where([])
with learn.distrib_ctx(nproc=2):
    learn.fit(1, cbs=where)
    pids, before = where.pids, learn.model.one.weight.clone()
    print("now")
    try:
        learn.fit(100)
    except KeyboardInterrupt:
        print("stopped")
    assert 0 < learn.train_iter < 400
    steps, weights = learn.train_iter, learn.model.one.weight.clone()
    assert not torch.equal(before, weights)
    assert len(learn.recorder.losses) == steps == learn.opt.state_dict()["state"][0]["step"] - 4
    learn.remove_cb(Slow)
    learn.fit(1, cbs=where)
    assert where.pids == pids
""",
        on_output=partial(press_once, kernel, pressed),
    )
    assert shown.error == "", shown.traceback
    assert "stopped" in shown.text
    assert pressed


@pytest.mark.soak
def test_stop_saves_a_checkpoint_from_which_the_cell_goes_on(kernel, tmp_path):
    pressed = []
    shown = kernel.run(
        f"""
class Slow(Callback):
    def after_batch(self):
        time.sleep(0.1)
learn = make_learner(cbs=[Slow(), CheckpointCallback({str(tmp_path)!r}, every=1000, resume=True)])
with learn.distrib_ctx(nproc=2):
    print("now")
    try:
        learn.fit(100)
    except KeyboardInterrupt:
        print("stopped")
    steps = learn.train_iter
    assert 0 < steps < 400
    saved = [name for name in os.listdir({str(tmp_path)!r}) if name.startswith("fit0-")]
    assert len(saved) == 1 and saved[0].endswith(f"step{{steps}}"), (saved, steps)
    learn.remove_cb(Slow)
    with learn.no_logging():
        learn.fit(steps // 4 + 1)
    assert learn.train_iter == 4 * (steps // 4 + 1)
    assert len(learn.recorder.losses) == learn.train_iter
""",
        on_output=partial(press_once, kernel, pressed),
    )
    assert shown.error == "", shown.traceback
    assert "stopped" in shown.text
    assert pressed


@pytest.mark.soak
def test_stop_in_a_cell_raises_there_and_a_second_press_kills(kernel):
    presses = []

    def press(shown):
        if "sleeping" in shown.text and len(presses) < 2 and (not presses or time.monotonic() > presses[-1] + 1):
            presses.append(time.monotonic())
            kernel.stop()

    begun = """
class Sleeps(Callback):
    def before_step(self):
        if distributed.is_main() and self.train_iter == 2:
            for i in range(100):
                print("sleeping", flush=True)
                time.sleep(0.5)
learn = make_learner()
before = learn.model.one.weight.clone()
with learn.distrib_ctx(nproc=2):
"""
    shown = kernel.run(begun + "    learn.fit(1, cbs=Sleeps())", on_output=press)
    assert shown.error == "KeyboardInterrupt"
    assert len(presses) == 2
    shown = kernel.run("""
assert torch.equal(before, learn.model.one.weight) and learn._workers is None and len(learn.cbs) == 3
with learn.distrib_ctx(nproc=2):
    learn.fit(1)
""")
    assert shown.error == "", shown.traceback


@pytest.mark.soak
def test_an_error_is_the_users_own(kernel):
    shown = kernel.run("""
class Broken(Exception): ...
class Bad(Callback):
    def before_step(self):
        if distributed.rank() == 1 and self.train_iter == 2:
            raise Broken("of its own making")
learn = make_learner()
with learn.distrib_ctx(nproc=2):
    try:
        learn.fit(1, cbs=Bad())
    except Broken as e:
        assert type(e) is Broken
        assert "raised in Bad.before_step" in e.__notes__
    where = Where([])
    learn.fit(1, cbs=where)
    learn.fit(1, cbs=Bad())
""")
    assert shown.error == "Broken"
    assert "on rank 1 of 2" in shown.traceback
    assert "Where.opened (cannot be pickled)" in shown.text
    where = r"Cell In\[\d+\], line \d+, in before_step\n +raise Broken\("
    assert re.search(where, shown.traceback), shown.traceback
    assert "_all_batches" not in shown.traceback
    assert shown.traceback.rstrip().endswith("raised in Bad.before_step")


@pytest.mark.slow
def test_an_error_of_a_callback_shows_two_cells(kernel):
    shown = kernel.run("""
class Bad(Callback):
    def before_step(self):
        raise ValueError("a bad sample")
make_learner().fit(1, cbs=Bad())
""")
    assert shown.traceback.rstrip().endswith("raised in Bad.before_step")
    assert "learner.py" not in shown.traceback
    assert len(shown.traceback.splitlines()) < 20


@pytest.mark.soak
def test_a_call_while_that_of_another_thread_goes_on_is_refused_and_disturbs_nothing(kernel):
    shown = kernel.run("""
learn, refused = make_learner(), []
def fit_again():
    try:
        learn.fit(1)
    except RuntimeError as e:
        refused.append(str(e))
def log(row):
    if not refused:
        thread = threading.Thread(target=fit_again)
        thread.start()
        thread.join()
learn.logger = log
with learn.distrib_ctx(nproc=2):
    learn.fit(2)
    thread = threading.Thread(target=learn.validate)
    thread.start()
    thread.join()
print(refused, learn.n_epoch)
""")
    assert shown.error == "", shown.traceback
    assert "fit was called while 'a run' of the same learner goes on in another thread" in shown.text
    assert shown.text.rstrip().endswith("] 2")


@pytest.mark.soak
def test_a_breakpoint_in_a_worker_is_an_error(kernel):
    shown = kernel.run("""
learn = make_learner(cbs=Callback(before_batch=lambda cb: breakpoint()))
with learn.distrib_ctx(nproc=2):
    learn.fit(1)
""")
    assert shown.error == "RuntimeError", shown
    assert "breakpoint() finds no input in a notebook's process" in shown.traceback
    assert "lambda cb: breakpoint()" in shown.traceback


@pytest.mark.soak
def test_a_killed_worker_is_named(kernel):
    shown = kernel.run("""
class Dies(Callback):
    def before_step(self):
        if distributed.rank() == 1 and self.train_iter == 2:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
learn = make_learner()
with learn.distrib_ctx(nproc=2, timeout=20):
    try:
        learn.fit(1, cbs=Dies())
    except RuntimeError as e:
        print("told:", e)
    learn.fit(1)
    learn.fit(1, cbs=Dies())
""")
    assert shown.error == "RuntimeError", shown
    assert "told: the worker of rank 1 was killed by signal 9 (SIGKILL)" in shown.text
    assert "the next call starts new workers" in shown.text
    assert "last words" in shown.text


@pytest.mark.soak
def test_what_cannot_be_sent_is_named(kernel):
    shown = kernel.run("""
learn = make_learner()
learn.dls.valid_ds.index = {"lock": threading.Lock()}
held = threading.Lock()
messages = []
with learn.distrib_ctx(nproc=2):
    for attempt in (lambda: learn.fit(1), lambda: learn.validate(cbs=Callback(before_fit=lambda cb: held.locked()))):
        try:
            attempt()
        except TypeError as e:
            messages.append(str(e))
        del learn.dls.valid_ds.index
        learn.dls.valid_ds.index = None
    learn.fit(1)
""")
    assert shown.error == "", shown.traceback
    first, second = ask(kernel, "messages")
    assert first.startswith("learn.dls.loaders[0]") or "valid_ds.index['lock']" in first or "index['lock']" in first, (
        first
    )
    assert "a lock, cannot be sent to the workers" in first
    assert "make them when they are first used" in first
    assert second.startswith("held (used by"), second


@pytest.mark.soak
def test_bad_options_of_workers_are_refused(kernel):
    shown = kernel.run("""
import pytest
learn = make_learner()
with pytest.raises(ValueError, match="nproc='2'; it is the number of processes, 1 or more"):
    learn.distrib_ctx(nproc="2")
with pytest.raises(TypeError, match="got the argument 'sinc_bn'.*did you mean 'sync_bn'"):
    learn.distrib_ctx(nproc=2, sinc_bn=True)
with learn.distrib_ctx():  # no GPU: trains here
    assert learn._workers is None and children() == []
    learn.fit(1)
with learn.distrib_ctx(nproc=1):
    assert learn._workers is None
with learn.distrib_ctx(nproc=2):
    with pytest.raises(ValueError, match="the learner is distributed already"):
        learn.distrib_ctx(nproc=2)
    with pytest.raises(RuntimeError, match="check_distributed was called during 'distrib_ctx'; call it before"):
        learn.check_distributed(n=2)
    learn.fit(1)
""")
    assert shown.error == "", shown.traceback


@pytest.mark.soak
def test_with_the_kernel_its_workers_go(tmp_path):
    kernel = Kernel(tmp_path)
    try:
        assert kernel.run(CELLS).error == ""
        shown = kernel.run("""
learn, where = make_learner(num_workers=2), Where([])
context = learn.distrib_ctx(nproc=2)
context.__enter__()
learn.fit(1, cbs=where)
print(list(where.pids.values()))
""")
        assert shown.error == "", shown.traceback
        workers = json.loads(re.search(r"\[\d+, \d+\]", shown.text)[0])
        assert len(workers) == 2
        assert all(map(alive, workers))
        # In the middle of a fit, with loader workers.
        busy = 'learn.fit(100, cbs=Callback(after_batch=lambda cb: (time.sleep(0.05), print("busy", flush=True))))'
        family = []

        def kill(shown):
            if "busy" in shown.text and not family:
                family.extend(p.pid for pid in workers for p in [psutil.Process(pid), *psutil.Process(pid).children()])
                os.kill(kernel.process_id, 9)
                raise StopIteration

        with pytest.raises(StopIteration):
            kernel.run(busy, on_output=kill)
        assert len(family) >= 2 + 2
        assert gone(family)
    finally:
        kernel.close()


PROMPT = f"""{CELLS}
learn = make_learner(default_cbs=True)
with learn.distrib_ctx(nproc=2):
    learn.fit(2, 1e-2)
    found = learn.validate()

print("ended", found == learn.recorder.values[-1][1:], children())
"""


@pytest.mark.gpu
def test_every_gpu_is_used_and_freed_again(kernel):
    """By plain `distrib_ctx()`, also in a kernel that has used CUDA before."""
    if (count := ask(kernel, "torch.cuda.device_count()")) < 2:
        pytest.skip("needs two GPUs")
    shown = kernel.run("""
torch.ones(9, device="cuda").sum().item()
devices, seen = range(torch.cuda.device_count()), []
learn = make_learner(cbs=Where(seen))
learn.validate()
free = [torch.cuda.mem_get_info(i)[0] for i in devices]
with learn.distrib_ctx():
    learn.fit(2)
    used = [before - torch.cuda.mem_get_info(i)[0] for i, before in zip(devices, free)]
time.sleep(3)
kept = [before - torch.cuda.mem_get_info(i)[0] for i, before in zip(devices, free)]
""")
    assert shown.error == "", shown.traceback
    assert ask(kernel, "seen") == [[0, 1], [0, count]]  # validate and fit
    assert min(ask(kernel, "used")) > 100 * 2**20  # a CUDA context alone takes more
    assert max(ask(kernel, "kept")) < 50 * 2**20
    assert ask(kernel, "next(learn.model.parameters()).device.type") == "cuda"


@pytest.mark.soak
@pytest.mark.parametrize("command", [["-i", "-q"], ["-m", "IPython", "--simple-prompt", "--no-banner"]])
def test_workers_train_from_a_prompt(command, tmp_path):
    "Lines are typed at a real terminal; rank 0 shows its table and bar in it."
    (tmp_path / "cells.py").write_text(PROMPT)
    # A prompt runs compound statements line by line; a file read at the prompt is typed text all the same.
    typed = f"exec(compile(open({str(tmp_path / 'cells.py')!r}).read(), '<typed>', 'exec'))\nexit()\n"
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    env = environment() | {"IPYTHONDIR": str(tmp_path), "TERM": "xterm", "PYTHON_HISTORY": os.devnull}
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=env,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(slave)
    os.write(master, typed.encode())
    text, end = b"", time.monotonic() + 400
    while time.monotonic() < end:
        if select.select([master], [], [], 0.5)[0]:
            try:
                text += os.read(master, 65536)
            except OSError:  # the other end is closed
                break
    assert process.wait(timeout=60) == 0, text.decode()
    os.close(master)
    shown = text.decode()
    assert "ended True []" in shown, shown
    assert "epoch  train_loss  valid_loss" in shown
    assert "epoch 1/2" in shown  # the bar
    assert "Traceback" not in shown


@pytest.mark.soak
def test_a_script_is_told_of_the_launcher(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{CELLS}\nlearn = make_learner()\nlearn.distrib_ctx(nproc=2)\n")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment(), capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "python -m learnerkit.launch --nproc 2 script.py" in done.stderr
