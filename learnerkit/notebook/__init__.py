"""DDP from a notebook cell or a Python prompt: the kernel starts worker processes, which train."""
