"""Private names of torch, CPython and IPython that this package needs, each wrapped in one function.

A release may change any of them; `tests/test_torch_internals.py` reports the names that are gone.
"""

import linecache
import os
import socket
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as loader_worker
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

# Modules

BatchNorm = _BatchNorm
"""The base of BatchNorm in every number of dimensions, SyncBatchNorm too."""

StatisticsNorm = _NormBase
"""The base of the norms that may keep running statistics: BatchNorm and InstanceNorm."""

Dropout = _DropoutNd
"""The base of all dropout modules."""


def loads_itself(model: nn.Module, name: str) -> bool:
    """Tell whether a tensor's module loads it by code of its own, as observers of quantization do, which resize it."""
    module = dict(model.named_modules(remove_duplicate=False)).get(name.rpartition(".")[0], model)
    is_plain = type(module)._load_from_state_dict is nn.Module._load_from_state_dict
    return not (is_plain or isinstance(module, StatisticsNorm))


def compiled_call(model: nn.Module) -> Callable | None:
    """Return the function that a call of `model` runs instead of its own code, as set by `nn.Module.compile`."""
    return model._compiled_call_impl


def set_compiled_call(model: nn.Module, call: Callable | None) -> None:
    """Set the function that a call of `model` runs; `None` undoes `nn.Module.compile`, which torch cannot undo."""
    model._compiled_call_impl = call


def parametrized(kind: type[nn.Module], names: Iterable[str]) -> nn.Module:
    """Return an empty module of the class that torch makes for a module of this kind whose tensors are parametrized.

    torch gives each such module a class of its own, and refuses to pickle it.
    """
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """Return the tables of a module's own hooks, for forward and backward passes."""
    passes = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return [hooks for hooks in passes if hooks is not None]


_HOOKS = {
    "register_hook": "_backward_hooks", "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
    "register_step_pre_hook": "_optimizer_step_pre_hooks", "register_step_post_hook": "_optimizer_step_post_hooks",
}  # fmt: skip


def unpickled_hooks(x: Any) -> list[tuple[str, Callable]]:
    """Return the hooks of a parameter or an optimizer, each with the method that registers it; a pickle has none."""
    return [(name, hook) for name, table in _HOOKS.items() for hook in (getattr(x, table, None) or {}).values()]


def plain_call(model: nn.Module) -> Callable:
    """Return the function that `nn.Module.compile` compiles: `forward` with its hooks.

    torch 2.10 does not compile a `forward` of torch's own, such as nn.Sequential's, unless code outside torch calls it.
    """
    if model.forward.__module__.startswith("torch."):
        return lambda *args, **kwargs: model._call_impl(*args, **kwargs)
    return model._call_impl


def without_compiler(compiled: Any) -> Any:
    """Return the module or function inside the wrapper that `torch.compile` makes, or what it got itself."""
    if isinstance(compiled, nn.Module):
        return getattr(compiled, "_orig_mod", compiled)
    function = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    # The compiler puts a function of torch itself, such as cross_entropy, into one more wrapper.
    is_inline = getattr(function, "__globals__", {}).get("__name__") == "torch._dynamo.external_utils"
    return function.__wrapped__ if is_inline else function


def uncompiled() -> AbstractContextManager:
    """Return a context in which compiled modules run their own code. It does not import torch's slow compiler."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def scale_together(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors of one device and type by a real number in place, with one kernel for many of them."""
    # That takes no conjugates, which may be multiplied as what they are views of.
    torch._foreach_mul_([t.conj() if t.is_conj() else t for t in tensors], factor)


def clip_elements(tensors: list[Tensor], most: float) -> None:
    """Clamp every element to the range from -most to most, in place, with few kernels; of complex ones both parts."""
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    torch._foreach_clamp_min_(tensors, -most)
    torch._foreach_clamp_max_(tensors, most)


