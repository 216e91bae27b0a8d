"""`Learner.export`: the model of a learner as a file of weights, a program of torch.export, or ONNX."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from inspect import Parameter, signature
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learnerkit import arguments, distributed, files
from learnerkit.callbacks.precision import ChannelsLast, Compile, MixedPrecision
from learnerkit.callbacks.splitting import SplitBatch
from learnerkit.data.batches import loader_len, rows_of, to_device
from learnerkit.data.order import first_batch
from learnerkit.export import programs
from learnerkit.export.facts import KEY, Facts, facts_of
from learnerkit.files import CheckpointError, name_or_any_path, replacing, save_weights
from learnerkit.inspection.undoing import give_shapes, trial
from learnerkit.marks import collective
from learnerkit.state import Learner
from learnerkit.stores.paths import AnyPath
from learnerkit.text import did_you_mean, in_one_line
from learnerkit.utils import unwrap, warn
from learnerkit.values import map_batch, tensors_in

PROGRAM, ONNX = ".pt2", ".onnx"
SUFFIXES = (files.SAFETENSORS, PROGRAM, ONNX)
_PICKLES = (".pkl", ".pickle", ".pth", ".pt", ".bin", ".joblib")


def exported_path(fname: Any, folder: Path) -> AnyPath:
    """Return the place of an exported file.

    Args:
        fname: a plain name in `folder`, which without a known suffix gets that of weights; or a path or URL, as it is.
        folder: the folder for plain names.

    Raises:
        TypeError, ValueError: no name, or the suffix of another format.
    """
    if not isinstance(fname, str | AnyPath):
        raise TypeError(f"got fname={fname!r}; it is a name, a path or a URL")
    fname = name_or_any_path(fname)
    path = folder / fname if isinstance(fname, str) else fname
    if path.suffix in SUFFIXES:
        return path
    kinds = "'.pt2' (a program, which is loaded without code), '.safetensors' (weights, which need it) or '.onnx'"
    if path.suffix in _PICKLES:
        raise ValueError(
            f"got {path.name!r}: '{path.suffix}' files are pickles, which can run any code when they are read, and "
            f"learn.export writes none: end the name in {kinds}; learn.save and learn.load take '.pth'"
        )
    if not isinstance(fname, str):
        raise ValueError(f"got the path {str(path)!r}, whose end says no format: let it be {kinds}")
    if len(path.suffix) > 3 and (near := did_you_mean(path.suffix, SUFFIXES)):  # 'v1.2' is a name
        raise ValueError(f"got {path.name!r}, whose end is none of {kinds}{near}")
    return path.with_name(path.name + files.SAFETENSORS)


@collective
def export(learn: "Learner", fname: Any) -> AnyPath:
    """Write the file for `Learner.export` (see there)."""
    path = exported_path(fname, Path(learn.path) / learn.model_dir)
    if path.suffix == ONNX:
        require_onnx()
    if path.suffix != files.SAFETENSORS:
        arguments.check_whole(learn, f"learn.export to '{path.suffix}'")
    if learn.shards is not None:
        distributed.meet("learn.export")  # Rank 0 alone has only some rows.
    elif not distributed.is_main():
        return path
    if not distributed.is_main():
        with learn.as_validated():
            save_weights(unwrap(learn.model).state_dict(), path, writes=False)
        return path
    _warn_of_callbacks(learn)
    with distributed.alone(), learn.as_validated():
        give_shapes(learn)
        if path.suffix == files.SAFETENSORS:
            save_weights(unwrap(learn.model).state_dict(), path, {KEY: facts_of(learn).as_json()})
        else:
            _write_traced(learn, path)
    return path


def _warn_of_callbacks(learn: "Learner") -> None:
    """Warn of callbacks that may change what the model gets or returns in prediction: they are in no file."""
    names = [
        repr(cb)
        for cb in learn.cbs
        if cb.run and cb.run_valid and not cb.only_fit and (cb._owns("before_batch") or cb._owns("after_pred"))
        # These change no more than the rounding.
        if not isinstance(cb, MixedPrecision | ChannelsLast | Compile | SplitBatch)
    ]
    if names:
        warn(
            f"{', '.join(names)} may change batches or predictions, and only the model is exported: whoever loads it "
            "needs them too (load_learner(...).add_cbs(...)), or must do the same by other means"
            " (errors.html#export)"
        )


def require_onnx() -> None:
    """Refuse to begin without the packages that torch's exporter needs."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ImportError(f"learn.export to '.onnx' needs {' and '.join(missing)}: pip install 'learnerkit[onnx]'")


