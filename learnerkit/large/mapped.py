"""Parameters in files: they take memory of the process only while they are read or written.

A model that is too large for one process is made with these, and each rank then takes its rows of it.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy

from learnerkit import distributed
from learnerkit.shards import owners
from learnerkit.text import first_few
from learnerkit.utils import accepts


class Mapped:
    """Tensors whose memory is that of files, which the operating system reads and writes when needed.

    New values are in one temporary file without a name, in the directory that `TMPDIR` says, or in /tmp. It
    needs the room for the whole model, for each process.
    """

    def __init__(self) -> None:
        self._file, name = tempfile.mkstemp(prefix="learnerkit")
        os.unlink(name)  # An open file stays until the process ends, however it does.
        weakref.finalize(self, os.close, self._file)
        self._end = 0
        self._held: dict[int, Tensor] = {}  # the tensors by their addresses

    def copy(self, t: Tensor) -> Tensor:
        """Return a tensor with the values of `t`, in the temporary file."""
        if not t.nbytes:
            return t
        start = self._end
        self._end += -(-t.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.truncate(self._file, start + t.nbytes)
        memory = mmap.mmap(self._file, t.nbytes, offset=start)  # The tensor keeps it.
        mapped = torch.frombuffer(memory, dtype=torch.uint8).view(t.dtype).view(t.shape)
        with torch.no_grad():
            mapped.copy_(t)
        self._held[mapped.data_ptr()] = mapped
        return mapped

    def release(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Give the memory of tensors back; their values are read from the files again when needed.

        Args:
            tensors: all that are held here, if none are named. Others are left alone.
        """
        for t in self._held.values() if tensors is None else tensors:
            if t.device.type == "cpu" and t.data_ptr() in self._held:
                start = -(-t.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # Other pages hold more.
                size = (t.data_ptr() + t.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
                if size > 0:
                    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)

    def make(self, make_model: Callable[[], nn.Module]) -> nn.Module:
        """Return the model that a function makes, with its parameters in the temporary file.

        A parameter moves there when a module gets it, and its memory is given back when that module is put into
        another. So the process needs the memory of the largest part.
        """

        def move(module: nn.Module, name: str, p: nn.Parameter | None) -> None:
            if p is not None and not is_lazy(p) and p.device.type == "cpu" and p.data_ptr() not in self._held:
                p.data = self.copy(p.data)

        def leave(parent: nn.Module, name: str, child: nn.Module | None) -> None:
            if child is not None:
                self.release(child.parameters())

        with (
            nn_module.register_module_parameter_registration_hook(move),
            nn_module.register_module_module_registration_hook(leave),
        ):
            model = make_model()
        self.release()
        return model

    def read(self, model: nn.Module) -> None:
        """Give the parameters of a model memory of the process, with the values that they have.

        Raises:
            ValueError: parameters or buffers on the meta device, which have none.
        """
        check_values(model)
        for p in model.parameters():
            p.data = p.data.clone()

    def fill(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Give the parameters of a model values that are mapped from a file; nothing of it is read yet.

        Parameters on the meta device are replaced; tied ones stay tied.

        Args:
            model: made by `make`, or on the meta device.
            weights: tensors of the file by the names of the model's, some of them or all.
        """
        new: dict[nn.Parameter, nn.Parameter] = {}
        for name, owner, attribute, p in owners(model):
            if p not in new and name in weights:
                value = weights[name]
                value = value if value.dtype == p.dtype else self.copy(value.to(p.dtype))
                if p.is_meta:
                    new[p] = nn.Parameter(value, p.requires_grad)
                else:
                    p.data, new[p] = value, p
            setattr(owner, attribute, new.get(p, p))
            self.release([new.get(p, p)])


def fill_buffers(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the buffers of a model copies of the values by their names; those on the meta device come to the host."""
    for prefix, owner in model.named_modules(remove_duplicate=False):
        for name, old in owner.named_buffers(recurse=False):
            value = weights.get(f"{prefix}.{name}" if prefix else name)
            if value is not None:
                setattr(owner, name, value.to("cpu" if old.is_meta else old.device, old.dtype, copy=True))


def check_values(model: nn.Module) -> None:
    """Refuse a model with parameters or buffers on the meta device.

    Raises:
        ValueError: there are some; the message names them.
    """
    for kind, named in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        if empty := [name for name, t in named if t.is_meta]:
            raise ValueError(
                f"the {kind} {first_few(empty)} are on the meta device and have no values: give them some by "
                "learn.load(file) of safetensors, or pass a function that makes the model: Learner(dls, make_model)"
            )


def made_model(model: Any) -> tuple[Any, Mapped | None]:
    """Return the model of a Learner, which a function may make, and the `Mapped` with its parameters, if any.

    On one process a function makes it as any other. On several, each makes all of it, in a file.
    """
    if isinstance(model, nn.Module):
        on_meta = any(p.is_meta for p in model.parameters())
        return model, Mapped() if on_meta else None
    if not callable(model) or isinstance(model, type) or not accepts(model):
        return model, None
    if distributed.world_size() == 1:
        return model(), None
    mapped = Mapped()
    return mapped.make(model), mapped


_libc = ctypes.CDLL(None)
