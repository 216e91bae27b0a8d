"""The private names of torch, CPython and IPython that the package needs still exist, with the signatures used."""

import inspect
import linecache
import socket

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from learnerkit import torch_internals
from learnerkit.launch.environment import LOOPBACK


def test_a_loader_with_persistent_workers_keeps_its_iterator_in_one_attribute():
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    iterator = iter(loader)
    assert loader._iterator is iterator
    assert torch_internals.loader_attributes(loader) == vars(loader) | {"_iterator": None}
    assert list(iterator) and loader._iterator is iterator  # noqa: PT018
    loader._iterator = None


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