def _write_traced(learn: "Learner", path: AnyPath) -> None:
    args, kwargs, size = example(learn)
    facts = facts_of(learn, kwargs or None)
    safe_name = f"{path.stem}{files.SAFETENSORS}"
    names = list(kwargs) or input_names(learn, len(args))
    inputs = dict(zip(names, kwargs.values() or args, strict=True))
    _check_inputs(facts.model, inputs, size, safe_name)
    with predicting(learn, names) as predictor:
        program = programs.traced(predictor, args, kwargs, size, safe_name)
        # Checks on all samples, and on one, find programs that hold for the example's number of samples alone.
        batches = [(args, kwargs), map_batch(lambda t: t[:1] if t.ndim and len(t) == size else t, (args, kwargs))]
        try:
            expected = [predictor(*some, **named) for some, named in batches]
        except Exception as e:
            raise CheckpointError(
                f"torch.export cannot take {facts.model}: it fails on the first sample of a batch by itself, as a "
                f"model does whose batch is one graph ({in_one_line(e)}), and a program is for any number of samples. "
                f"Its weights alone can always be exported: learn.export({safe_name!r}) (errors.html#export)"
            ) from e
        cases = list(zip(map_batch(lambda t: t.cpu(), batches), expected, strict=True))

        def check(what: str, call: Callable) -> None:
            for (some, named), pred in cases:
                try:
                    result = call(*some, **named)
                except Exception as e:
                    raise CheckpointError(
                        f"{what} fails on a batch of {rows_of((some, named))} where the model does not "
                        f"({type(e).__name__}: {str(e)[:300]}), so no file was written; the weights can always be "
                        f"exported: learn.export({safe_name!r})"
                    ) from e
                programs.compare(result, pred, what, safe_name)

        if path.suffix == PROGRAM:
            programs.write(program, facts, path, lambda read: check("the exported program", read))
        else:
            axes = _axes(learn.dls.inputs, inputs)
            first = expected[0]
            outputs = ["pred"] if isinstance(first, Tensor) else None
            if isinstance(first, Mapping) and all(isinstance(t, Tensor) for t in first.values()):
                outputs = list(first)
            _write_onnx(program, facts, path, axes, outputs, check)


def _check_inputs(model: str, inputs: Mapping[str, Any], size: int, safe_name: str) -> None:
    """Refuse inputs that a program cannot have: by names that are none in Python, and a text for each sample.

    Raises:
        CheckpointError: there is one.
    """
    why = ""
    for name, value in inputs.items():
        if not name.isidentifier() or iskeyword(name):
            why = f"its input {name!r} has a name that is none of an argument in Python; rename the entry of the batch"
        elif isinstance(value, list | tuple) and len(value) in (1, size) and all(isinstance(x, str) for x in value):
            why = (
                f"its input {name!r} is a list of texts, one for each sample, of which a program takes no other "
                "number; name it in DataLoaders(ignore_keys=...) if the model does not need it"
            )
    if why:
        raise CheckpointError(
            f"torch.export cannot take {model}: {why}. Its weights alone can always be exported: "
            f"learn.export({safe_name!r}) (errors.html#export)"
        )


def input_names(learn: "Learner", n: int) -> list[str]:
    """Return the names of `n` inputs that a model takes by position, from the loaders or from its `forward`."""
    names = list(learn.dls.inputs)
    if len(names) != n:
        arguments = signature(unwrap(learn.model).forward).parameters.values()
        names = [each.name for each in arguments if each.kind is Parameter.POSITIONAL_OR_KEYWORD][:n]
    return names if len(names) == n else [f"x{i}" for i in range(n)]


