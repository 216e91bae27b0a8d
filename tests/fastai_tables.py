"""Writes `tests/fastai_tables.json`: numbers computed by fastai 2.8.12 itself, for tests that compare with it.

No test runs this script; fastai is not installed where they run. To make the file again, install fastai beside the
torch of an environment that has learnerkit's `[dev]` extra (here `$DEV/bin/python`), as it would bring its own:

    python3.11 -m venv fa
    echo "$($DEV/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \\
        > fa/lib/python3.11/site-packages/dev.pth
    fa/bin/pip install --no-deps fastai==2.8.12 fastprogress fasttransform fastdownload python-fasthtml plum-dispatch \\
        beartype rich starlette anyio itsdangerous python-multipart pandas scipy scikit-learn joblib narwhals \\
        threadpoolctl requests urllib3 idna certifi pyyaml
    fa/bin/python tests/fastai_tables.py > tests/fastai_tables.json

The keys of the file:

    versions      {fastai, torch}
    schedules     {lin, cos, exp, no, poly_0.5, poly_2}: {positions (21), values}, all from 1e-3 to 1e-1
    combined      {combine_scheds: pcts 0.3 0.5 0.2 of Cos(1e-3, 1e-1), Lin(1e-1, 5e-2), Exp(5e-2, 1e-4);
                  combined_cos: pct 0.3, from 1e-3 to 1e-1 to 1e-5}: {positions (41; 0.3 and 0.8 are joints), values}
    fits          {one_cycle, one_cycle_groups, flat_cos, flat_cos_half, sgdr, sgdr_joint}:
                  {args, n_epoch, n_iter, groups, types, steps}
                  args: {method, positional, and the keywords}, a slice as [start, stop]; groups: how many
                  types: the Python types of fastai's lr and mom
                  steps: {pct: [each step], lr: [each step: [each group]], mom: likewise}
    sgdr_mult_1   {error}: what fit_sgdr(cycle_mult=1) raises
    fine_tune     as one of fits, but groups: [each group: [names of its parameters]], and steps has
                  trains: [each step: [each group: [each parameter: whether it requires gradients]]]
                  The first n_iter steps are the frozen phase. Parameters 1.* are a BatchNorm's.
    set_hyper     [{form: number | slice_hi | slice_lo_hi | list, value, groups: how many, lr: [each group]}]
    suggestions   {curve: {lrs, losses, valley, slide, minimum, steep}}, or {error} where fastai's method raises
                  smooth_u, noisy, flat, diverges_early, decreasing: 85 points, what `lrs[10:-5]` leaves of 100
                  stopped: 50, as of a run that was ended early; short: 12
    lr_find       {converges, diverges}:
                  {args, x, y, bs, weight, bias, lrs, losses, valley, slide, minimum, steep, restored}
                  Plain SGD without momentum or decay, model Linear(3, 1) that begins with weight and bias, mean squared
                  error, no shuffling (step i takes batch i % 5). `lrs` and `losses` are all that was recorded, the
                  losses smoothed (beta 0.98, corrected for the start); suggestions are made of `[10:-5]` of them.
                  `diverges` is ended by stop_div at the 96th step, whose loss is recorded.

What fastai does with precision, for the tolerances of whoever compares:

- Schedules by themselves are Python floats, exact to the last digits. In combine_scheds (so in all fits) the limits and
  the position inside a section are float32: an error of about 1e-7 of the section's range, so a relative tolerance
  alone will not do where a schedule falls to nearly zero.
- Exactly at a joint the later section begins. But where the float32 sum of the limits is rounded up, the earlier one is
  at its end there: in both sgdr fits the last cycle so begins with one step at a rate of zero (steps 18 and 9, counted
  from 0), while the second cycle begins at the peak. That is a fault, not a rule.
- Hypers are Python floats or numpy float64 scalars (`types`), never tensors.
- `pct` is epoch / n_epoch at the start of an epoch, then adds 1 / (n_iter * n_epoch) at each step.
- The finder's smoothed losses are float32, and its suggestions are computed in float32; in `suggestions` the numbers
  given are float32 values exactly, so that a program in float64 sees the same.
"""

import contextlib
import json
import math
import sys
import tempfile

import fastai
import numpy as np
import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import (
    SchedCos,
    SchedExp,
    SchedLin,
    SchedNo,
    SchedPoly,
    combine_scheds,
    combined_cos,
    minimum,
    slide,
    steep,
    valley,
)
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastai.torch_core import params
from torch import nn

METHODS = {"valley": valley, "slide": slide, "minimum": minimum, "steep": steep}