def norms_of_each(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """Return the norm of each tensor, with few kernels."""
    return list(torch._foreach_norm(tensors, norm_type))


def scale_down_each(tensors: list[Tensor], norms: list[Tensor], max_norm: float) -> None:
    """Scale each tensor whose norm is above `max_norm` down to it, in place, without a host-device sync."""
    factors = torch._foreach_mul(norms, 1.0)
    torch._foreach_add_(factors, 1e-6)  # torch.nn.utils.clip_grad_norm_ does the same
    torch._foreach_reciprocal_(factors)
    torch._foreach_mul_(factors, max_norm)
    torch._foreach_clamp_max_(factors, 1.0)
    torch._foreach_mul_(tensors, factors)


# DistributedDataParallel

check_reduced = DistributedDataParallel._check_reducer_finalized
"""A check that raises RuntimeError if DDP has not averaged the gradients of the last backward pass."""


def build_buckets(ddp: DistributedDataParallel) -> None:
    """Have DDP divide its parameters into buckets now, in their order, rather than after its first pass."""
    ddp.reducer._push_all_rebuilt_params()
    ddp.reducer._rebuild_buckets()


def call_after_backward(call: Callable[[], Any]) -> None:
    """Let the autograd engine call this at the end of the running backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_backward_pass() -> bool:
    """Tell whether the code runs within a backward pass, for example where activations are recomputed."""
    return torch._C._current_graph_task_id() != -1


def is_profiling() -> bool:
    """Tell whether a profiler of torch is recording."""
    return torch.autograd._profiler_enabled()


def remove_hooks(handles: Iterable[Any], tensors: Iterable[Tensor]) -> None:
    """Remove hooks from tensors, and the empty dictionaries that torch leaves on tensors without hooks."""
    for handle in handles:
        handle.remove()
    for t in tensors:
        if not t._backward_hooks:
            t._backward_hooks = None
        if not t._post_accumulate_grad_hooks:
            t._post_accumulate_grad_hooks = None  # type: ignore[assignment]


@contextmanager
def hooks_left_out(params: Iterable[Tensor]) -> Iterator[None]:
    """Disable the gradient hooks of leaf tensors within this context."""
    tables = [(hooks, dict(hooks)) for p in params for hooks in gradient_hooks(p) if hooks]
    for hooks, _ in tables:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in tables:
            hooks.update(kept)


def gradient_hooks(p: Tensor) -> tuple[Any, Any]:
    """Return the tables of a tensor's gradient hooks and of its post-accumulate hooks; either may be `None`."""
    return p._backward_hooks, p._post_accumulate_grad_hooks


def nodes_of(results: Iterable[Tensor]) -> set[Any]:
    """Return the nodes of the graphs that have made the results."""
    nodes, edges = set[Any](), [(t.grad_fn, 0) for t in results]
    for node, _ in edges:  # The list grows meanwhile.
        if node is not None and node not in nodes:
            nodes.add(node)
            edges += node.next_functions
    return nodes


def leaves_of(results: Collection[Tensor]) -> set[Any]:
    """Return the leaf tensors on which the results depend."""
    ends = {getattr(node, "variable", None) for node in nodes_of(results)}
    return ends - {None} | {t for t in results if t.is_leaf and t.requires_grad}


def version_of(t: Tensor) -> int:
    """Return a number that grows when a tensor is changed in place; 0 for a tensor of `torch.inference_mode`."""
    return 0 if t.is_inference() else t._version


class BuffersKept:
    """Saves the present values of the buffers of modules, and restores them.

    Args:
        modules: the modules, which have the names of all their future buffers; some buffers may still be `None`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tables = {id(m._buffers): m._buffers for module in modules for m in module.modules()}.values()
        self._places = [(table, name) for table in tables for name in table]
        self._now: list[Tensor | None] = []
        self._copies: list[Tensor] = []

    def keep(self) -> None:
        """Copy the values, with one kernel for many of them."""
        self._now = [table[name] for table, name in self._places]
        buffers = [b for b in self._now if b is not None]
        if buffers and [b.shape for b in buffers] == [b.shape for b in self._copies]:
            torch._foreach_copy_(self._copies, buffers)
        else:
            self._copies = [b.detach().clone() for b in buffers]

    def put_back(self) -> None:
        """Restore the tensors, and the values that were copied last."""
        copies = iter(self._copies)
        for (table, name), b in zip(self._places, self._now, strict=True):
            table[name] = b
            if b is not None:
                b.detach().copy_(next(copies))

    def changed(self) -> list[dict[str, Any]]:
        """Return the tables of buffers whose values differ from the last copies. A host-device sync."""
        copies, tables = iter(self._copies), dict[int, dict[str, Any]]()
        for (table, name), b in zip(self._places, self._now, strict=True):
            copy, now = None if b is None else next(copies), table[name]
            if now is not copy and (now is None or copy is None or not torch.equal(now, copy)):
                tables[id(table)] = table
        return list(tables.values())


# FSDP2


def undo_fully_shard(modules: Iterable[nn.Module]) -> None:
    """Undo `torch.distributed.fsdp.fully_shard`, except that its parameters stay in the modules.

    torch has no such function. It may be called after an error in the middle of a pass.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    for module in modules:
        for group in _fsdp_groups(module):
            hooks = group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle
            for handle in (*hooks[0].values(), *hooks[1].values()):
                handle.remove()
            for p in group.fsdp_params:
                p._post_load_hook_handle.remove()
        state: Any = _module_state_mapping.pop(module)()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        module.__class__ = type(module).__mro__[2]  # the first two classes are FSDP's
        for key in (STATE_KEY, REGISTRY_KEY):
            vars(module).pop(key, None)
        for part in module.modules():
            vars(part).pop("_is_fsdp_managed_module", None)
            vars(part).pop("_fsdp_use_orig_params", None)


def forget_forward_passes(modules: Iterable[nn.Module]) -> None:
    """Let FSDP2 forget forward passes without a backward pass, such as those of an evaluation.

    FSDP2 records them in order to gather parameters ahead in the next backward pass. Ranks with different numbers of
    passes would gather different parameters, and wait for each other.
    """
    for module in modules:
        for group in _fsdp_groups(module):
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()


def reset_passes(modules: Iterable[nn.Module], kept: Collection[nn.Module] = ()) -> None:
    """Let FSDP2 forget a pass that an error has ended, and free what it has gathered; other ranks need not call this.

    torch has it from 2.13 on, as `reset_iter_state`.

    Args:
        modules: the units, and the outermost module.
        kept: the units that stay gathered, as they are on all ranks.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for module in modules:
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        for group in _fsdp_groups(module):
            if group._all_gather_result is not None and (work := group._all_gather_result.all_gather_work) is not None:
                work.wait()
            group._all_gather_result = group._reshard_after_forward_event = None
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
            if module not in kept:
                group._to_sharded()
            for p in group.fsdp_params:
                if (gathered := getattr(p, "_unsharded_param", None)) is not None:
                    gathered.grad = None
        state._training_state, state._state_ctx.iter_forward_root = TrainingState.IDLE, None
        state._state_ctx.post_backward_final_callback_queued = False


def make_outermost(model: nn.Module) -> None:
    """Let FSDP2 treat a module as the outermost one; by default it takes the first that is called."""
    model._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def is_gathered(module: nn.Module) -> bool:
    """Tell whether the parameters that FSDP2 gathers for a module are gathered now."""
    return all(group.is_unsharded for group in _fsdp_groups(module))


def begin_backward_at(model: nn.Module, outputs: Iterable[Tensor]) -> None:
    """Let FSDP2 begin the outermost module's part of a backward pass at outputs of its sub-modules."""
    state = model._get_fsdp_state()  # type: ignore[operator]
    for t in outputs:
        t.register_hook(state._pre_backward)


class _Wrapped:
    """A collective of FSDP2 that is run by a given function."""

    def __init__(self, inner: Any, run: Callable[[Callable[[], Any]], Any]) -> None:
        self.inner, self.run = inner, run
        self.allocate = inner.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(lambda: self.inner(*args, **kwargs))


def wrap_collectives(
    modules: Iterable[nn.Module],
    gather: Callable[[Callable[[], Any]], Any],
    scatter: Callable[[Callable[[], Any]], Any],
) -> Callable[[], None]:
    """Let functions run each all-gather and each reduce-scatter of sharded modules; return a function that undoes it.

    Args:
        modules: the modules.
        gather, scatter: called with a function that makes the collective, whose result they return.
    """
    groups = [group for module in modules for group in _fsdp_groups(module)]
    for group in groups:
        group._all_gather_comm = _Wrapped(group._all_gather_comm, gather)
        group._reduce_scatter_comm = _Wrapped(group._reduce_scatter_comm, scatter)

    def undo() -> None:
        for group in groups:
            group._all_gather_comm = group._all_gather_comm.inner
            group._reduce_scatter_comm = group._reduce_scatter_comm.inner

    return undo


def time_collectives(
    modules: Iterable[nn.Module],
    gather: Callable[[], AbstractContextManager],
    scatter: Callable[[], AbstractContextManager],
) -> Callable[[], None]:
    """Enter contexts for each all-gather and reduce-scatter of sharded modules; return a function that undoes it."""

    def within(context: Callable[[], AbstractContextManager]) -> Callable[[Callable[[], Any]], Any]:
        def run(collective: Callable[[], Any]) -> Any:
            with context():
                return collective()

        return run

    return wrap_collectives(modules, within(gather), within(scatter))


class CollectivesDone:
    """Counts the collectives of sharded modules within its context, and skips those that were already made.

    So a rank can finish a pass that an error has ended: it starts the pass again, on a smaller batch, and joins only
    the collectives that it has not yet made. The parameters of the skipped ones have no values.

    Args:
        modules: the units, and the outermost module.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self._n = self._done = 0

    def begin_again(self) -> None:
        """Skip as many collectives as there were so far."""
        self._n, self._done = 0, max(self._n, self._done)

    def __enter__(self) -> "CollectivesDone":
        self._undo = wrap_collectives(self.modules, self._count, self._count)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo()

    def _count(self, collective: Callable[[], Any]) -> Any:
        self._n += 1
        return collective() if self._n > self._done else None


def _fsdp_groups(module: nn.Module) -> list:
    """Return the groups of parameters that FSDP2 gathers for a module: at most one, except in versions before 2.11."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]


# Exported programs


def read_archive(file: BinaryIO) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the programs in an archive of torch.export, and its extra files, both by their names.

    `torch.export.load` treats an archive that it cannot read as one of an older format, which has pickles.
    """
    from torch.export.pt2_archive._package import load_pt2

    archive = load_pt2(file)
    return archive.exported_programs, archive.extra_files


def forget_guards(program: Any, error: str) -> None:
    """Remove the input checks of a program that are text to be evaluated; those by its operations say `error`."""
    program._guards_code.clear()
    for node in program.graph.nodes:
        if node.target is torch.ops.aten._assert_scalar.default:
            node.args = (node.args[0], error)


# Process groups


def default_store() -> dist.Store:
    """Return the store behind the default process group."""
    return dist.distributed_c10d._get_default_store()


def default_timeout() -> timedelta:
    """Return torch's default timeout of a collective."""
    return dist.distributed_c10d.default_pg_timeout


def compare_calls(timeout: timedelta) -> None:
    """Let torch compare the ranks' calls before each collective of the default gloo group; every rank must reach this.

    It works as under TORCH_DISTRIBUTED_DEBUG=DETAIL, but for this group alone. For different calls gloo itself ends the
    process if one rank sends more than another expects, and returns wrong numbers if it sends less.

    Args:
        timeout: the time that the comparison may wait.
    """
    c10d, cpu = dist.distributed_c10d, torch.device("cpu")
    group = c10d._get_default_group()
    backend = group._get_backend(cpu)
    if isinstance(backend, dist.ProcessGroupGloo):  # the calls are not compared yet
        wrapper = c10d._create_process_group_wrapper(
            backend, "learnerkit", default_store(), dist.get_rank(), dist.get_world_size(), timeout
        )
        # The wrapper is registered under a separate type: for a known type torch would use its present backend.
        group._register_backend(cpu, dist.ProcessGroup.BackendType.CUSTOM, wrapper)


def abort_nccl() -> None:
    """Abort the waiting NCCL collectives of the default group.

    This has been run on one GPU, and not yet on two. A rank that waits for others in its first collective, where NCCL
    connects them, is not freed by it; the launcher ends that rank.
    """
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).abort()


