"""`load_learner`: a learner that predicts, from a file that `Learner.export` has written. Nothing is unpickled."""

import json
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from learnerkit import distributed
from learnerkit.data.loaders import DataLoaders
from learnerkit.export import programs
from learnerkit.export.facts import KEY, Facts, NotExported, facts_of, read_facts
from learnerkit.export.writing import ONNX, PROGRAM, SUFFIXES, exported_path
from learnerkit.files import CheckpointError, notes_of
from learnerkit.marks import collective
from learnerkit.state import Learner
from learnerkit.stores.paths import AnyPath, StorePath
from learnerkit.text import first_few, in_one_line, printable
from learnerkit.utils import warn


class NoData:
    """Stands for the loaders of a learner that was loaded without data."""

    why_empty = "the learner was loaded without data; load_learner(..., dls=...) gives it some"

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator:
        return iter(())


class _OfPrepared(DataLoaders):
    """Loaders without batches that refuse raw inputs, as the learner was exported with what prepares them."""

    def test_dl(self, items: Any, bs: int | None = None, **loader_kwargs: Any) -> DataLoader:
        first = items[0] if isinstance(items, list | tuple) and items else items
        if _is_raw(first):
            raise ValueError(
                f"got {reprlib.repr(first)}; this learner was loaded without data=, and takes prepared inputs: raw "
                "ones need load_learner(..., data=...) with what prepared them: ImageData, TextData or TabularData"
            )
        return super().test_dl(items, bs, **loader_kwargs)


def _is_raw(item: Any) -> bool:
    "Tell whether an input, or a part of it, is no tensor yet: a path, a picture, a text, a table or `None`."
    if isinstance(item, Mapping | tuple | list):
        return any(map(_is_raw, item.values() if isinstance(item, Mapping) else item))
    return isinstance(item, str | Path | None) or type(item).__module__.partition(".")[0] in ("PIL", "pandas")


@collective
def load(
    make: type["Learner"], fname: Any, model: Any, dls: DataLoaders | None, data: Any, loss_func: Any,
    device: Any, path: str | Path, model_dir: str | Path,
) -> "Learner":  # fmt: skip
    """Make the learner for `load_learner` (see there), of the class `make`."""
    file = exported_path(fname, Path(path) / model_dir)
    if dls is not None and data is not None:
        raise ValueError("got dls= and data=; the loaders of data= have no batches, and take raw inputs")
    if dls is not None and device is not None:
        raise ValueError(f"got dls and device={device!r}; the device is that of dls")
    if file.suffix == ONNX:
        raise ValueError(
            f"{file} is for onnxruntime and the like; load_learner reads '.safetensors' and '.pt2': export one of them"
        )
    distributed.follow_rank0("learnerkit.load_learner")
    with file.copied() if isinstance(file, StorePath) else nullcontext(file) as local:
        _check_is_there(local)
        own = DataLoaders(NoData(), NoData(), device=device) if dls is None else dls
        program: programs.Program | None = None
        if file.suffix != PROGRAM:
            text = _record(local, file)
        elif model is not None:
            raise ValueError(f"{file} is a program that needs no model: leave model= out")
        else:
            program, text = programs.read(local, own.device)
        facts = read_facts(text, file)
        if data is not None:
            own = _prepared(data, facts.preprocessing, file, own.device)
        elif dls is None:
            if facts.preprocessing is not None:
                own = _OfPrepared(NoData(), NoData(), device=own.device)
            own.n_inp = facts.n_inp
            own.target_keys = own.target_keys if facts.target_keys is None else tuple(facts.target_keys)
            own.ignore_keys = tuple(facts.ignore_keys or ())
        if own.classes is None:
            own.classes = facts.classes
        if own.preprocessing is None:
            own.preprocessing = facts.preprocessing
        if program is None:
            made = _made(model, file, facts.model, own)
            model = made.model if isinstance(made, make) else made
            if not isinstance(model, nn.Module):
                raise TypeError(f"model={model!r} returned {made!r}; it must return an nn.Module")
        else:
            program.inputs, model = facts.inputs, program
        if loss_func is None and not (facts.own_loss and program is None):
            loss_func = NotExported(facts.decoding, facts.probabilities)
        learn = make(own, model, loss_func, path=path, model_dir=model_dir)
        if program is None:
            with distributed.alone():
                learn.load(local, with_opt=False)
        if dls is not None and distributed.is_main():
            _warn_of_other_data(learn, facts, file)
    model.eval()
    return learn


def _warn_of_other_data(learn: "Learner", facts: Facts, file: AnyPath) -> None:
    "Warn if the user's loaders number the classes, or prepare inputs, in another way than those of the export did."
    own = Facts(**json.loads(facts_of(learn).as_json()))
    mine, theirs = own.preprocessing or {}, facts.preprocessing or own.preprocessing or {}
    if facts.classes is not None and own.classes != facts.classes:
        warn(
            f"{file} was exported with the classes {first_few(facts.classes)}, and dls= have "
            f"{first_few(own.classes or ())}: what the model predicts gets wrong names, and is compared with the wrong "
            "targets, unless it is trained again; give the loaders the classes of the file (errors.html#export)"
        )
    elif other := [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]:
        warn(
            f"dls= prepare inputs in another way than the loaders with which {file} was exported ({first_few(other)}), "
            "so that the model may get other numbers for the same inputs: make the loaders as those were made, or give "
            "data= to predict for raw inputs (errors.html#export)"
        )


def _check_is_there(file: Path) -> None:
    if not file.is_file():
        exported = (p.name for p in file.parent.iterdir() if p.suffix in SUFFIXES) if file.parent.is_dir() else ()
        name, there = printable(str(file), 1000), first_few(sorted(exported), n=20)
        raise FileNotFoundError(f"there is no file {name}; exported there: {there or 'nothing'}")


def _prepared(data: Any, preprocessing: Any, file: AnyPath, device: Any) -> DataLoaders:
    "Return loaders without batches that turn raw inputs into those of the model."
    if preprocessing is None:
        raise ValueError(f"{file} has nothing of data={data!r}: it was exported by a learner of other data")
    try:
        return data.from_json(json.dumps(preprocessing)).dataloaders(device=device)
    except Exception as e:
        raise CheckpointError(f"the preprocessing in {file} is none of {data!r}: {in_one_line(e)}") from e


def _record(file: Path, shown: AnyPath) -> str | None:
    try:
        return notes_of(file).get(KEY)
    except Exception as e:  # random bytes cause several types of errors
        raise CheckpointError(f"{shown} is damaged, or not a safetensors file: {in_one_line(e)}") from e


def _made(model: Any, file: AnyPath, name: str, dls: DataLoaders) -> Any:
    "Return the user's model, or a learner with it, for the weights of a model of this name."
    if isinstance(model, nn.Module):
        return model
    if model is None:
        raise ValueError(
            f"{file} has the weights of a {name[:80]!r}, and no code: give load_learner(..., model=) the module, or "
            "the function or class that makes it, such as `lambda dls: vision_learner(dls, 'resnet18')`, whose dls "
            "have the classes. A '.pt2' export needs none"
            " (errors.html#export)"
        )
    if not callable(model):
        raise TypeError(f"got model={model!r}; it is a module, or the function or class that makes it, and no name")
    try:
        takes_loaders = next(iter(signature(model).parameters), None) == "dls"
    except ValueError:  # a function in C
        takes_loaders = False
    return model(dls) if takes_loaders else model()
