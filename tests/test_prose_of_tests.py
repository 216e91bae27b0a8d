"""The tests look at what users can see: they know few private names."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SEAMS = {"_forward", "_loss", "_backward", "_step", "_zero_grad"}
"""Methods of a Learner that are documented, as subclasses override them."""

TUPLES = {"_asdict", "_fields", "_replace"}
"""Public names of named tuples."""

OF_TORCH = {
    "_backward_hooks", "_compiled_call_impl", "_flat_weights", "_forward_hooks", "_forward_pre_hooks",
    "_get_ddp_logging_data", "_metadata", "_module_info", "_optimizer_step_post_hooks", "_sharded_param_data",
}  # fmt: skip
"""Attributes of torch's own objects."""

MODULES = {"atexit", "os", "threading", "torch"}
"""Libraries of others; `os._exit` is documented."""


def private_names(source):
    """The uses of private attributes of other objects: (line, expression)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.endswith("_"):
            continue
        of = node.value
        owner = of.func if isinstance(of, ast.Call) else of
        own = isinstance(owner, ast.Name) and owner.id in {"self", "cls", "super"}
        if not own and node.attr not in SEAMS | TUPLES | OF_TORCH and ast.unparse(of).split(".")[0] not in MODULES:
            found.append((node.lineno, ast.unparse(node)))
    return sorted(found)


def test_private_attributes_of_other_objects_are_found():
    source = """
class Own(Learner):
    def _step(self):
        super()._step()
        self._other = cls._other = 1
        self.learn._gradient.begin(learn._forward())
        os._exit(torch._C._get_nothing() + table._repr_html_() + row._asdict())
        make()._hidden, x.__dict__
"""
    assert [name for _, name in private_names(source)] == ["self.learn._gradient", "make()._hidden"]


@pytest.mark.slow
def test_tests_use_few_private_attributes_of_other_objects():
    """What is private changes without notice; tests of behaviour outlive that."""
    found = [
        f"{path.relative_to(TESTS)}:{line}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.name != "test_torch_internals.py"  # which is about torch's private names
        for line, name in private_names(path.read_text(encoding="utf-8"))
    ]
    assert len(found) < 100, "\n".join(found)
