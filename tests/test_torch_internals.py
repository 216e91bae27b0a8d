"""Private names that the package needs: if a release takes one away, the test of this name fails."""

import atexit
import gc
import importlib
import inspect
import linecache
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import _utils as data_utils
from torch.utils.data._utils import worker
from torch.utils.data._utils.worker import WorkerInfo
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from learnerkit import torch_internals
from learnerkit.processes.machine import LOOPBACK

NAMES = {
    "BatchNorm": lambda: nn.modules.batchnorm._BatchNorm,
    "StatisticsNorm": lambda: nn.modules.batchnorm._NormBase,
    "Dropout": lambda: nn.modules.dropout._DropoutNd,
    "the call of a compiled module": lambda: nn.Module()._compiled_call_impl,
    "the class of a parametrized module": lambda: (parametrize._inject_new_class, parametrize._inject_property),
    "the call of a module": lambda: nn.Module._call_impl,
    "the module that torch.compile wraps": lambda: torch._dynamo.eval_frame.OptimizedModule.__init__,
    "multiplying many tensors": lambda: torch._foreach_mul_,
    "bounding many tensors": lambda: (torch._foreach_clamp_min_, torch._foreach_clamp_max_),
    "the norms of many tensors": lambda: (torch._foreach_norm, torch._foreach_add_, torch._foreach_reciprocal_),
    "the engine's callbacks": lambda: torch.autograd.Variable._execution_engine.queue_callback,
    "whether a profiler records": lambda: torch.autograd._profiler_enabled,
    "DDP's reducer, rebuilding": lambda: (dist.Reducer._rebuild_buckets, dist.Reducer._push_all_rebuilt_params),
    "DDP's reducer, another pass": lambda: dist.Reducer.prepare_for_backward,
    "DDP's reducer, whether it has finished": lambda: dist.Reducer._check_reducer_finalized,
    "DDP sending buffers before its forward pass": lambda: DistributedDataParallel._sync_buffers,
    "DDP's hooks": lambda: DistributedDataParallel._remove_autograd_hooks,
    "DDP sending buffers": lambda: DistributedDataParallel._distributed_broadcast_coalesced.__code__,
    "reading an archive of torch.export": lambda: importlib.import_module("torch.export.pt2_archive._package").load_pt2,
    "the default store": lambda: dist.distributed_c10d._get_default_store,
    "the default timeout": lambda: dist.distributed_c10d.default_pg_timeout,
    "the default group": lambda: dist.distributed_c10d._get_default_group,
    "a group's backend": lambda: dist.ProcessGroup._get_backend,
    "another backend of a group": lambda: dist.ProcessGroup._register_backend,
    "a backend that compares calls": lambda: dist.distributed_c10d._create_process_group_wrapper,
    "the type of another backend": lambda: dist.ProcessGroup.BackendType.CUSTOM,
    "the mode that sees every operation": lambda: torch.utils._python_dispatch.TorchDispatchMode.__torch_dispatch__,
    "tensors without values": lambda: torch._subclasses.fake_tensor.FakeTensorMode.from_tensor,
    "the logger of tensors without values": lambda: torch._subclasses.fake_tensor.log.disabled,
    "the hooks of a module": lambda: (
        nn.Module()._forward_hooks,
        nn.Module()._forward_pre_hooks,
        nn.Module()._backward_hooks,
        nn.Module()._backward_pre_hooks,
    ),
    "a loader's workers": lambda: _MultiProcessingDataLoaderIter._try_get_data,
    "what a worker knows of itself": lambda: worker._worker_info,
    "the stacks of all threads": lambda: sys._current_frames,
    "a caller's frame": lambda: sys._getframe,
    "joining threads (processes/rank_main.py)": lambda: threading._shutdown,
    "running exit hooks (processes/rank_main.py)": lambda: atexit._run_exitfuncs,
}

PARAMETERS = {
    "a store on a socket that is there": (dist.TCPStore, ["master_listen_fd", "wait_for_workers", "is_master"])
}


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name_that_is_used(name):
    NAMES[name]()


@pytest.mark.parametrize("name", PARAMETERS)
def test_torchs_functions_have_the_parameters_that_are_used(name):
    function, parameters = PARAMETERS[name]
    text = function.__init__.__doc__ or ""
    assert [parameter for parameter in parameters if parameter not in text] == []


