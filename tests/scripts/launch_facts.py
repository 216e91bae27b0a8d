"""Print what a script can see of the interpreter it runs in, one JSON line per process."""

import json
import os
import sys


def is_inheritable(descriptor):
    """Tell whether a program that the script starts would get this file."""
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


if __name__ == "__main__":
    facts = {
        "argv": sys.argv,
        "path": sys.path,
        "main": sorted(set(vars(sys.modules["__main__"])) - {"__annotations__"}),
        "same main": vars(sys.modules["__main__"]) is globals(),
        "file": __file__,
        "package": __package__,
        "spec": __spec__ and __spec__.name,
        "loader": type(__loader__).__name__,
        "cached": globals().get("__cached__"),  # from Python 3.15 on there is none
        "inherited": [fd for fd in range(3, 100) if is_inheritable(fd)],
        "stdin": sys.stdin.read(),
        "torch": "torch" in sys.modules,
        "ours": [name for name in sys.modules if "learnerkit" in name or name in ("rank_main", "processes")],
        "env": {name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    }
    os.write(1, json.dumps(facts).encode() + b"\n")  # in one piece, whatever the other rank prints