def tabulate(sched, n):
    """A schedule's values at n positions from 0 to 1."""
    positions = [i / (n - 1) for i in range(n)]
    return {"positions": positions, "values": [float(sched(pos)) for pos in positions]}


def schedules():
    """Each schedule between two values."""
    ends = 1e-3, 1e-1
    scheds = {"lin": SchedLin(*ends), "cos": SchedCos(*ends), "exp": SchedExp(*ends), "no": SchedNo(*ends)}
    scheds |= {f"poly_{power}": SchedPoly(*ends, power) for power in (0.5, 2)}
    return {name: tabulate(sched, 21) for name, sched in scheds.items()}


def combined():
    """Schedules one after the other."""
    scheds = [SchedCos(1e-3, 1e-1), SchedLin(1e-1, 5e-2), SchedExp(5e-2, 1e-4)]
    return {
        "combine_scheds": tabulate(combine_scheds([0.3, 0.5, 0.2], scheds), 41),
        "combined_cos": tabulate(combined_cos(0.3, 1e-3, 1e-1, 1e-5), 41),
    }


class Watch(Callback):
    """Records what the optimizer has at each step."""

    order = 100

    def __init__(self):
        self.steps = {"pct": [], "lr": [], "mom": [], "trains": []}
        self.types = {}

    def before_step(self):
        self.steps["pct"].append(self.pct_train)
        for name in ("lr", "mom"):
            self.steps[name].append([float(hypers[name]) for hypers in self.opt.hypers])
            self.types[name] = type(self.opt.hypers[0][name]).__name__
        self.steps["trains"].append([[p.requires_grad for p in group] for group in self.opt.param_lists])


def split_3(model):
    """Three groups of parameters; the first one has a BatchNorm."""
    return [params(model[:2]), params(model[2]), params(model[3:])]


def make_loaders(x, y, bs):
    """Loaders of fixed data, unshuffled."""
    data = list(zip(x, y, strict=True))
    return DataLoaders(*(DataLoader(data, bs=bs, num_workers=0, shuffle=False) for _ in range(2)), device="cpu")


