"""Nested values as JSON and a list of tensors, and back: nothing that is read names code, so none can run."""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnerkit.files import CheckpointError
from learnerkit.tensor_files import why_not

# What JSON has no word for is an object with one of these marks among its keys:
#   {"!tensor": number}, with "order": its dimensions as they lie in memory, if not the usual way
#   {"!array": number, "type": ..., "shape": [...]}, {"!scalar": bytes in hex, "type": ...}: numpy's
#   {"!float": "nan"}, {"!list": number}: a long one of floats or of integers
#   {"!tuple": [...]}, {"!dict": [[key, value], ...], "kind": ...}

_DICTS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_ARRAYS = {np.dtype(code).str: np.dtype(code) for code in np.typecodes["All"] if np.dtype(code).kind in "biufc"}
_LONG = 1000


def encode(value: Any, tensors: list[Tensor], place: str = "") -> Any:
    """A value as JSON, with the numbers of tensors, which are appended to a list.

    They are those of the value, without a copy; one that comes twice is there once, and comes twice again when it is
    decoded. A long list of numbers becomes a tensor, too.

    Args:
        value: of None, bool, int, float, str, lists, tuples, dicts (keys are strings, numbers, tuples), tensors,
            numpy arrays and scalars.
        tensors: the list.
        place: where the value stands, for the error.

    Raises:
        CheckpointError: there is something else in it; the text names its place.
    """
    try:
        return _Encoder(tensors).encode(value, place)
    except RecursionError:
        raise CheckpointError(f"{place or 'the state'} is nested too deeply, or contains itself") from None


class _Encoder:
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._numbers: dict[tuple, int] = {}

    def encode(self, x: Any, place: str) -> Any:
        kind = type(x)
        if x is None or kind in (bool, int, str):
            return x
        if kind is float:
            return x if math.isfinite(x) else {"!float": str(x)}
        if isinstance(x, Tensor) and not why_not(x):
            return self._tensor(x)
        if kind is list and len(x) >= _LONG and (numbers := _in_a_row(x)) is not None:
            return {"!list": self._add(numbers)}
        if kind in (list, tuple, torch.Size):
            items = [self.encode(item, f"{place}.{i}") for i, item in enumerate(x)]
            return items if kind is list else {"!tuple": items}
        if kind in _DICTS.values():
            return self._dict(x, place)
        if isinstance(x, np.generic) and x.dtype.str in _ARRAYS:
            return {"!scalar": x.tobytes().hex(), "type": x.dtype.str}
        if kind is np.ndarray and x.dtype.str in _ARRAYS:
            numbers = torch.from_numpy(np.array(x, order="C").reshape(-1).view(np.uint8))
            return {"!array": self._add(numbers), "type": x.dtype.str, "shape": list(x.shape)}
        what = why_not(x) + (f" of type {x.dtype}" if isinstance(x, np.ndarray | np.generic) else "")
        raise CheckpointError(
            f"{place.removeprefix('.') or 'the state'} is {what}; a checkpoint keeps None, bool, int, float, str, "
            "lists, tuples, dicts, tensors and numpy arrays: turn it into those"
        )

    def _tensor(self, x: Tensor) -> dict[str, Any]:
        # The order in memory is kept: some kernels expect the same of a parameter and of its optimizer's state.
        strides = x.stride()
        order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
        turned = x.detach().permute(order)
        usual = x.is_contiguous() or not turned.is_contiguous()
        row = x.detach() if usual else turned
        place = (row.device, row.data_ptr(), row.dtype, row.shape, row.stride(), row.is_conj(), row.is_neg())
        number = self._numbers.get(place) if row.numel() else None
        if number is None:
            number = self._numbers[place] = self._add(row)
        return {"!tensor": number} | ({} if usual else {"order": order})

    def _add(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def _dict(self, x: dict, place: str) -> dict[str, Any]:
        for key in x:
            if type(key) not in (str, int, float, bool, tuple, type(None)):
                raise CheckpointError(
                    f"{place.removeprefix('.') or 'the state'} has the key {key!r}, a {type(key).__name__}; a key is a "
                    "str, a number or a tuple of those"
                )
        if type(x) is dict and all(type(key) is str and not key.startswith("!") for key in x):
            return {key: self.encode(value, f"{place}.{key}") for key, value in x.items()}
        items = [[self.encode(key, place), self.encode(value, f"{place}.{key}")] for key, value in x.items()]
        return {"!dict": items} | ({} if type(x) is dict else {"kind": type(x).__name__})


def _in_a_row(x: list) -> Tensor | None:
    """A list of floats, or of integers, as a tensor; `None` if it is not one."""
    kinds = set(map(type, x))
    if kinds not in ({float}, {int}):
        return None
    try:
        return torch.tensor(x, dtype=torch.float64 if kinds == {float} else torch.int64)
    except (OverflowError, RuntimeError):  # an integer of more than 64 bits
        return None


def decode(found: Any, tensors: Mapping[int, Tensor] | Sequence[Tensor]) -> Any:
    """The value of which `encode` made this.

    Raises:
        Exception: of several types, if `encode` has not made it.
    """
    if isinstance(found, list):
        return [decode(item, tensors) for item in found]
    if not isinstance(found, dict):
        return found
    mark = next((key for key in found if key.startswith("!")), None)
    if mark is None:
        return {key: decode(value, tensors) for key, value in found.items()}
    value: Any = found[mark]
    kinds: dict[str, type] = {"!tuple": list, "!dict": list, "!scalar": str, "!float": str}
    kind = type(value)
    if kind is not kinds.get(mark, int):
        raise ValueError(f"it has the mark {mark!r} with a {kind.__name__}")
    match mark:
        case "!tensor":
            order = found.get("order")
            return tensors[value] if order is None else tensors[value].permute([order.index(d) for d in sorted(order)])
        case "!array":
            row = tensors[value].numpy().view(_ARRAYS[found["type"]])
            return row.reshape(found["shape"]).copy()
        case "!scalar":
            return np.frombuffer(bytes.fromhex(value), _ARRAYS[found["type"]])[0]
        case "!float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value]
        case "!list":
            return tensors[value].tolist()
        case "!tuple":
            return tuple(decode(item, tensors) for item in value)
        case "!dict":
            pairs = {decode(key, tensors): decode(item, tensors) for key, item in value}
            return _DICTS[found.get("kind", "dict")](pairs)
    raise ValueError(f"it has the unknown mark {mark!r}")
