"""DDP from a notebook cell or a Python prompt: a kernel starts worker processes, which train."""
