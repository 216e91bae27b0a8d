"""Programs of torch.export: a model that needs no code, traced from a batch, written, checked and read.

torch's reader is made for files that one trusts. It unpickles parts of an archive that say so, evaluates the text of
sizes, looks functions up by their names, and puts names into code that it runs. So what is not a tensor in a row, a
tensor operation, a name or the arithmetic of sizes is refused here before torch sees it.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from inspect import Parameter, Signature, signature
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from learnerkit import torch_internals
from learnerkit.export.facts import KEY, Facts
from learnerkit.files import CheckpointError, refuse_compressed, replacing, sync
from learnerkit.stores.paths import AnyPath
from learnerkit.text import in_one_line
from learnerkit.values import map_batch, tensors_in

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from learnerkit.learner import Learner


# Tracing


class Predictor(nn.Module):
    """The module that is traced: calls the model as the learner does, and returns the predictions of its output.

    Args:
        learn: the learner, whose `model` is the plain one.
        names: the names of the inputs in the program. torch needs to find them in the signature of `forward`: it has
            had several ways to take `**kwargs`.
    """

    def __init__(self, learn: "Learner", names: Sequence[str]) -> None:
        super().__init__()
        self.model = learn.model

        def forward(*args: Any, **kwargs: Any) -> Any:
            learn.batch, learn.xb = (kwargs, (kwargs,)) if kwargs else (args, args)
            try:
                learn._forward()
                return _plain(learn.pred)
            finally:
                learn.batch = learn.pred = learn.output = None
                learn.xb = ()

        named: Any = forward
        named.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        self.forward = named


def _plain(pred: Any) -> Any:
    """Return predictions in dicts, tuples and lists of Python: others could not be read from a file."""
    if isinstance(pred, Mapping):
        return {name: _plain(part) for name, part in pred.items()}
    if isinstance(pred, list):
        return [*map(_plain, pred)]
    return tuple(map(_plain, pred)) if isinstance(pred, tuple) else pred


def traced(predictor: Predictor, args: tuple, kwargs: dict[str, Any], size: int, safe_name: str) -> "ExportedProgram":
    """Trace a model into a program for any number of samples, and for other lengths where the model allows them.

    Args:
        predictor: the model, in eval mode.
        args, kwargs: a batch of its inputs.
        size: the samples in it, two or more: torch takes a single one for a property of the model.
        safe_name: a name for the file that can always be written, for the error.

    Raises:
        CheckpointError: torch.export cannot take the model.
    """
    from torch.export import Dim, export

    def shape(t: Tensor) -> dict[int, Any]:
        kinds = [Dim.AUTO if length > 1 else Dim.STATIC for length in t.shape]
        return dict(enumerate([Dim.DYNAMIC, *kinds[1:]] if t.ndim and len(t) == size else kinds))

    inputs = signature(predictor.forward).bind(*args, **kwargs).arguments
    try:
        # torch prints the whole graph of a model that it cannot take.
        with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            shapes = map_batch(shape, inputs, lambda x: None)
            # Code that branches on lengths is traced for one branch: the program itself checks that they belong to it.
            program = export(
                predictor, args, kwargs, dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True
            )
    except Exception as e:
        why = in_one_line(e).rstrip(".")
        if "inferred a static shape" in str(e):
            why = "its code makes a constant of the number of samples, as len(x) and int() do; x.shape[0] does not"
        elif "data-dependent expression" in str(e):
            why = "its code asks for values of tensors, as `if x.sum() > 0:` does"
        raise CheckpointError(
            f"torch.export cannot take {type(predictor.model).__name__}: {why}. Its weights "
            f"alone can always be exported: learn.export({safe_name!r})"
        ) from e
    torch_internals.forget_guards(program, _OTHER_SIZES)
    return program


def compare(found: Any, expected: Any, what: str, safe_name: str) -> None:
    """Refuse predictions that are not the model's, up to the rounding of other kernels.

    Raises:
        CheckpointError: they differ.
    """
    ours, theirs = list(tensors_in(expected)), list(tensors_in(found))
    shapes, own_shapes = ([tuple(t.shape) for t in tensors] for tensors in (theirs, ours))
    if shapes == own_shapes and all(map(_are_close, theirs, ours)):
        return
    why = f"shapes {shapes} instead of {own_shapes}" if shapes != own_shapes else "other values"
    raise CheckpointError(
        f"{what} does not predict as the model does ({why}), so no file was written. The model may draw random "
        "numbers, or do something else for other batches, which a program cannot; its weights can always be exported: "
        f"learn.export({safe_name!r})"
        " (errors.html#export)"
    )


def _are_close(found: Tensor, expected: Tensor) -> bool:
    # Accelerators may round the products of float32 (TF32).
    rounding = 1e-3 if expected.itemsize >= 4 and expected.is_cpu else 3e-2
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (t.detach().cpu().to(wide) for t in (found, expected))
    finite = b[b.isfinite() & (a != b)].abs()  # Equal ones, such as -1e9 in a mask, tell nothing of the rest.
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=0, atol=rounding * scale, equal_nan=True)


_OTHER_SIZES = (
    "the program may not hold for these inputs: the model, or an operation of torch, may treat their sizes, or values "
    "in them, in another way than those of the export"
)


# Writing and reading


def write(program: "ExportedProgram", facts: Facts, file: AnyPath, check: Callable[[nn.Module], None]) -> None:
    """Write a program with its record, as a whole, if the program that is read back passes a check.

    Args:
        program: the program; it loses its example inputs, which are the user's data, and the lines of the user's code.
        facts: the record.
        file: the path.
        check: gets the program as it is read back, on the host.
    """
    from torch.export import save
    from torch.export.passes import move_to_device_pass

    program.example_inputs = None
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    program = move_to_device_pass(program, "cpu")
    with replacing(file) as temporary:
        content = BytesIO()  # torch's writer would end the process if a file could not be written
        with warnings.catch_warnings(action="ignore"):
            try:
                save(program, content, extra_files={KEY: facts.as_json()})
            except Exception as e:
                raise CheckpointError(f"torch.export cannot write {facts.model}: {in_one_line(e)}") from e
        with open(temporary, "xb") as opened:
            opened.write(content.getbuffer())
        sync(temporary)
        check(read(temporary, torch.device("cpu"))[0])


class Program(nn.Module):
    """A program of torch.export, which predicts as the model did from which it was made.

    Args:
        program: the program.
        inputs: the names of its inputs, where it takes keywords; others are left out.
    """

    def __init__(self, program: "ExportedProgram") -> None:
        super().__init__()
        self.program = program.module()
        self.inputs: list[str] | None = None
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.inputs is not None:
            if missing := [name for name in self.inputs if name not in kwargs]:
                raise ValueError(f"the batch has no {', '.join(missing)}; the program takes {', '.join(self.inputs)}")
            kwargs = {name: kwargs[name] for name in self.inputs}
        return self.program(*args, **kwargs)

    def train(self, mode: bool = True) -> "Program":
        """Stay in eval mode, the only mode that an exported program has."""
        if mode:
            raise ValueError(
                "a program of torch.export predicts as it was exported, and cannot be trained: load the weights "
                "(.safetensors) into the model"
            )
        return self


def read(file: Path, device: torch.device) -> tuple[Program, str | None]:
    """Read a program, and the text of its record, without running anything that the file says.

    Raises:
        CheckpointError: a damaged file, or one with more in it than tensors and operations on them.
    """
    from torch.export.passes import move_to_device_pass

    torch.empty(0, device=device)  # torch says so if there is no such device
    try:
        content = BytesIO(file.read_bytes())  # The content that is checked is read, whatever happens to the file.
        with warnings.catch_warnings(action="ignore"):
            refuse_code(content)
            content.seek(0)
            programs, texts = torch_internals.read_archive(content)
            (program,) = programs.values()
            return Program(move_to_device_pass(program, device)), texts.get(KEY)
    except CheckpointError as e:
        raise CheckpointError(f"{file}: {e}") from None
    except Exception as e:
        raise CheckpointError(f"{file} is damaged, or not made by learn.export: {in_one_line(e)}") from e


# What may stand in an archive

_ENTRIES = re.compile(
    r"archive_(format|version)|byteorder|(\.data/)?(version|serialization_id|\.format_version|\.storage_alignment)"
    r"|models/model\.json|data/(weights/(model_weights_config\.json|weight_\d+)"
    r"|constants/(model_constants_config\.json|tensor_\d+)|sample_inputs/model\.pt)|extra/learnerkit\.export"
)
_SAMPLES, _PROGRAM = "data/sample_inputs/model.pt", "models/model.json"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")

_NAME = re.compile(r"[\w.]*")
_WORDS = re.compile(r"[\w ,.:+>\[\]-]*")  # arguments of operations: 'mean', 'bilinear', 'ij,jk->ik', a device
_OPERATORS = "eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|getitem"
_TARGET = re.compile(rf"torch\.ops\.aten\.\w+\.\w+|_operator\.({_OPERATORS})|torch\.sym_\w+|math\.trunc")
_FILE_OPERATIONS = re.compile(r".*\.(from_file|save|load|open|file)\b.*")
_SIZE_WORDS = (
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|PythonMod|FloorDiv|CleanDiv|CeilDiv|ModularIndexing"
    "|IntTrueDiv|FloatTrueDiv|TruncToInt|FloorToInt|RoundToInt|ToFloat|Eq|Ne|Le|Ge|Lt|Gt|Equality|Unequality|LessThan"
    "|GreaterThan|StrictLessThan|StrictGreaterThan|And|Or|Not|int_oo|oo|true|false|True|False|positive|integer"
    "|nonnegative|precision"
)
_NUMBER = r"[-+.\d]+(e[-+]?\d{1,3})?"
_ARITHMETIC = re.compile(rf"([-+*/()., \d<>=!&|~]|\b({_SIZE_WORDS}|[suz]f?\d+)\b|'([suz]f?\d+|{_NUMBER})')*")
_LONGEST_SIZE, _LARGEST_POWER = 4000, 64
_STRUCTURES = (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")


def refuse_code(content: BytesIO) -> None:
    """Refuse an archive with anything in it by which reading it, or running it, could run code.

    Raises:
        CheckpointError: it has a pickle, a compiled library, or a name that is not one of a tensor operation.
    """
    from torch.export.pt2_archive import PT2ArchiveReader  # the same reader that reads it afterwards

    refuse_compressed(content)
    content.seek(0)
    archive = PT2ArchiveReader(content)
    names = archive.get_file_names()
    for name in names:
        if not _ENTRIES.fullmatch(name):
            raise _refused("the part", name)
    if len(set(names)) < len(names):
        raise _refused("two parts of one name", max(names, key=names.count))
    if archive.read_bytes(_SAMPLES):
        raise _refused("a pickle of example inputs", _SAMPLES)
    for name in _CONFIGS:
        for key, payload in json.loads(archive.read_string(name))["config"].items():
            if payload["use_pickle"]:
                raise _refused("a pickle of", key)
            _check(payload, key)
    _check(json.loads(archive.read_string(_PROGRAM)), "")


def _refused(what: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"it has {what} {name[:120]!r}, which could run code, or is none of learn.export's; it is not read. "
        "From strangers take weights alone: a .safetensors file"
    )


def _check(part: Any, key: str) -> None:
    "Refuse a part of a program, the entry `key` of another, that has something else than it should."
    if isinstance(part, Mapping):
        for name, value in part.items():
            if name == "metadata" and all(isinstance(text, str) for text in value.values()):
                continue  # Metadata is about the code of the model.
            # A size that follows from another has a range, too, such as `12 - s20`; torch looks these names up alone.
            if not (_ARITHMETIC if key == "range_constraints" else _NAME).fullmatch(name):
                raise _refused("the name", name)
            _check(value, name)
    elif isinstance(part, list):
        for value in part:
            _check(value, key)
    elif isinstance(part, str):
        _check_text(part, key)


def _check_text(text: str, key: str) -> None:
    if key == "guards_code":
        raise _refused("code for its inputs", text)
    if key in ("in_spec", "out_spec"):
        if text:
            _check_structure(json.loads(text)[1])
    elif key == "expr_str":
        if len(text) > _LONGEST_SIZE or not _ARITHMETIC.fullmatch(text) or not _is_soon_known(text):
            raise _refused("the size", text)
    elif key in ("target", "as_operator"):
        if not _TARGET.fullmatch(text) or _FILE_OPERATIONS.fullmatch(text):
            raise _refused("the operation", text)
    elif not (_NAME if key in _NAMES else _WORDS).fullmatch(text):
        raise _refused("the text", text)


def _is_soon_known(text: str) -> bool:
    "Tell whether the numbers of a size stay small: torch evaluates it, and `9**9**9` takes for ever."
    try:
        tree = ast.parse(text.strip(), mode="eval")
        power = _power(tree)
    except (SyntaxError, RecursionError, MemoryError):  # the last two where it is nested deeply
        return False
    nodes = list(ast.walk(tree))
    numbers = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, int | float)]
    bits = [ast.unparse(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "precision"]
    return (
        power <= _LARGEST_POWER
        and not any(isinstance(node, ast.LShift | ast.RShift) for node in nodes)
        and all(abs(number) < 2**64 for number in numbers)
        and all(len(text) <= 3 for text in bits)
    )


def _power(node: ast.AST) -> float:
    "Return the power to which a size raises its parts at most."
    power = max(map(_power, ast.iter_child_nodes(node)), default=1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        exponent: Any = node.right
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Pow" and node.args:
        exponent = node.args[-1]
    else:
        return power
    if isinstance(exponent, ast.Call) and ast.unparse(exponent.func) == "Integer" and exponent.args:
        exponent = exponent.args[0]
    if isinstance(exponent, ast.UnaryOp):
        exponent = exponent.operand
    is_number = isinstance(exponent, ast.Constant) and isinstance(exponent.value, int)
    return power * max(1, exponent.value) if is_number else math.inf


_NAMES = ("name", "as_name", "parameter_name", "buffer_name", "tensor_constant_name", "forward_arg_names", "fqn")


def _check_structure(spec: Any) -> None:
    "Refuse a nesting of inputs and outputs that has a type which torch would import by name."
    if spec["type"] not in _STRUCTURES or "__enum__" in (spec["context"] or ""):
        raise _refused("the type", f"{spec['type']} {spec['context']}")
    for part in spec["children_spec"]:
        _check_structure(part)