@contextlib.contextmanager
def learner(n_iter, **kwargs):
    """A learner of a small model, with n_iter batches an epoch, that prints nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    dls = make_loaders(torch.randn(8 * n_iter, 4), torch.randn(8 * n_iter, 1), bs=8)
    with tempfile.TemporaryDirectory() as folder:
        learn = Learner(dls, model, nn.MSELoss(), path=folder, **kwargs)
        with learn.no_bar(), learn.no_logging():
            yield learn


def plain(value):
    """A value as JSON has it."""
    return [value.start, value.stop] if isinstance(value, slice) else value


def record(method, n_iter, kwargs, groups=1, first=()):
    """What a verb of the learner sets at each step."""
    watch = Watch()
    with learner(n_iter, **({"splitter": split_3} if groups == 3 else {})) as learn:
        getattr(learn, method)(*first, **kwargs, cbs=watch)
    steps = {name: values for name, values in watch.steps.items() if name != "trains" or method == "fine_tune"}
    args = {"method": method, "positional": list(first), **{name: plain(value) for name, value in kwargs.items()}}
    return {
        "args": args,
        "n_epoch": learn.n_epoch,
        "n_iter": n_iter,
        "groups": groups,
        "types": watch.types,
        "steps": steps,
    }


def fits():
    """The rates and momenta of whole fits."""
    groups = {"lr_max": slice(1e-4, 1e-2), "div": 10.0, "div_final": 100.0, "pct_start": 0.4}
    sgdr = {"n_cycles": 3, "cycle_len": 2, "cycle_mult": 2, "lr_max": 4e-3}
    return {
        "one_cycle": record("fit_one_cycle", 5, {"n_epoch": 4, "lr_max": 3e-3}),
        "one_cycle_groups": record("fit_one_cycle", 5, {"n_epoch": 3, **groups}, groups=3),
        "flat_cos": record("fit_flat_cos", 5, {"n_epoch": 4, "lr": 3e-3}),
        "flat_cos_half": record(
            "fit_flat_cos", 5, {"n_epoch": 3, "lr": slice(1e-4, 1e-2), "pct_start": 0.5, "div_final": 10.0}, groups=3
        ),
        "sgdr": record("fit_sgdr", 3, sgdr),
        "sgdr_joint": record("fit_sgdr", 3, {**sgdr, "cycle_len": 1}),
    }


def sgdr_mult_1():
    """Cycles of one length divide by zero."""
    try:
        record("fit_sgdr", 3, {"n_cycles": 3, "cycle_len": 2, "cycle_mult": 1, "lr_max": 4e-3})
    except Exception as e:
        return {"error": type(e).__name__}
    raise AssertionError("fit_sgdr(cycle_mult=1) works")


def fine_tune():
    """The two phases of fine-tuning, and which parameters learn in each."""
    found = record("fine_tune", 5, {"base_lr": 2e-3, "freeze_epochs": 1}, groups=3, first=(2,))
    with learner(1, splitter=split_3) as learn:
        names = {p: name for name, p in learn.model.named_parameters()}
        found["groups"] = [[names[p] for p in group] for group in split_3(learn.model)]
    return found


def set_hyper():
    """Rates of groups, from each form that may be given."""
    found = []
    for groups in (1, 2, 3, 5):
        forms = {
            "number": 3e-3,
            "slice_hi": slice(1e-2),
            "slice_lo_hi": slice(1e-5, 1e-3),
            "list": [1e-4 * (i + 1) for i in range(groups)],
        }
        for form, value in forms.items():
            opt = SGD([[nn.Parameter(torch.zeros(1))] for _ in range(groups)], lr=1.0)
            opt.set_hyper("lr", value)
            lrs = [float(hypers["lr"]) for hypers in opt.hypers]
            found.append({"form": form, "value": plain(value), "groups": groups, "lr": lrs})
    return found


def suggest(lrs, losses):
    """What each method makes of a curve."""
    found = {}
    for name, method in METHODS.items():
        try:
            found[name] = float(method(lrs, losses, 100)[0])
        except Exception as e:
            found[name] = {"error": type(e).__name__}
    return found


def suggestions():
    """Suggestions for fixed curves."""
    lrs = 1e-7 * 1e8 ** (np.arange(100) / 100)
    rng = np.random.default_rng(0)
    t = np.linspace(0, 1, 85)
    u = 2.3 - 1.6 / (1 + np.exp(-18 * (t - 0.5))) + 3 * np.clip(t - 0.8, 0, None) ** 2 * 30
    curves = {
        "smooth_u": u,
        "noisy": u + 0.06 * rng.standard_normal(85),
        "flat": 2.3 + 0.002 * rng.standard_normal(85),
        "diverges_early": 2.3 - 0.4 * np.clip(t / 0.3, 0, 1) + np.exp(8 * np.clip(t - 0.35, 0, None)) - 1,
        "decreasing": 2.5 * np.exp(-1.7 * t**2),
    }
    curves["stopped"], curves["short"] = u[:50], curves["noisy"][30:42]
    found = {}
    for name, losses in curves.items():
        start = 40 if name == "short" else 10
        points = [torch.tensor(values, dtype=torch.float32) for values in (lrs[start : start + len(losses)], losses)]
        found[name] = {"lrs": points[0].tolist(), "losses": points[1].tolist(), **suggest(*points)}
    return found


def lr_find(**kwargs):
    """A run of the finder."""
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal((40, 3)).astype(np.float32).round(3))
    y = (x @ torch.tensor([[1.5], [-2.0], [0.5]]) + 0.3).round(decimals=3)
    y += torch.from_numpy(0.2 * rng.standard_normal((40, 1)).astype(np.float32).round(2))
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-0.5, 0.25, 0.125]]))
        model.bias.fill_(-0.25)
    before = {name: p.tolist() for name, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        learn = Learner(make_loaders(x, y, bs=8), model, nn.MSELoss(), opt_func=SGD, path=folder)
        with learn.no_bar():
            found = learn.lr_find(**kwargs, show_plot=False, suggest_funcs=tuple(METHODS.values()))
    after = {name: p.tolist() for name, p in learn.model.named_parameters()}
    lrs, losses = ([float(value) for value in values] for values in (learn.recorder.lrs, learn.recorder.losses))
    assert all(map(math.isfinite, losses))
    return {
        "args": kwargs,
        **{"x": x.tolist(), "y": y.tolist(), "bs": 8, **before, "lrs": lrs, "losses": losses},
        **found._asdict(),
        "restored": before == after,
    }


def main():
    """Print the file."""
    with contextlib.redirect_stdout(sys.stderr):
        tables = {
            "versions": {"fastai": fastai.__version__, "torch": torch.__version__},
            "schedules": schedules(),
            "combined": combined(),
            "fits": fits(),
            "sgdr_mult_1": sgdr_mult_1(),
            "fine_tune": fine_tune(),
            "set_hyper": set_hyper(),
            "suggestions": suggestions(),
            "lr_find": {
                "converges": lr_find(start_lr=1e-5, end_lr=0.3, num_it=100),
                "diverges": lr_find(start_lr=1e-7, end_lr=10, num_it=100),
            },
        }
    lines = (f"{json.dumps(name)}: {json.dumps(table)}" for name, table in tables.items())
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
