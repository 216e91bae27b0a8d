"""Trainings on tables, pictures and texts drawn from a seed: ranks equal one process, and resumed runs whole ones.

Workers, and what is looked at or saved, change nothing. A test that fails prints its job.
"""

import random
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rank_pool import Ranks
from text_jobs import Bag, Next, OwnNext, make_texts
from torch import nn

import learnerkit as lk
from learnerkit import ImageData, TabularData, TextData, tabular_learner, text_learner, vision_learner

pytestmark = pytest.mark.filterwarnings("ignore")  # some jobs are doubtful, and say so

ROOMS = (
    *("a text", "a truth value", "few numbers", "a number"),
    *("class", "classes", "numbers", "points", "masks"),
    *("a class of texts", "next tokens", "next tokens of its own"),
)
TABLES, PICTURES = ROOMS[:4], ROOMS[4:9]
CLASSES = (*ROOMS[:3], "class", "a class of texts")

OPTIONS = {
    "n": (37, 24, 50), "bs": (8, 7), "workers": (0, 2),
    "weights": (None, "balanced"), "augment": (False, True), "mix": (False, True),
    "opt": ("adamw", "momentum"),
    "accumulate": (None, {"n_batches": 2}, {"n_samples": 20}), "clip": (False, True), "ema": (False, True),
    "precision": (False, True), "save": (False, True), "overfit": (None, 1, 2), "parts": (False, True),
    "every": (None, 2), "first": ("fit", "one cycle", "fine tune"), "second": ("fit", "fine tune", "steps"),
    "stop": ("after_batch", "before_batch", "after_step", "before_validate"), "stop_at": tuple(range(2, 8)),
    "saved": (1, 2, "epoch"),
}  # fmt: skip

OPTS = {"adamw": torch.optim.AdamW, "momentum": partial(torch.optim.SGD, momentum=0.9)}

QUICK = (41, 46, 61)  # pictures, texts and a table, which stop in mid-epoch after a checkpoint
SLOW = dict.fromkeys(QUICK[1:], pytest.mark.slow)
MARKS = {i: [] if i == QUICK[0] else SLOW.get(i, pytest.mark.soak) for i in range(120)}
seeds = pytest.mark.parametrize("seed", [pytest.param(i, marks=marks) for i, marks in MARKS.items()])


def draw(seed, ranks=1):
    """Draw a job; several ranks are to come to the numbers of one process."""
    drawn = random.Random(seed)
    job = {name: values[0] if drawn.random() < 0.5 else drawn.choice(values) for name, values in OPTIONS.items()}
    job |= {"seed": seed, "room": ROOMS[seed % len(ROOMS)]}
    if job["room"] not in CLASSES:
        job["weights"] = None
    if job["room"] in TABLES:
        job["workers"] = 0  # tables are read in whole batches
    if job["room"] not in PICTURES or ranks > 1:
        job["mix"] = job["augment"] = False  # each rank draws by itself
    if job["mix"] or job["room"] == "next tokens of its own":
        job["parts"] = False
    if job["parts"]:
        job["precision"] = False
    print(job)
    return job


def make_table(job):
    """The loaders of a table with gaps, text of numbers, and dates."""
    rng, n = np.random.default_rng(job["seed"]), job["n"]
    kind = rng.integers(0, 3, n)
    df = pd.DataFrame({
        "colour": rng.choice(["red", "green", None], n), "a": np.where(rng.random(n) < 0.2, np.nan, kind),
        "written": [f"{x:.3f}" for x in rng.normal(size=n)], "b": rng.normal(size=n) * 1000,
        "day": pd.date_range("2024-01-01", periods=n, freq="17D"),
    })  # fmt: skip
    targets = np.array(["p", "q", "r"])[kind], kind > 0, kind + 4, kind * 2.0 + rng.normal(size=n)
    df["y"] = dict(zip(TABLES, targets, strict=True))[job["room"]]
    data = TabularData.from_df(df, "y", valid=0.3, dates="day", seed=job["seed"])
    return data.dataloaders(job["bs"], weights=job["weights"], device="cpu")


