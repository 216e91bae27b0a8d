"""A check on the user's own learner: a few steps on several CPU processes against the same steps on one."""

import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from learnerkit import distributed, optim, run_state
from learnerkit.arguments import check_count
from learnerkit.callback import Callback, running
from learnerkit.callbacks.augmentation import CutMix, MixUp
from learnerkit.callbacks.progress import ProgressCallback
from learnerkit.checkpoints.callback import CheckpointCallback
from learnerkit.data.batches import on_host
from learnerkit.data.iterable import LoaderView
from learnerkit.data.order import has_index, in_order, with_batches
from learnerkit.data.stream import Seeded
from learnerkit.distributed import seeds
from learnerkit.endings import ExceptionReport
from learnerkit.events import CancelFitException
from learnerkit.inspection.undoing import check_shaped
from learnerkit.losses import UNKNOWN_COUNT, doubtful_count, loss_sums
from learnerkit.marks import collective, not_collective
from learnerkit.metrics import DEPENDS_ON_CUT
from learnerkit.parallel.data_parallel import DataParallelCallback
from learnerkit.parallel.distributed import DistributedCallback
from learnerkit.parallel.loaders import RankLoader
from learnerkit.preflight.report import OK, WRONG, Finding, Report, doubtful, fine, problem, unchecked
from learnerkit.processes.forks import LATE, cause, join_forks, run_in_forks
from learnerkit.state import Learner, State
from learnerkit.text import counted, escaped, first_few
from learnerkit.torch_internals import BatchNorm, Dropout
from learnerkit.utils import unwrap
from learnerkit.values import digests, map_batch, same, tensors_in

TOLERANCE = 1e-5
"""The difference that counts as rounding: a share of a tensor's largest value, or for weights of the largest update."""

DOUBLE = 1e-10
"""The largest share that rounding in float64 alone makes up; more is that of float32."""


@not_collective("the ranks are forks of this process")
def check_distributed(learn: "Learner", n: int = 2, steps: int = 5, timeout: float = 120.0, **kwargs: Any) -> bool:
    """Train a few steps on `n` CPU processes and on one, compare the two, and print a report. Needs no GPU.

    Compared are the samples that each rank read, losses and weights; then, on the first validation samples (all of an
    iterable dataset), loss, metrics and predictions. The processes are forks of this one and split each batch; they
    compute in float64 where the learner can; what computes in float32 nevertheless, in all or in part, agrees up to the
    rounding of float32 alone, and the report says so. In them `learn.path` is a temporary directory. The learner itself
    is left as it is.

    Differences that are intended are left out, and the report says so: dropout is off, and BatchNorm uses its running
    statistics. The learner's callbacks run; take those that write elsewhere than to `learn.path` out with
    `learn.removed_cbs`.

    Args:
        learn: a learner that can train under DDP.
        n: processes, 2 or more.
        steps: training batches, at most.
        timeout: seconds for all of it.
        kwargs: further arguments of `DistributedCallback`, such as `wrap` or `find_unused_parameters`; the check itself
            sets `split_batches`, `sync_bn` and `timeout`.

    Returns:
        Whether both are equal up to rounding (`TOLERANCE`).

    Raises:
        RuntimeError: under a launcher, during a fit, or where processes cannot be forked (any more).
        ValueError: `n` below 2 or `steps` below 1.
    """
    _check_call(learn, n, steps)
    callback = DistributedCallback(split_batches=True, sync_bn=False, timeout=timeout / 3, **kwargs)
    host = _on_host(learn)
    end = time.monotonic() + timeout
    left_out = []
    joins = [partial(join_forks, rank=rank, n=n, wait=timedelta(seconds=timeout)) for rank in range(n)]
    for dtype in (torch.float64, None):
        runs = run_in_forks([partial(_run, learn, *host, steps, dtype, callback, join) for join in (None, *joins)], end)
        failed = sorted((r.order, job, r.traceback) for job, r in enumerate(runs) if isinstance(r, ExceptionReport))
        late = [job for order, job, _ in failed if order == LATE.order]
        if not failed or late:
            break
        left_out = [f"float64, which the learner cannot compute in: {cause(failed[0][2])}"]
    title = f"check_distributed: {n} CPU processes against 1"
    if failed:
        who = ["the single process", *(f"rank {rank}" for rank in range(n))]
        _, first, error = failed[0]
        if "fork-based multiprocessing" in error:  # torch's autograd raises this once it has threads for a GPU.
            raise RuntimeError(
                "check_distributed cannot fork this process any more, as it has trained where torch sees a GPU: call "
                "it before the first fit, or in a process started with CUDA_VISIBLE_DEVICES= (empty)"
                " (errors.html#check-distributed)"
            )
        print(f"{title}: {who[first]} failed\n{indent(escaped(error.rstrip()), '  ')}")
        if others := [who[job] for job in late if job != first]:
            print(f"  not finished when time was up: {', '.join(others)}")
        return False
    one, *ranks = runs
    steps, size = len(one["steps"]), len(one["steps"][0]["samples"])
    print(
        f"{title}, {counted(steps, 'step')} of {counted(size, 'sample')}; differences up to {TOLERANCE:.0e} count as "
        "rounding"
    )
    report = Report(entry="check-distributed")
    findings = _compare(one, ranks)
    if "reason" in findings and findings["samples"].mark == OK and callback.comm_hook is not None:
        findings["reason"] = doubtful(
            f"comm_hook={callback.comm_hook!r} rounds the gradients on their way: leave it out for this check"
        )
    for topic, finding in findings.items():
        report.add(topic, [finding])
    if left_out := left_out + one["left_out"]:
        report.add("left out", [unchecked(", ".join(left_out))])
    return report.close()


