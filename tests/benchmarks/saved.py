"""What run.py has measured, in a file, and as tables of the page that shows it.

The file is `nbs/explanations/costs.json`: for each benchmark its rows, when, where and with which versions they were
measured, and the command. The page `costs.md` beside it has a table between each pair of lines

    <!-- measured: step ddp -->
    <!-- end -->

which `save` writes anew. Nobody edits them: a test compares them with the file.
"""

import json
import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "nbs" / "explanations"
FILE, PAGE = PAGES / "costs.json", PAGES / "costs.md"
TABLES = re.compile(r"(<!-- measured: ([\w ]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
ON_GPU = {"gpu"}  # of the benchmarks: measured where there is one


def save(name: str, rows: list[tuple[str, str, str]], rounds: int) -> None:
    """Keep the rows of a benchmark, and show them in the page."""
    found = read()
    found[name] = {
        "command": f"python tests/benchmarks/run.py {name} --rounds {rounds}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(name in ON_GPU),
        "versions": versions(),
        "rows": rows,
    }
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), read()))


def read() -> dict[str, dict]:
    """What is kept, by benchmark."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def with_tables(page: str, found: dict[str, dict]) -> str:
    """The text of the page with the tables of what was found."""
    return TABLES.sub(lambda match: match[1] + tables(match[2].split(), found) + match[3], page)


def tables(names: list[str], found: dict[str, dict]) -> str:
    """The tables of some benchmarks: one for all that were measured on one day in one place."""
    groups: dict[tuple, list[str]] = {}
    for name in names:
        if name in found:
            groups.setdefault(tuple(found[name][key] for key in ("date", "machine", "versions")), []).append(name)
    texts = []
    for (date, where, what), members in groups.items():
        rows = [row for name in members for row in found[name]["rows"]]
        has_goals = any(goal for _, _, goal in rows)
        head = ["what", "figure", "goal"] if has_goals else ["what", "figure"]
        lines = [_line(head), _line(["---"] * len(head))]
        for text, figure, goal in rows:
            cells = [
                text.replace("    ", "&emsp;", 1),
                figure.replace(" us", "&nbsp;us").replace(" %", "&nbsp;%"),
                goal,
            ]
            lines.append(_line(cells[: len(head)]))
        commands = "\n".join(found[name]["command"] for name in members)
        texts.append("\n".join(lines) + f"\n\n{date}; {where}; {what}:\n\n```{{code-block}} sh\n{commands}\n```\n")
    return "\n" + "\n".join(texts) + "\n" if texts else ""


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine(with_gpu: bool = False) -> str:
    """The processor, how many cores of it this process may use, the GPU if it is used, and the system."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        cpu = " ".join(names[0].split()) if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    used = "no GPU used"
    if with_gpu:
        import torch

        used = torch.cuda.get_device_name()
    return f"{cores} core{'s' * (cores > 1)} of {cpu}, {used}, {platform.system()}"


def versions() -> str:
    """Those of Python, torch and this package."""
    from learnerkit import __version__

    return f"Python {platform.python_version()}, torch {version('torch')}, learnerkit {__version__}"
