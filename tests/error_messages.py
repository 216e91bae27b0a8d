"""Collects the messages that the library raises, warns or reports from its source, which is not imported.

Each becomes a template, with {...} for each value.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "nbs/_ext"))

from errors import normal  # noqa: E402

LONG = 160  # characters without the values; longer messages end with the address of their entry

ENDS = {"warn": 0, "warn_once": 0, "tell_once": 0, "_say": 0, "not_together": 0, "_not_met": 0, "exit": 0, "say": 0,
        "add_note": 0, "add_note_once": 1, "no_collectives": 1, "refuse": 2, "Finding": 1,
        "NotAStore": 0, "NotDecoded": 0, "Outcome": "text"}  # fmt: skip
"""Functions whose argument of this number or name is shown to the user, besides classes whose names end with Error."""

WRITERS = {
    "why_empty", "_advice_for", "lone_last_batch", "how_it_ended", "killed_by", "advice", "_describe",
    "of_run", "of_call", "of_device", "of_layer", "_of_ids", "_of_type", "of_loss", "of_comparison", "_of_classes",
    "of_samples", "of_metric", "of_predict", "lost_worker", "_lines", "explain_metric", "doubtful_count", "judge_count",
    "_describe_death", "_standstill", "_store_lost", "_likely_reason", "_compare_samples", "_refusal",
}  # fmt: skip
"""Functions that make such text; all text in them counts."""

MAKERS = {
    "no_loss", "no_scalar", "_refused", "_used", "_refusal", "_not_met", "_agreed", "not_together", "error", "no_part",
}  # fmt: skip
"""Functions that make an error with a text, which is collected there."""

TEXTS = {"why_empty", "_SAMPLER", "_DATASET", "_REFUSED"}
"""Constants that are parts of such text."""


class Message(NamedTuple):
    """A message in the source: its file and line, the function that is called with it (or makes it), its template."""

    place: str
    by: str
    text: str


def literal(text: str) -> str:
    """The text of a template without its values."""
    return normal(text).replace("{}", "")


@cache
def parsed(source: Path) -> dict[Path, ast.Module]:
    """The Python files of a folder."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py"))}


def messages(source: Path = ROOT / "learnerkit") -> list[Message]:
    """All messages in the Python files of a folder."""
    trees = parsed(source)
    own = {
        path: {name: given for name, given in _assigned(tree.body).items() if name.isupper()}
        for path, tree in trees.items()
    }
    constants = {name: given for found in own.values() for name, given in found.items()}
    return [
        Message(f"{path.relative_to(source.parent)}:{line}", by, text)
        for path, tree in trees.items()
        for line, by, text in _found(tree, constants | own[path])
    ]


def _found(node: ast.AST, names: dict[str, list[ast.expr]]) -> Iterator[tuple[int, str, str]]:
    for child in ast.iter_child_nodes(node):
        own = names | _assigned(list(ast.walk(child))) if isinstance(child, ast.FunctionDef) else names
        if name := _defines(child):
            has_doc = isinstance(child, ast.FunctionDef) and ast.get_docstring(child) is not None
            parts = [part for line in getattr(child, "body", [child])[has_doc:] for part in _strings(line)]
            found = [(part.lineno, name, text) for part in parts for text in _texts(part, own)]
            yield from (each for each in found if len(re.findall(r"[a-z]{2,}", literal(each[2]))) > 2)
            continue
        if isinstance(child, ast.Call):
            for text in dict.fromkeys(text for given in _shown(child) for text in _texts(given, names)):
                yield child.lineno, ast.unparse(child.func).rpartition(".")[2], text
        yield from _found(child, own)


def _defines(node: ast.AST) -> str:
    """The name of a function or constant with texts that is defined here, or an empty string."""
    if isinstance(node, ast.Assign):
        return next((target.id for target in node.targets if isinstance(target, ast.Name) and target.id in TEXTS), "")
    return node.name if isinstance(node, ast.FunctionDef) and node.name in WRITERS else ""


def _shown(call: ast.Call) -> list[ast.expr]:
    """The argument of a call that is shown to the user."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    place = 0 if name.endswith("Error") else ENDS.get(name)
    if name == "print" and "sys.stderr" in (ast.unparse(keyword.value) for keyword in call.keywords):
        place = 0
    if name == "Finding" and not {"WRONG", "HINT"} & {getattr(part, "id", "") for part in ast.walk(call.args[0])}:
        return []
    if name == "say" and isinstance(call.func, ast.Attribute):  # not the launcher's
        return []
    if isinstance(place, int):
        return call.args[place : place + 1]
    return [keyword.value for keyword in call.keywords if keyword.arg == (place or "")]


def _strings(node: ast.AST) -> Iterator[ast.expr]:
    """The texts in a piece of code."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        yield node
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


def raised(source: Path = ROOT / "learnerkit") -> Iterator[tuple[str, str]]:
    """The place of each `raise` of a call, and the name that is called."""
    for path, tree in parsed(source).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield f"{path}:{node.lineno}", ast.unparse(node.exc.func).rpartition(".")[2]


def _assigned(nodes: list[Any]) -> dict[str, list[ast.expr]]:
    """What is assigned to each name."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(value)
    return found


def _texts(node: ast.expr, names: dict[str, list[ast.expr]], inner: bool = False) -> list[str]:
    """The templates that an expression may give."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(each) for each in product(*(_texts(part, names, True) for part in parts))]
        case ast.FormattedValue(value=ast.Name(id=name)) if name.isupper() and name in names:
            return _texts(names[name][0], names, True)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(pair) for pair in product(_texts(left, names), _texts(right, names))]
        case ast.IfExp(body=one, orelse=other) if not inner and "" not in (
            getattr(n, "value", 0) for n in (one, other)
        ):
            return _texts(one, names) + _texts(other, names)
        case ast.BoolOp(op=ast.Or(), values=[*values]) if not inner:
            return [text for value in values for text in _texts(value, names)]
        case ast.Name(id=name) if name in names and not inner:
            rest = {key: value for key, value in names.items() if key != name}
            return [text for value in names[name] for text in _texts(value, rest)]
    return ["{" + _named(node) + "}"]


def _named(node: ast.AST) -> str:
    """A name for a value in a template."""
    match node:
        case ast.FormattedValue(value=value) | ast.Starred(value=value):
            return _named(value)
        case ast.Name(id=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name.strip("_").lower()
        case ast.Attribute(attr=name):
            return "type" if name == "__name__" else name.strip("_")
        case ast.Subscript(value=value):
            return _named(value)
        case ast.Call(func=ast.Name(id="map"), args=[_, value]) | ast.Call(args=[value, *_]):
            return _named(value)
    return "..."


def needs_address(message: Message) -> bool:
    """Tell whether a message is to end with the address of its entry: not what is a line or a part of a longer text."""
    is_part = message.by in ("Finding", "Outcome", "refuse", "NotAStore", *WRITERS, *TEXTS)
    return not is_part and (len(literal(message.text)) > LONG or "\n" in message.text)