def _check_call(learn: "Learner", n: int, steps: int) -> None:
    check_count("n", n, least=2)
    check_count("steps", steps)
    if distributed.is_joined() or distributed.world_size() > 1:
        raise RuntimeError(
            f"check_distributed starts processes of its own, and this one is rank {distributed.rank()} of "
            f"{distributed.world_size()} already: call it in a plain `python` process or a notebook, without a launcher"
        )
    check_shaped([learn.model])
    # A fork would end the store of a notebook's workers.
    within = "distrib_ctx" if vars(learn)["_workers"] else learn.task
    if within is not None:
        raise RuntimeError(f"check_distributed was called during {within!r}; call it before, or between two runs")


# What each process does


def _on_host(learn: "Learner") -> tuple[list[tuple[Tensor, Tensor]], State]:
    """Return the learner's tensors, each with a copy, and the state of the run without those of the model.

    The copies, and the tensors of the state, are on the host: a child cannot reach a GPU that its parent has used.
    """
    held = (learn.model, learn.loss_func, *chain.from_iterable(vars(cb).values() for cb in learn.cbs))
    modules = [x for x in held if isinstance(x, nn.Module)]
    tensors = chain(optim.parameters_of(learn.opts), *((*m.parameters(), *m.buffers()) for m in modules))
    state = run_state.state_dict(learn)
    del state["model"]
    return [(t, t.detach().cpu()) for t in tensors], on_host(state)


@collective
def _run(
    learn: "Learner",
    tensors: list[tuple[Tensor, Tensor]],
    state: State,
    steps: int,
    dtype: torch.dtype | None,
    callback: DistributedCallback,
    join: Callable[[Path], None] | None,
    folder: Path,
) -> dict:
    """Train and predict, and return what is to be compared. The learner is a copy, as this process is a fork.

    Args:
        learn: the copy.
        tensors, state: as `_on_host` returns them.
        steps: training batches, at most.
        dtype: the type to compute in; `None`: the learner's own.
        callback: makes the learner of a rank train under DDP.
        join: makes the process a rank, with the store in that folder; `None`: it is the single one.
        folder: the directory of all processes.
    """

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if dtype is not None and t.is_floating_point() else t

    if dtype is not None:
        torch.set_default_dtype(dtype)
    for t, value in tensors:
        t.data, t.grad = cast(value.clone()), None  # a clone, as the parent's may be in shared memory
    _keep_apart(learn, folder / ("ranks" if join else "one"))
    few = learn.dls.loaders[1] = _first_batches(learn.dls.train if learn.dls.valid is None else learn.dls.valid, steps)
    notes, left_out = _Notes(steps), _make_deterministic(learn.model)

    def prepare(cb: Callback) -> None:
        learn.xb, learn.yb = map_batch(cast, (learn.xb, learn.yb))
        notes.seeds = seeds.seed_states()

    learn.add_cbs([Callback(before_batch=prepare, order=-1000), notes])
    if join:
        join(folder)
        learn.add_cb(callback)
    for expected in (re.escape(UNKNOWN_COUNT), f"metric .* {DEPENDS_ON_CUT}"):  # The report says it.
        warnings.filterwarnings("ignore", expected)
    state = map_batch(lambda t: cast(t.clone()), state)
    run_state.put_trained(learn, state)
    run_state.put_rest(learn, state)  # This restores random states, too: Python reseeds in a fork.
    start = [p.detach().clone() for p in learn.model.parameters()]
    learn.fit(1)
    if not notes.steps:
        raise RuntimeError("the fit ended before its first step was over: has a callback cancelled it?")
    updates = [p.detach() - q for p, q in zip(learn.model.parameters(), start, strict=True)]
    weights = {k: t.clone() for k, t in unwrap(learn.model).state_dict().items() if isinstance(t, Tensor)}
    values, outputs = learn.validate(dl=few), tensors_in(list(learn.get_preds(dl=few)))
    return {
        "steps": notes.steps,
        "sums": loss_sums(learn),
        "unknown": notes.unknown,
        "draws": notes.draws,
        "weights": weights,
        "update": max(map(_largest, updates)),
        "validation": {f"metric {i}" if i else "loss": torch.tensor(value) for i, value in enumerate(values)},
        "predictions": {f"output {i}": t for i, t in enumerate(outputs)},
        "left_out": left_out,
    }


