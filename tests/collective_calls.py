"""Which functions of a package call a collective without a mark, told by its syntax alone.

A function is marked by `@collective`, or says by `@not_collective("why")` why it calls one and is none itself.
"""

import ast
from collections import defaultdict

import torch
from torch.utils.data import DataLoader

MARK, EXCUSE = "collective", "not_collective"

# Functions of torch.distributed's in which a rank waits for others.
OF_TORCH = {
    "all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list", "gather",
    "init_process_group", "new_group", "recv", "reduce_scatter", "rendezvous", "send",
}  # fmt: skip

# Methods that objects of others have, too.
_COMMON = {"connect", "fit", "help", "join", "load", "save"}
_OTHERS = (dict, list, set, str, bytes, tuple, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, DataLoader)


def dotted(node):
    """An expression of names and dots as a text, in which `super()` may come first; any other is ''."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call):
        return "super()" if dotted(node.func) == "super" else ""
    owner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner else ""


class Function:
    """A function or method: its module, its class there, its node, and how it is marked."""

    def __init__(self, module, owner, node):
        self.module, self.owner, self.node = module, owner, node
        self.name = f"{module}.{owner}.{node.name}" if owner else f"{module}.{node.name}"
        decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
        words = {dotted(d).split(".")[-1] for d in decorators}
        self.is_marked, self.is_excused, self.is_setter = MARK in words, EXCUSE in words, "setter" in words


class Calls:
    """The functions of a package, and what each of them names.

    Args:
        trees: the syntax tree of each module by its name within the package.
        package: the package's name.
        known: what a variable of that name is wherever it stands: (module, class).
    """

    def __init__(self, trees, package="learnerkit", known=None):
        self.trees, self.package, self.known = trees, package, known or {}
        self.functions, self.classes, self.imported = {}, {}, {}
        for module, tree in trees.items():
            self.imported[module] = dict(self._imports(tree))
            for node in tree.body:
                self._add(module, "", node)
        self.children, self.by_name = defaultdict(list), defaultdict(list)
        for key in self.classes:
            for base in self._bases(key):
                self.children[base].append(key)
        for f in self.functions.values():
            self.by_name[f.node.name].append(f)
        self.named = {f: list(self._named(f)) for f in self.functions.values()}

    def _add(self, module, owner, node):
        if isinstance(node, ast.FunctionDef):
            f = Function(module, owner, node)
            self.functions[f.name + ".setter" * f.is_setter] = f
        elif isinstance(node, ast.ClassDef):
            name = f"{owner}.{node.name}" if owner else node.name
            self.classes[module, name] = node
            for child in node.body:
                self._add(module, name, child)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for child in ast.iter_child_nodes(node):
                self._add(module, owner, child)

    def _imports(self, tree):
        """What a module imports of the package, anywhere: each name, and its (module, name) or (module, '')."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == self.package:
                inner = node.module.removeprefix(self.package).removeprefix(".")
                for alias in node.names:
                    longer = f"{inner}.{alias.name}".removeprefix(".")
                    target = (longer, "") if longer in self.trees else (inner or "__init__", alias.name)
                    yield alias.asname or alias.name, target

    # What a name means: ("module", its name), ("class", its key), ("function", a Function), or ("", None)

    def _meaning(self, module, text):
        first, *rest = text.split(".")
        kind, found = self._global(module, first)
        for name in rest:
            if kind == "module":
                kind, found = self._global(found, name)
            elif kind == "class" and (methods := self._methods(found, name)):
                kind, found = "function", methods[0]
            else:
                return "", None
        return kind, found

    def _global(self, module, name, seen=()):
        if (module, name) in self.classes:
            return "class", (module, name)
        if f"{module}.{name}" in self.functions:
            return "function", self.functions[f"{module}.{name}"]
        if name in self.imported.get(module, {}):
            target = self.imported[module][name]
            if not target[1]:
                return "module", target[0]
            if target not in seen:
                return self._global(*target, (*seen, target))
        inner = f"{module}.{name}"
        return ("module", inner) if inner in self.trees else ("", None)

    def _bases(self, key):
        found = (self._meaning(key[0], dotted(base)) for base in self.classes[key].bases)
        return [target for kind, target in found if kind == "class"]

    def _methods(self, key, name, above=False):
        """The method of a class, its own or inherited: one, or none."""
        own = self.functions.get(f"{key[0]}.{key[1]}.{name}")
        if own and not above:
            return [own]
        return next((found for base in self._bases(key) if (found := self._methods(base, name))), [])

    def _overrides(self, key, name):
        for child in self.children[key]:
            yield from filter(None, [self.functions.get(f"{child[0]}.{child[1]}.{name}")])
            yield from self._overrides(child, name)

    # What a function names

    def _named(self, f):
        """Functions that one names, within its own functions too: to call them, or to hand them on.

        A text stands for a method of an object that is not known, which is called.
        """
        nodes, hints, local = list(ast.walk(f.node)), [*f.node.decorator_list], set()
        for node in nodes:
            hints += filter(None, (getattr(node, "annotation", None), getattr(node, "returns", None)))
            if isinstance(node, ast.arg):
                local.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                local.add(node.id)
        skipped = {id(node) for hint in hints for node in ast.walk(hint)}
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if id(node) in skipped or not isinstance(getattr(node, "ctx", None), ast.Load):
                continue
            if isinstance(node, ast.Name) and node.id not in local:
                yield from self._reached(*self._meaning(f.module, node.id))
            elif isinstance(node, ast.Attribute):
                yield from self._of_object(f, dotted(node.value), node.attr, local, id(node) in called)

    def _reached(self, kind, found):
        if kind == "function":
            yield found
        elif kind == "class":
            for method in ("__init__", "__call__", "__enter__"):
                yield from self._methods(found, method)

    def _of_object(self, f, owner, name, local, is_called):
        first, own = owner.split(".")[0], (f.module, f.owner)
        if f.owner and owner in ("self", "cls"):
            yield from self._methods(own, name)
            yield from self._overrides(own, name)
        elif f.owner and owner == "super()":
            yield from self._methods(own, name, above=True)
        elif owner in self.known:
            yield from self._methods(self.known[owner], name)
        elif first not in local and self._meaning(f.module, owner)[0]:
            yield from self._reached(*self._meaning(f.module, f"{owner}.{name}"))
        elif is_called and first not in ("torch", "dist", "nn"):
            yield name

    # The check

    def _calls(self, f):
        """The names of the collectives that a function calls."""
        for found in self.named[f]:
            if isinstance(found, Function):
                if found.is_marked and found is not f:
                    yield found.name
                continue
            methods = self.by_name.get(found, [])
            is_common = found in _COMMON or any(hasattr(kind, found) for kind in _OTHERS)
            if methods and not is_common and all(method.is_marked for method in methods):
                yield from (method.name for method in methods)
        for node in ast.walk(f.node):
            text = dotted(node)
            if text.startswith("dist.") and text[5:] in OF_TORCH:
                yield text
            elif isinstance(node, ast.Attribute) and node.attr == "full_tensor":
                yield "full_tensor"

    def unmarked(self):
        """The functions that call collectives and do not say so, and what each calls."""
        plain = [f for f in self.functions.values() if not (f.is_marked or f.is_excused)]
        return {f.name: called for f in plain if (called := sorted({*self._calls(f)}))}

    def without_need(self):
        """The functions that say why they are none, and call no collective."""
        return [f.name for f in self.functions.values() if f.is_excused and not [*self._calls(f)]]