def make_pictures(job):
    """The loaders of noise with a bright square."""
    rng, items, targets = np.random.default_rng(job["seed"]), [], []
    for _ in range(job["n"]):
        h, w, c, x, y = (int(rng.integers(*bounds)) for bounds in ((10, 16), (10, 16), (0, 3), (0, 5), (0, 5)))
        picture, mask = rng.integers(0, 120, (h, w, 3), dtype=np.uint8), np.zeros((h, w), np.uint8)
        picture[y : y + 5, x : x + 5, c], mask[y : y + 5, x : x + 5] = 250, c
        items.append(picture)
        targets.append({
            "class": "uvw"[c], "classes": [name for k, name in enumerate("uvw") if (c + k) % 2], "numbers": [c, x],
            "points": [[x, y], [x + 5, y + 5]], "masks": mask,
        }[job["room"]])  # fmt: skip
    named = {"classes": list("uvw")} if job["room"] in ("classes", "masks") else {}
    data = ImageData.from_items(items, targets, targets=job["room"], size=12, **named)
    kwargs = {"weights": job["weights"], "num_workers": job["workers"], "device": "cpu"}
    return data.dataloaders(job["bs"], augment=job["augment"], **kwargs)


def make_text_loaders(job):
    texts, labels = make_texts(job["n"], job["seed"])
    data = TextData.from_texts(texts, labels if job["room"] in CLASSES else None, vocab_size=60)
    kwargs = {"weights": job["weights"], "num_workers": job["workers"], "device": "cpu"}
    return data.dataloaders(tokens=8 * job["bs"], seq_len=6, **kwargs)


def halves(model):
    first, *rest = model.parameters()
    return [[first], rest]


def in_double(module, args, kwargs):
    """Give a model numbers of 64 bits, of which sums hardly depend on their order."""
    return tuple(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in args), kwargs