def _keep_apart(learn: "Learner", path: Path) -> None:
    """Keep a copy of a learner from the device, the workers, the files and the terminal of its parent."""
    learn.dls._device = torch.device("cpu")
    for i, dl in enumerate(learn.dls.loaders):
        if isinstance(dl, DataLoader):  # The copy keeps the parent's workers from ending.
            learn.dls.loaders[i] = with_batches(dl, pin_memory=False, copied_from=(dl, learn.dls._twins))
    learn.path, learn.logger = path, lambda row: None
    learn.say = lambda text: None  # type: ignore[method-assign]
    learn.path.mkdir(exist_ok=True)
    learn.remove_cbs([ProgressCallback, DataParallelCallback, DistributedCallback, CheckpointCallback])


def _first_batches(dl: Any, n: int) -> Any:
    """Return the first `n` batches of a loader in dataset order, the last one a sample short for uneven shares."""
    with suppress(ValueError):  # a loader of whole batches is read in its own order
        dl = in_order(dl, "1")
    if not _has_indices(dl):
        return dl
    if batches := list(islice(dl.batch_sampler, n)):  # else the fit says why there are none
        batches[-1] = batches[-1][: max(1, len(batches[-1]) - 1)]
    return with_batches(dl, batch_sampler=batches)


def _has_indices(dl: Any) -> bool:
    return has_index(dl) and dl.batch_sampler is not None


def _make_deterministic(model: nn.Module) -> list[str]:
    """Switch dropout off, and say which intended differences between ranks are not compared."""
    dropouts = 0
    for module in model.modules():
        name = "p" if isinstance(module, Dropout) else "dropout"
        if isinstance(module, (Dropout, nn.RNNBase, nn.MultiheadAttention)) and getattr(module, name):
            setattr(module, name, 0.0)
            dropouts += 1
    left_out = {"dropout was off": dropouts, "BatchNorm used its running statistics": len(_norms(model))}
    return [f"{what} ({n})" for what, n in left_out.items() if n]


def _norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, BatchNorm) and m.track_running_stats]


def _noted(drawn: list[list[str]], sampler: Any) -> Iterator:
    """Draw from a batch sampler, and note the indices."""
    for batch in sampler:
        items = batch.items if isinstance(batch, Seeded) else batch
        drawn.append([str(i) for i in (items.tolist() if isinstance(items, Tensor) else items)])
        yield batch