def host_store(listener: socket.socket, world_size: int | None = None, seconds: float = 300.0) -> dist.Store:
    """Serve a store on our socket, which it then closes: torch's own socket would listen on every interface."""
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host, port, world_size, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip


class CollectiveRefusal(TorchDispatchMode):
    """A context in which torch.distributed's functions raise an error: they go through torch's dispatcher.

    Args:
        error: makes the error from the name of the called function.
    """

    def __init__(self, error: Callable[[str], Exception]) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise self.error(f"torch.distributed ({func.__name__.partition('.')[0]})")
        return func(*args, **(kwargs or {}))


# Memory


class LiveBytes(TorchDispatchMode):
    """Counts, within its context, the bytes of the tensors that torch's operations create, until they are freed.

    A storage counts once, however many tensors share it. Memory inside running kernels, and memory that the allocator
    keeps, is not counted. Operations take some 20 microseconds longer.

    Attributes:
        now: the number of live bytes.
        peak: the greatest number of live bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, tuple[weakref.ref, int]] = {}  # keyed by the id of a storage

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation of torch's, and count the tensors that it returns."""
        results = func(*args, **(kwargs or {}))
        self.note(x for x in pytree.tree_leaves(results) if isinstance(x, Tensor))
        return results

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors, too, which were created earlier."""
        for t in tensors:
            if t.layout is not torch.strided:
                continue  # it has no storage: its parts are tensors that operations have created
            storage = t.untyped_storage()
            key, size = id(storage), storage.nbytes()
            known = self._sizes.get(key)
            if known is not None and known[1] == size:
                continue
            self._sizes[key] = (known[0] if known else weakref.ref(storage, self._forgetter(key))), size
            self.now += size - (known[1] if known else 0)
        self.peak = max(self.peak, self.now)
        self.changed()

    def changed(self) -> None:
        """Do nothing; a subclass may override this to learn that `now` may have grown."""

    def _forgetter(self, key: int) -> Any:
        def forget(_: Any) -> None:
            self.now -= self._sizes.pop(key)[1]

        return forget


class AllocatedBytes(AbstractContextManager):
    """Reads what the allocator of a CUDA device has given out, also to kernels; it is like a `LiveBytes`.

    Args:
        device: the device, whose peak is reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __exit__(self, *_: object) -> None: ...

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: the allocator knows of all tensors."""

    @property
    def now(self) -> int:
        """The number of bytes given out."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        """The greatest number of bytes given out since it was last set, to `now`."""
        return torch.cuda.max_memory_allocated(self._device)

    @peak.setter
    def peak(self, now: int) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def fake_mode() -> Any:
    """Return a context in which operations create tensors with shapes and types and without memory.

    Its method `from_tensor` creates one that is like another tensor.
    """
    return FakeTensorMode()


# Loaders


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, without those of its sub-modules; torch's iterators are slow."""
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def loader_attributes(loader: DataLoader) -> dict[str, Any]:
    """Return a DataLoader's attributes without its iterator, which holds processes if it has persistent workers."""
    return vars(loader) | {"_iterator": None}


