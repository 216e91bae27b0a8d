"""Wrappers that look like the module inside them, so that callbacks see the model that they see on one process."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

_METHODS = (
    "state_dict", "load_state_dict", "named_parameters", "named_buffers", "named_modules", "named_children",
    "children", "get_submodule", "get_parameter", "get_buffer", "apply", "register_buffer", "register_parameter",
    "register_module", "add_module", "register_forward_hook", "register_forward_pre_hook",
    "register_full_backward_hook", "register_full_backward_pre_hook", "extra_repr",
    "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type",
)  # fmt: skip
"""Methods of every module that are those of the module inside."""

_SPECIAL = ("__len__", "__getitem__", "__setitem__", "__iter__", "__contains__", "__bool__")
"""Methods that Python looks for in the class, where the module inside has them."""


class Transparent(nn.Module):
    """The base of a wrapper around a `module`: what the wrapper itself does not have, it has from the module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "_modules" not in self.__dict__:
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = not self.__dict__.get("_ready") or name in self.__dict__ or hasattr(type(self), name)
        if own or name in self._modules or (name.startswith("_") and not hasattr(self.module, name)):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in self._modules:
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def train(self, mode: bool = True) -> "Transparent":
        """Put the module into training mode or out of it."""
        self.module.train(mode)
        self.training = mode
        return self

    def __deepcopy__(self, memo: dict) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.module.__reduce_ex__(protocol)


def _of_module(name: str) -> Callable:
    def method(self: Transparent, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.module, name)(*args, **kwargs)
        return self if found is self.module else found

    return method


for _name in _METHODS:
    setattr(Transparent, _name, _of_module(_name))


def _name_of(base: type) -> str:
    """The name of torch's class in which a wrapper's lies."""
    return next(kind.__name__ for kind in base.__mro__ if kind.__module__.startswith("torch."))


def _class_inside(wrapper: Transparent) -> type:
    """The module's class, for `isinstance`, which looks for the wrapper's own `type` too."""
    return type(wrapper.__dict__.get("_modules", {}).get("module", wrapper))


def wrapped(base: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return `module` in a wrapper of the class `base` that looks like it.

    Args:
        base: such as `nn.DataParallel`, with the module inside as its `module`.
        module: what to wrap.
        args, kwargs: the wrapper's further arguments.
    """
    special: dict[str, Any] = {name: _of_module(name) for name in _SPECIAL if hasattr(type(module), name)}
    special["__class__"] = property(_class_inside)
    bases = (base,) if issubclass(base, Transparent) else (Transparent, base)
    wrapper = type(_name_of(base), bases, special)(module, *args, **kwargs)
    vars(wrapper).update(_ready=True, module=module)  # there it is found without `__getattr__`
    return wrapper