class _Notes(Callback):
    """Notes each step after all other callbacks have acted, and ends the fit after the last one wanted."""

    order = 1000
    run_valid = False
    only_fit = True

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.steps: list[dict] = []
        self.drawn: list[list[str]] = []
        self.draws = False  # whether a step draws random numbers
        self.seeds: tuple = ()
        self.unknown = ""  # a doubt about the count of the model's own loss

    def before_train(self) -> None:
        learn = self.learn
        self.draws = any(running(learn.cbs, kind) for kind in (MixUp, CutMix))
        for norm in _norms(learn.model):
            norm.eval()
        holder, name = (learn.dl, "loader") if isinstance(learn.dl, RankLoader) else (learn, "dl")
        loader = getattr(holder, name)
        if _has_indices(loader):
            noted = LoaderView(loader.batch_sampler, partial(_noted, self.drawn))
            setattr(holder, name, with_batches(loader, batch_sampler=noted))

    def after_loss(self) -> None:
        self.draws |= not same(seeds.seed_states(), self.seeds)
        self.unknown = doubtful_count(self.learn)

    def after_batch(self) -> None:
        learn, size = self.learn, self.learn.batch_size
        columns = [t for t in tensors_in(learn.batch) if t.ndim and len(t) == size]
        hashes = iter(digests(t[i] for i in range(size) for t in columns))
        data = [[next(hashes) for _ in columns] for _ in range(size)]
        names = (self.drawn[learn.iter] if self.drawn else list(map(str, data))) if size else []
        if len(data) != len(names):  # A collate_fn may pack samples.
            data = [[]] * len(names)
        has_loss = size and learn.loss is not None
        step = {
            "samples": list(zip(names, data, strict=True)),
            "shapes": [list(t.shape[1:]) for t in columns],
            "loss": float(learn.loss) if has_loss else 0.0,
            "count": float(learn.loss_count) if has_loss else 0.0,
            "state": run_state.state_table(learn),
        }
        self.steps.append(step)
        if len(self.steps) == self.wanted:
            raise CancelFitException


# The comparison


def _compare(one: dict, ranks: list[dict]) -> dict[str, Finding]:
    """Return the finding on each topic; where something is wrong, with the likely reason."""
    steps = list(zip(one["steps"], zip(*(run["steps"] for run in ranks), strict=False), strict=False))
    lengths = [len(run["steps"]) for run in (one, *ranks)]
    wrong_samples, reason = _compare_samples(steps)
    if not wrong_samples and len(set(lengths)) > 1:
        wrong_samples = f"one process took {lengths[0]} steps, the ranks took {lengths[1:]}"
    total = sum(len(step["samples"]) for step in one["steps"])
    right = f"each global batch the same, each sample once ({counted(total, 'sample')})"
    alone = {f"step {i}": _loss([step], one["sums"]) for i, (step, _) in enumerate(steps, 1)}
    together = {f"step {i}": _loss(parts, one["sums"]) for i, (_, parts) in enumerate(steps, 1)}
    findings = {
        "samples": problem(wrong_samples) if wrong_samples else fine(right),
        "losses": _judge_equal(alone, [together]),
        "weights": _judge_equal(one["weights"], [run["weights"] for run in ranks], one["update"]),
        **{name: _judge_equal(one[name], [run[name] for run in ranks]) for name in ("validation", "predictions")},
    }
    if wrong := {name for name, finding in findings.items() if finding.mark == WRONG}:
        first_alike = torch.isclose(alone["step 1"], together["step 1"], rtol=1e-6, equal_nan=True)
        findings["reason"] = doubtful(reason or _likely_reason(one, steps, wrong, bool(first_alike)))
    return findings


def _likely_reason(one: dict, steps: list[tuple], wrong: set[str], first_alike: bool) -> str:
    """Return the likely reason of a difference.

    Args:
        one: the results of the single process.
        steps: its notes of each step, and those of the ranks.
        wrong: the topics that differ.
        first_alike: the losses of step 1 are equal.
    """
    if "weights" in wrong and (apart := _first_apart(steps)):
        if "differ in buffer" in apart:
            return f"the model changes a buffer by the rank's own samples: {apart}"
        return f"a callback that acts on some ranks alone: {apart}"
    if one["draws"]:
        return (
            "the model or a callback draws random numbers in a step (dropout as a function?), which each rank does for "
            "itself: switch that off for this check"
        )
    if one["unknown"]:
        return one["unknown"]
    if any(part["shapes"] not in ([], step["shapes"]) for step, parts in steps for part in parts):
        return (
            "each rank pads its piece of a batch to the longest sample in it, so that the model sees other padding "
            "than on one process: pad to a fixed length in the collate_fn, or let the model leave the padding out"
        )
    if not first_alike:
        return (
            "the loss is not a mean over samples: give the Learner loss_weight=, a function of the targets (or of the "
            "model's output and the targets) that counts what it averages over; or a prediction depends on the other "
            "samples of its batch"
        )
    if wrong & {"samples", "losses", "weights"}:
        return "gradients that depend on how a batch is split: by a callback, a `_backward`, or a buffer of the model"
    return "a metric that is not a mean over samples (see AccumMetric), or a prediction that depends on its batch"


