"""Private names of torch, CPython and IPython that are needed, each as one named function."""

import linecache
import socket
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader


def loader_attributes(loader: DataLoader) -> dict[str, Any]:
    """Return a DataLoader's attributes without its iterator, which holds processes if it has persistent workers."""
    return vars(loader) | {"_iterator": None}


def host_store(listener: socket.socket, world_size: int) -> dist.Store:
    """Serve the store of a process group on a socket of ours: torch's own would listen on every interface."""
    host, port = listener.getsockname()
    return dist.TCPStore(
        host, port, world_size, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False
    )


def typed_sources() -> dict[str, tuple]:
    """Return linecache's entries of what was typed rather than read from a file, such as the cells of a notebook."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def add_typed_sources(sources: dict[str, tuple]) -> None:
    """Let tracebacks show lines that were typed in another process."""
    linecache.cache.update(sources)


def cell_title(shell: Any, name: str) -> str:
    """Return a cell's title in IPython's tracebacks ('Cell In[3]') for the name of its code; '' for other names."""
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", None)  # not in IPython 7
    return " ".join(format_name(name) or ()) if format_name is not None else ""


def show_as_notebook(shell: Any, kernel: object) -> None:
    """Give an IPython shell a kernel, by which libraries (and `utils.front_end`) recognise a notebook."""
    shell.kernel = kernel