def make(job, folder, cbs):
    """The learner of a job."""
    lk.set_seed(job["seed"])
    room, options = job["room"], {"opt_func": OPTS[job["opt"]], "cbs": cbs, "path": folder}
    metrics = ["accuracy", lk.AccumMetric(lk.accuracy, name="right")] if job["room"] in CLASSES else None
    if room in TABLES:
        dls = make_table(job)
        learn = tabular_learner(dls, (8, 5), metrics or lk.mae, splitter=halves, **options)
    elif room in PICTURES:
        dls = make_pictures(job)
        body = [nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        network = nn.Sequential(*body, nn.Flatten(), nn.Linear(6, 5))
        outputs = {"class": (3,), "classes": (3,), "numbers": (2,), "points": (2, 2)}.get(room, (1,))
        head = nn.Sequential(nn.Flatten(), nn.Linear(54, int(np.prod(outputs))), nn.Unflatten(1, outputs))
        if room == "masks":
            learn = lk.unet_learner(dls, network, metrics=[lk.Dice, "accuracy"], norm=None, **options)
        else:
            learn = vision_learner(dls, network, metrics=metrics, custom_head=head, **options)
    else:
        dls = make_text_loaders(job)
        model = {ROOMS[-3]: Bag, ROOMS[-2]: Next, ROOMS[-1]: OwnNext}[room](dls.data.vocab_size)
        options |= {"splitter": halves} if metrics else {}
        options |= {"loss_func": nn.CrossEntropyLoss()} if room == "next tokens" else {}
        learn = text_learner(dls, model, metrics or lk.perplexity, **options)
    learn.model.double().register_forward_pre_hook(in_double, with_kwargs=True)
    if isinstance(learn.loss_func, nn.Module):
        learn.loss_func.double()
    return learn


class Stopped(Exception):
    """Ends a job in mid-fit."""


def stop(cb, calls, job):
    if (cb.training or job["stop"] == "before_validate") and next(calls) == job["stop_at"]:
        raise Stopped


def look(cb):
    """Look at results and predictions in mid-fit."""
    if cb.training and cb.iter == 1:
        cb.learn.validate()
        cb.learn.get_preds(0)


def save(learn, folder):
    """Save in each way between two fits, and load."""
    learn.load(learn.save(Path(folder, "model")))
    learn.load_state_dict(learn.state_dict())
    learn.export(Path(folder, "whole.safetensors"))


FITS = {
    "fit": lambda learn: learn.fit(2, 1e-2), "steps": lambda learn: learn.fit(n_steps=5, lr=1e-2),
    "one cycle": lambda learn: learn.fit_one_cycle(2, 1e-2), "fine tune": lambda learn: learn.fine_tune(1, 1e-2),
}  # fmt: skip


def run(job, folder, how="whole"):
    """Train; return what a job comes to on this rank. If it is "stopped", it leaves a checkpoint to be "resumed"."""
    cbs = [
        job["accumulate"] and lk.GradientAccumulation(**job["accumulate"]), job["clip"] and lk.GradientClip(0.3),
        job["ema"] and lk.EMA(0.9), job["precision"] and lk.MixedPrecision("fp16", init_scale=256.0, growth_interval=3),
        job["overfit"] and lk.OverfitBatch(job["overfit"]), job["parts"] and lk.SplitBatch(parts=2),
        job["every"] and lk.ValidateEvery(job["every"]), job["mix"] and lk.MixUp(),
        job["save"] and lk.SaveModelCallback(fname=Path(folder, "best")),
        how == "looked at" and lk.Callback(after_batch=look, order=65),
        how in ("stopped", "resumed")
        and lk.CheckpointCallback(Path(folder, "checkpoints"), every=job["saved"], resume=True),
        how == "stopped" and lk.Callback(**{job["stop"]: partial(stop, calls=count(1), job=job)}, order=70),
    ]  # fmt: skip
    learn, rows = make(job, folder, [cb for cb in cbs if cb]), []
    with suppress(Stopped), learn.no_bar(), learn.no_logging(), learn.distrib_ctx(split_batches=True):
        for name in ("first", "second"):
            FITS[job[name]](learn)
            frame = learn.recorder.to_frame()
            rows.append({name: frame[name].astype(float).tolist() for name in frame if name.startswith("valid")})
            rows.append(frame["train_loss"].tolist())
            if how == "looked at":
                save(learn, folder)
        if not job["room"].startswith("next"):  # ranks pad the last block to other lengths
            rows.append(learn.get_preds()[0])
    weights = {name: value.clone() for name, value in learn.model.state_dict().items()}
    return {"weights": weights, "rows": rows, "drawn": torch.rand(2)}


@pytest.fixture
def on(rank_pools, tmp_path):
    """Runs a job on a number of ranks, and returns what it comes to on each."""

    def on(n, job, **kwargs):
        kwargs = {"job": job, "folder": str(tmp_path)} | kwargs
        return [run(**kwargs)] if n == 1 else rank_pools.run(Ranks(n), run, filters=["ignore"], **kwargs)

    return on


same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


@seeds
@pytest.mark.slow
def test_two_ranks_equal_one_process(on, seed):
    job = draw(seed, ranks=2)
    (expected,) = on(1, job)
    for found in on(2, job):
        found["drawn"] = expected["drawn"]  # each rank draws by itself
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, equal_nan=True)  # some losses are float32


@seeds
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.soak)], ids="{}-ranks".format)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(on, seed, n):
    job = draw(seed)
    whole = on(n, job)
    on(n, job, how="stopped")
    same(on(n, job, how="resumed"), whole)


@pytest.mark.slow
@seeds
def test_workers_and_what_is_looked_at_or_saved_change_nothing(on, seed):
    job = draw(seed)
    same(on(1, job | {"workers": 2}, how="looked at"), on(1, job | {"workers": 0}))
