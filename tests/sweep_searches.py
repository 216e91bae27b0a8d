"""Searches for the tests of the sweep, in processes of their own."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from launching import SCRIPTS, environment, hearing_ctrl_c

LIMIT = 600  # seconds: a busy machine may be many times slower


def write_config(**entries):
    x = {"type": "float", "min": -1, "max": 1}
    entries = {"algorithm": "random", "seed": 3, "metric": "loss", "parameters": {"x": x}} | entries
    Path("c.json").write_text(json.dumps(entries))


class Search:
    """A search that runs; it does not outlive the block.

    Args:
        options: of the command line.
        script: what its trials run, by the config c.json; `None`: as the options say.
        env: variables, as they are or as JSON.
    """

    def __init__(self, *options, script="sweep_trial.py", **env):
        words = [*options, *(["c.json", SCRIPTS / script] if script else [])]
        env = environment() | {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in env.items()
        }
        with hearing_ctrl_c():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "learnerkit.sweep", *map(str, words)], env=env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()

    def end(self):
        """Wait for the end, and return the exit code and what it has printed."""
        printed = self.process.communicate(timeout=LIMIT)[0]
        return self.process.returncode, printed


def runs(number):
    """What each run of a trial has noted."""
    path = Path(f"sweeps/c/trials/{number}/runs")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition):
    deadline = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def states(printed):
    """The last state of each trial in what was printed."""
    lines = re.findall(r"^(?:\*| ) +(\d+) +(?:[-+\d.e:]+ +)*([a-z].*)$", printed, re.MULTILINE)
    return {int(number): state for number, state in lines}