def test_ddp_has_the_switches_that_are_turned():
    source = inspect.getsource(DistributedDataParallel)
    for name in ("require_backward_grad_sync", "modules_buffers", "find_unused_parameters", "reducer"):
        assert f"self.{name} = " in source, name


def test_a_parameter_forgets_hooks_that_were_removed_and_no_others():
    p, hooked = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    kept = hooked.register_hook(lambda grad: grad * 2)
    registers = (p.register_hook, p.register_post_accumulate_grad_hook, hooked.register_post_accumulate_grad_hook)
    torch_internals.remove_hooks([register(lambda t: setattr(t, "grad", None)) for register in registers], [p, hooked])
    for each in (p, hooked):
        (each * 3).backward()
    assert (p._backward_hooks, p._post_accumulate_grad_hooks, p.grad.item()) == (None, None, 3)
    assert hooked.grad.item() == 6
    kept.remove()
    p.register_post_accumulate_grad_hook(lambda t: setattr(t, "grad", None))
    (p * 3).backward()
    assert p.grad is None


def test_many_tensors_are_clipped_each_by_itself():
    tensors = [torch.tensor([3.0, -4.0]), torch.tensor([[0.1]], dtype=torch.float64), torch.zeros(2)]
    clipped = [t.clone() for t in tensors]
    torch_internals.clip_elements(clipped, 3.5)
    assert [t.tolist() for t in clipped] == [[3.0, -3.5], [[0.1]], [0.0, 0.0]]
    torch_internals.scale_down_each(tensors, torch_internals.norms_of_each(tensors, 2.0), 1.0)
    torch.testing.assert_close(tensors[0], torch.tensor([0.6, -0.8]))
    assert tensors[1].item() == 0.1
    assert not tensors[2].any()


def test_batch_norms_are_told_from_other_layers():
    for norm in (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm2d()):
        assert isinstance(norm, torch_internals.BatchNorm)
    for other in (nn.InstanceNorm1d(2), nn.LayerNorm(2), nn.Linear(2, 2)):
        assert not isinstance(other, torch_internals.BatchNorm)
    assert isinstance(nn.InstanceNorm1d(2), torch_internals.StatisticsNorm)
    assert isinstance(nn.Dropout2d(), torch_internals.Dropout)


def test_a_module_is_compiled_in_place_and_plain_again():
    model = nn.Sequential(nn.Linear(2, 2))
    before = torch_internals.compiled_call(model)
    torch_internals.set_compiled_call(model, lambda x: x + 1)
    assert torch.equal(model(torch.zeros(2)), torch.ones(2))
    torch_internals.set_compiled_call(model, before)
    assert torch.equal(model(torch.zeros(2)), torch_internals.plain_call(model)(torch.zeros(2)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch 2.10 itself
def test_the_wrapper_of_the_compiler_is_taken_off():
    model = nn.Linear(2, 2)
    assert torch_internals.without_compiler(torch.compile(model)) is model
    assert torch_internals.without_compiler(model) is model
    for function in (nn.functional.cross_entropy, lambda x: x):
        assert torch_internals.without_compiler(torch.compile(function)) is function
        assert torch_internals.without_compiler(function) is function


def test_the_tensors_of_a_module_are_its_own():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    module.register_buffer("nothing", None)
    found = [t for each in module.modules() for t in torch_internals.own_tensors(each)]
    assert {id(t) for t in found} == {id(t) for t in (*module.parameters(), *module.buffers())}


def test_the_workers_of_a_loader_are_found():
    iterator = iter(DataLoader(range(4), num_workers=2))
    assert len(torch_internals.workers_of(iterator)) == 2
    assert list(torch_internals.workers_of(SimpleNamespace(_workers=[1]))) == []
    del iterator


def test_workers_that_stay_end_at_once_where_their_queues_are_kept(monkeypatch):
    for module in (data_utils, worker):  # for so long torch would wait
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 60.0)
    holder = SimpleNamespace(loader=DataLoader(range(2), num_workers=1, persistent_workers=True))
    holder.itself = holder
    assert len(list(holder.loader)) == 2
    (process,) = torch_internals.workers_of(holder.loader._iterator)
    torch_internals.keep_queues(holder.loader)
    del holder
    began = time.monotonic()
    gc.collect()
    assert process.exitcode == 0
    assert time.monotonic() - began < 55
    torch_internals.keep_queues([])


def test_a_worker_is_shown_another_dataset():
    worker._worker_info = WorkerInfo(id=1, num_workers=2, seed=0, dataset="one")
    try:
        torch_internals.set_worker_dataset("other")
        assert (get_worker_info().id, get_worker_info().dataset) == (1, "other")
    finally:
        worker._worker_info = None


def wait_here(ready, over):
    ready.set()
    over.wait()


def test_a_thread_that_waits_in_known_code_is_seen():
    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(ready, over))
    thread.start()
    ready.wait()
    try:
        frame = torch_internals.frame_of_thread(thread.ident)
        assert torch_internals.waits_for_ranks(frame, {wait_here.__code__})
        assert not torch_internals.waits_for_ranks(frame, set())
        assert not torch_internals.waits_for_ranks(None, {wait_here.__code__})
    finally:
        over.set()
        thread.join()