def _axes(known: Mapping[str, Sequence[str]], inputs: Mapping[str, Any]) -> dict[str, Any]:
    "Name the axes of the inputs whose length is free, by their numbers."

    def axes(name: str, t: Tensor) -> dict[int, str]:
        names = [*known.get(name, ()), *(f"{name}_{i}" for i in range(1, t.ndim))][: t.ndim - 1]
        return dict(enumerate(["batch", *names]))

    return {name: map_batch(partial(axes, name), value, lambda x: None) for name, value in inputs.items()}


def example(learn: "Learner") -> tuple[tuple, dict[str, Any], int]:
    """Return the inputs of the first batch of validation, or of training, as arguments, and the number of samples.

    They are on the device. A single sample is doubled, and so are texts of a single token.

    Raises:
        ValueError: there is no batch, or it could not be read again.
    """
    dls = learn.dls
    dl: Any = next((dl for dl in (dls.valid, dls.train) if dl is not None and loader_len(dl) != 0), None)
    if dl is None or hasattr(dl, "__next__"):
        why = "has no data" if dl is None else "has a loader that can be read only once"
        raise ValueError(
            f"a model is traced from a batch, and the learner {why}: give it a DataLoader, or export the weights "
            "(.safetensors)"
        )
    batch = to_device(first_batch(dl), dls.device)
    inputs, _ = dls.split(batch)
    size = dls.batch_size(batch) if dls.batch_size is not None else rows_of(inputs)
    # A program of a view, such as the tokens before the last, would refuse inputs that are none.
    inputs = map_batch(lambda t: t.contiguous() if t.layout == torch.strided else t, inputs)
    if size == 1:
        inputs, size = map_batch(lambda t: torch.cat([t, t]) if t.ndim and len(t) == 1 else t, inputs), 2
    if not isinstance(inputs[0], Mapping):
        return inputs, {}, size
    kwargs = dict(inputs[0])
    for name, axes in dls.inputs.items():
        if tuple(axes) == ("tokens",) and name in kwargs and kwargs[name].shape[1] == 1:
            kwargs[name] = torch.cat([kwargs[name]] * 2, 1)  # torch takes a single token for a property, too
    return (), kwargs, size


@contextmanager
def predicting(learn: "Learner", names: list[str]) -> Iterator[programs.Predictor]:
    """Yield the plain model in eval mode, to be traced; restore learner and model at the end."""
    with trial(learn, unwrap(learn.model)), torch.no_grad():
        yield programs.Predictor(learn, names).eval()


def _write_onnx(
    program: Any, facts: Facts, path: AnyPath, axes: dict[str, Any], outputs: list[str] | None,
    check: Callable[[str, Callable], None],
) -> None:  # fmt: skip
    """Write ONNX with torch's exporter, and run it on the example if onnxruntime is there."""
    try:
        with warnings.catch_warnings(action="ignore"):
            exported: Any = torch.onnx.export(
                program, dynamo=True, verbose=False, output_names=outputs, dynamic_shapes=axes
            )
        exported.model.metadata_props[KEY] = facts.as_json()
    except Exception as e:
        reason: BaseException = e
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise CheckpointError(
            f"torch's exporter to ONNX cannot take {facts.model}: {in_one_line(reason)}. Its weights "
            f"alone can always be exported: learn.export({path.stem + files.SAFETENSORS!r})"
        ) from e
    with replacing(path) as temporary:
        exported.save(str(temporary), external_data=False)  # one file, also of more than a gigabyte
        files.sync(temporary)
        if find_spec("onnxruntime") is not None:
            check("the ONNX file under onnxruntime", _Runtime(temporary))


@dataclass
class _Runtime:
    """An ONNX file, run by onnxruntime on the CPU."""

    file: Path

    @cached_property
    def session(self) -> Any:
        """The session, which is made when it is first needed: onnxruntime has not all operations for all types."""
        import onnxruntime

        return onnxruntime.InferenceSession(self.file.read_bytes(), providers=["CPUExecutionProvider"])

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        names = [each.name for each in self.session.get_inputs()]
        given = kwargs if kwargs.keys() >= set(names) else dict(zip(names, tensors_in((args, kwargs)), strict=True))
        return [torch.from_numpy(out) for out in self.session.run(None, {name: given[name].numpy() for name in names})]
