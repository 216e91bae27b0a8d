"""The GPUs of this machine, found without importing torch."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import takewhile

GPU_DEVICE_FILES = ("/dev/nvidia0", "/dev/kfd")  # NVIDIA, AMD


def choose_gpus(gpus: str, names: list[str]) -> list[str]:
    """Return the names of the GPUs whose indices are listed in `gpus`."""
    indices = [int(part) if part.strip().isdecimal() else -1 for part in gpus.split(",")]
    if len(set(indices)) < len(indices) or not all(0 <= index < len(names) for index in indices):
        raise ValueError(
            f"--gpus {gpus}: "
            + (f"give indices from 0 to {len(names) - 1}, each once" if names else "no GPU can be used here")
        )
    return [names[index] for index in indices]


def gpu_names(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process of this environment sees, named as in CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return listed_gpus(environ["CUDA_VISIBLE_DEVICES"])
    count = count_with_nvml()
    if count is None:
        count = count_with_torch() if any(map(os.path.exists, GPU_DEVICE_FILES)) else 0
    return [str(index) for index in range(count)]


def listed_gpus(visible: str) -> list[str]:
    """Return the indices, GPU and MIG names in a CUDA_VISIBLE_DEVICES; like CUDA, stop at the first bad one."""
    return list(takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, map(str.strip, visible.split(","))))


def count_with_nvml() -> int | None:
    """Ask the driver's management library; `None`: it is missing or does not answer."""
    import ctypes  # On some machines it opens a file, so the standard files must be open by now.

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() != 0:
        return None
    answered = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    nvml.nvmlShutdown()
    return count.value if answered else None


def count_with_torch() -> int:
    """Ask torch in another process: slow, but torch knows the GPUs of every maker."""
    question = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(question, stdout=subprocess.PIPE, text=True).stdout.strip()
    return int(answer) if answer.isdecimal() else 0