def test_a_frame_of_torch_distributed_waits():
    frame = None

    def look(*args):
        nonlocal frame
        frame = torch_internals.frame_of_thread(threading.get_ident()).f_back
        return True

    compiled = compile("def barrier(look):\n    look()\n", dist.__file__, "exec")  # as if it were torch's own
    found = {}
    exec(compiled, found)
    found["barrier"](look)
    assert torch_internals.waits_for_ranks(frame, set())


def test_a_rank_that_reads_whether_gradients_are_finite_waits_for_others():
    """On an accelerator the host waits there for the reduction."""
    scaler, frames = torch.amp.GradScaler("cpu"), []
    weight = nn.Parameter(torch.ones(1))

    class Look(torch.optim.SGD):
        def step(self, closure=None):
            frames.append(torch_internals.waits_for_ranks(sys._getframe(), set()))

    scaler.scale(weight.sum()).backward()
    scaler.step(Look([weight], lr=0.1))
    assert frames == [True]


def test_the_caller_is_found_by_its_frame():
    def inner():
        return torch_internals.caller(1).f_code.co_name

    assert inner() == "test_the_caller_is_found_by_its_frame"


def test_a_loader_with_persistent_workers_keeps_its_iterator_in_one_attribute():
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    iterator = iter(loader)
    assert loader._iterator is iterator
    assert torch_internals.loader_attributes(loader) == vars(loader) | {"_iterator": None}
    assert list(iterator) and loader._iterator is iterator  # noqa: PT018
    loader._iterator = None


class Sharp(SGD):
    rho = 0.05


def test_the_attributes_of_an_optimizer_are_those_that_are_no_hooks_and_no_wrapped_methods():
    opt = Sharp([nn.Parameter(torch.zeros(2))], lr=0.1)
    opt.rho = 0.1
    StepLR(opt, 1)
    opt.register_step_post_hook(lambda *args: None)
    found = torch_internals.optimizer_attributes(opt)
    assert {"state", "param_groups", "defaults", "rho"} <= found.keys()
    assert "step" in vars(opt), "a scheduler wraps it"
    assert "step" not in found
    assert "_optimizer_step_post_hooks" in vars(opt)
    assert not any(name.endswith("_hooks") for name in found)


def test_a_store_listens_on_the_socket_that_it_is_given():
    assert "master_listen_fd: " in dist.TCPStore.__init__.__doc__
    with socket.create_server((LOOPBACK, 0)) as listener:
        host, port = listener.getsockname()
        store = torch_internals.host_store(listener, 2)
    assert store.port == port
    dist.TCPStore(host, port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"


def test_linecache_keeps_typed_lines_without_a_time():
    lines = ["typed\n"]
    torch_internals.add_typed_sources({"<cell>": (6, None, lines, "<cell>")})
    try:
        assert linecache.getline("<cell>", 1) == "typed\n"
        linecache.getline(__file__, 1)
        assert torch_internals.typed_sources().get("<cell>") == (6, None, lines, "<cell>")
        assert __file__ not in torch_internals.typed_sources()
    finally:
        del linecache.cache["<cell>"]


def test_ipython_names_cells_and_a_kernels_shell_has_a_kernel():
    compilerop = pytest.importorskip("IPython.core.compilerop")
    zmqshell = pytest.importorskip("ipykernel.zmqshell")
    assert list(inspect.signature(compilerop.CachingCompiler.format_code_name).parameters) == ["self", "name"]
    assert "kernel" in zmqshell.ZMQInteractiveShell.class_trait_names()
    assert torch_internals.cell_title(None, "<cell>") == ""