def _compare_samples(steps: list[tuple]) -> tuple[str, str]:
    """Describe the first difference in the samples read, and its likely reason; two empty texts if there is none."""
    for number, (step, parts) in enumerate(steps, 1):
        mine = step["samples"]
        theirs = [(rank, part["shapes"], *sample) for rank, part in enumerate(parts) for sample in part["samples"]]
        if len(theirs) != len(mine):
            return f"step {number} has {len(theirs)} samples, and {len(mine)} on one process", _SAMPLER
        for (rank, shapes, name, data), (my_name, my_data) in zip(theirs, mine, strict=True):
            if name != my_name:
                return f"step {number}: rank {rank} read sample {name} in place of {my_name}", _SAMPLER
            # Where batches are padded to their longest sample, shapes may differ.
            if data != my_data and shapes == step["shapes"]:
                return f"step {number}: sample {name} has other data on rank {rank} than on one process", _DATASET
    return "", ""


_SAMPLER = (
    "the sampler is random in itself: let it draw from torch's or python's generators, which learnerkit seeds alike"
)
_DATASET = (
    "the dataset gives other data for a sample each time (random augmentation?): make them depend only on the sample's "
    "index for this check"
)


def _loss(parts: Iterable[dict], sums: bool) -> Tensor:
    """Return the loss of a step over all samples, from those of its parts."""
    total = sum(part["loss"] if sums else part["loss"] * part["count"] for part in parts if part["count"])
    count = 1.0 if sums else sum(part["count"] for part in parts)
    return torch.tensor(total / count if count else float("nan"), dtype=torch.float64)


def _first_apart(steps: list[tuple]) -> str:
    """Return the first difference between the states of the ranks, which are equal bit by bit under DDP."""
    for number, (_, parts) in enumerate(steps, 1):
        first, *others = (part["state"] for part in parts)
        for name in first:
            if any(other.get(name) != first[name] for other in others):
                return f"after step {number} the ranks differ in {name}"
    return ""


def _judge_equal(mine: dict[str, Tensor], others: list[dict[str, Tensor]], update: float | None = None) -> Finding:
    """Compare named tensors with those of each rank, or of all together; name the first difference beyond rounding.

    Rounding makes up a share of `update`, the largest update, or of each tensor's own largest value.
    """
    of = "values" if update is None else "updates"
    greatest = max(map(_largest, mine.values()), default=0.0) if update is None else update
    largest, single = 0.0, ""
    for (what, a), rank in product(mine.items(), range(len(others))):
        # A value near 0, such as a mean of differences, is compared with 1: it may be computed from larger ones.
        scale = max(_largest(a), min(1.0, greatest)) if update is None else update
        b, who = others[rank][what], f"rank {rank}" if len(others) > 1 else "all ranks together"
        if a.shape != b.shape:
            return problem(f"{what}: {tuple(b.shape)} on {who}, {tuple(a.shape)} on one process")
        allowed = TOLERANCE * scale + (100 * torch.finfo(a.dtype).eps * _largest(a) if a.is_floating_point() else 0.0)
        apart = ~torch.isclose(_wide(a), _wide(b), rtol=0.0, atol=allowed, equal_nan=True)
        if apart.any():
            at = tuple(apart.nonzero()[0].tolist())
            return problem(f"{what}{list(at) or ''}: {b[at]:.6g} on {who}, {a[at]:.6g} on one process")
        difference = _largest(_wide(a) - _wide(b))
        largest = max(largest, difference)
        if difference > DOUBLE * scale:
            single = ": rounding of float32, in which the learner computes, or a part of it"
    if odd := [what for what, a in mine.items() if not a.isfinite().all()]:
        return doubtful(f"NaN or infinite values, alike on one process: {first_few(odd)}")
    return fine(f"largest difference {largest:.1e}, {of} up to {greatest:.2g}{single}")


def _largest(t: Tensor) -> float:
    return float(_wide(t).abs().nan_to_num(0.0, 0.0).max()) if t.numel() else 0.0


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float64))
