"""A real Jupyter kernel for tests: cells are executed in it, and what they show is collected."""

import re
import time
from dataclasses import dataclass, field

from launching import environment


@dataclass
class Shown:
    """The output of a cell."""

    text: str = ""
    pages: list[str] = field(default_factory=list)  # HTML, as it was at the end
    pictures: int = 0
    times: list[tuple[float, str]] = field(default_factory=list)  # when each piece of output came
    error: str = ""  # the name of the exception
    traceback: str = ""


class Kernel:
    """A kernel whose working directory is `folder`."""

    def __init__(self, folder):
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environment() | {"IPYTHONDIR": str(folder)}, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=300)

    @property
    def process_id(self):
        return self.manager.provisioner.pid

    def run(self, code, timeout=400, on_output=None):
        """Execute a cell to its end; `on_output(text so far)` is called as output comes."""
        shown, displays = Shown(), {}
        sent = self.client.execute(code)
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown.text += content["text"]
                shown.times.append((time.monotonic(), content["text"]))
            elif kind in ("display_data", "update_display_data", "execute_result"):
                data = content["data"]
                shown.pictures += "image/png" in data
                if "text/html" in data:
                    displays[content.get("transient", {}).get("display_id", len(displays))] = data["text/html"]
                elif kind == "execute_result":
                    shown.text += data["text/plain"]
                shown.times.append((time.monotonic(), data.get("text/html", "")))
            elif kind == "error":
                shown.error = content["ename"]
                shown.traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                shown.pages = list(displays.values())
                return shown
            if on_output is not None:
                on_output(shown)
        raise AssertionError(f"the cell took over {timeout} s\n{shown}")

    def stop(self):
        """The Stop button."""
        self.manager.interrupt_kernel()

    def close(self):
        """End the kernel, even if it is busy."""
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        else:
            self.manager.cleanup_resources()


def alive(process_id):
    """Tell whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(process_ids, seconds=60.0):
    """Tell whether all of them end within some seconds."""
    end = time.monotonic() + seconds
    while any(map(alive, process_ids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, process_ids))