OF_SCHEDULERS = frozenset({"step", "_opt_called"})
"""The attributes that torch's schedulers set on an optimizer: a counting `step`, and whether it was called."""


def optimizer_attributes(opt: Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes without its hooks, and without the methods that schedulers of torch wrap.

    torch pickles three of them, with which neither its LBFGS nor an optimizer that holds another can step.
    """
    hooks = [name for name in vars(opt) if name.startswith("_optimizer_") and name.endswith("_hooks")]
    wrapped = [name for name, value in vars(opt).items() if callable(value) and hasattr(type(opt), name)]
    return {name: value for name, value in vars(opt).items() if name not in (*hooks, *wrapped)}


def workers_of(iterator: Any) -> Sequence[Any]:
    """Return the worker processes of a DataLoader's iterator."""
    return iterator._workers if isinstance(iterator, _MultiProcessingDataLoaderIter) else ()


_QUEUES: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()


def keep_queues(loader: Any) -> None:
    """Keep the queues of a DataLoader's persistent workers as long as its iterator, which ends the workers by them.

    Where both are garbage in a reference cycle, Python closes the queues first, and torch waits 5 seconds for each of
    the workers.
    """
    iterator = getattr(loader, "_iterator", None)
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        _QUEUES[iterator] = (*iterator._index_queues, iterator._worker_result_queue)


def set_worker_dataset(dataset: Any) -> None:
    """Let `torch.utils.data.get_worker_info()` return this dataset in the loader's worker that calls it."""
    object.__setattr__(loader_worker._worker_info, "dataset", dataset)  # the object is frozen


# Threads and frames

_FOLDERS = tuple(module.__path__[0] + os.sep for module in (dist, torch.autograd, torch.amp))
_DDP = DistributedDataParallel.forward.__code__.co_filename


def waits_for_ranks(frame: FrameType | None, own: Collection[CodeType]) -> bool:
    """Tell whether a thread is in a collective, in a backward pass, which contains one, or reads what comes of it.

    Args:
        frame: the thread's innermost frame.
        own: the code of this package's functions that wait for other ranks.
    """
    for _ in range(4):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_filename.startswith((*_FOLDERS, _DDP)) or code in own:
            return True
        frame = frame.f_back
    return False


def frame_of_thread(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread, by its identifier."""
    return sys._current_frames().get(thread)


def await_thread_list_lock() -> None:
    """Wait until the interpreter's lock around its list of threads is free."""
    sys._current_frames()  # this call acquires the lock


def caller(level: int) -> FrameType:
    """Return the frame of the function `level` calls above the caller."""
    return sys._getframe(level + 1)


# Cells


def typed_sources() -> dict[str, tuple]:
    """Return linecache's entries of code that was typed, such as a notebook's cells, rather than read from a file."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def add_typed_sources(sources: dict[str, tuple]) -> None:
    """Let tracebacks show lines that were typed in another process."""
    linecache.cache.update(sources)


def cell_title(shell: Any, name: str) -> str:
    """Return a cell's title in IPython's tracebacks ('Cell In[3]') for the name of its code; '' for other names."""
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", None)  # IPython 7 does not have it
    return " ".join(format_name(name) or ()) if format_name is not None else ""


def show_as_notebook(shell: Any, kernel: object) -> None:
    """Give an IPython shell a kernel, by which libraries (and `utils.front_end`) recognise a notebook."""
    shell.kernel = kernel
