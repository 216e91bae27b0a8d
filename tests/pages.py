"""The code of a page in Markdown: its fences, and whether what they print is what the page says.

A page is read as its reader would try it, from the top to the bottom, in one Python session and one empty folder:

- A ```` ```python ```` fence is run. What it prints is not looked at, unless a ```` ```text ```` fence follows: then
  both must be the same, standard error included, with every number read as `N` and every run of spaces as one.
  `...` in a text stands for anything, and `...` on a line of its own for any number of lines.
- Of a ```` ```sh ```` fence the lines that begin with `python ` are run in that folder. A text may follow it, too.
- A code block with a caption that names a file (```` ```{code-block} python ```` and `:caption: train.py`) is written
  to that file. Any other code block is not run, but if it is Python it must be valid.
- Comments of HTML say what else is needed. `<!-- needs: optuna, pandas -->` anywhere names packages without which the
  page is skipped. `<!-- raises: ValueError -->` before a Python fence says that it must end with that error: of the
  traceback its last part alone is printed (`ValueError: ...`). `<!-- exit: 1 -->` before a sh fence says that its last
  command must end with that code, or with any code but 0 if it says `fail`.

A page that contains `examples/` finds the folder of the repository there. Fences inside of other directives
(```` ```{note} ````) are not looked at; those between `:::{note}` and `:::` are.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NBS = ROOT / "nbs"
FOLDERS = ("guides", "explanations")

_OPEN = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`]*)$")
_COMMENT = re.compile(r"^<!--\s*(raises|exit|needs):\s*(.*?)\s*-->\s*$")
_NUMBER = re.compile(r"(?<![A-Za-z_\d])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass
class Fence:
    """A fence of a page: its language ('python', 'sh', 'text', ...), its code, and the number of its first line."""

    language: str
    code: str
    line: int
    block: bool = False  # a code-block, which is not run
    caption: str = ""
    raises: str = ""
    exit: str = "0"
    text: "Fence | None" = None  # what it prints, as the page says

    @property
    def runs(self) -> bool:
        """Whether a reader is meant to run it."""
        return not self.block and self.language in ("python", "sh")

    @property
    def file(self) -> str:
        """The file to which it is written, if it is one's."""
        return self.caption if self.block and re.fullmatch(r"[\w./-]+\.\w+", self.caption) else ""

    @property
    def commands(self) -> list[tuple[int, str]]:
        """Of a sh fence the commands that are run, each with the number of its line."""
        found, lines = [], iter(enumerate(self.code.splitlines(), self.line))
        for number, line in lines:
            while line.endswith("\\"):
                line = line[:-1] + next(lines)[1]
            if line.startswith("python "):
                found.append((number, line))
        return found


def all_pages() -> list[Path]:
    """The pages whose code is run."""
    pages = [path for folder in FOLDERS for path in (NBS / folder).glob("*.md")]
    return sorted([*pages, NBS / "index.md", NBS / "reference" / "examples.md"])


def needs(text: str) -> list[str]:
    """The packages that a page says it needs."""
    found = [match[2] for line in text.splitlines() if (match := _COMMENT.match(line)) and match[1] == "needs"]
    return [name.strip() for names in found for name in names.split(",")]


def fences(text: str) -> list[Fence]:
    """The fences of a page in their order; a text that belongs to the fence before it is that one's alone."""
    found: list[Fence] = []
    said: dict[str, str] = {}
    between = True  # whether there was other text since the last fence
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        opened = _OPEN.match(line)
        if comment := _COMMENT.match(line):
            said[comment[1]] = comment[2]
        elif opened:
            fence = _read_fence(opened, number, lines)
            if fence.language == "text" and not fence.block and found and found[-1].runs and not between:
                found[-1].text = fence
            else:
                fence.raises, fence.exit = said.pop("raises", ""), said.pop("exit", "0")
                found.append(fence)
            between = False
        elif line.strip():
            between = True
    return found


def _read_fence(opened: re.Match, number: int, lines: Iterator[tuple[int, str]]) -> Fence:
    indent, info = len(opened["indent"]), opened["info"].strip()
    body = []
    for _, line in lines:
        if re.fullmatch(rf" *{opened['ticks']}`*\s*", line):
            break
        body.append(line[indent:] if not line[:indent].strip() else line)
    else:
        raise AssertionError(f"line {number}: the fence that is opened here is not closed")
    first, options = number + 1, {}
    directive = re.fullmatch(r"\{(\S+)\}\s*(\S*)", info)
    if directive:
        while body and (option := re.fullmatch(r":(\w[\w-]*):\s*(.*)", body[0])):
            options[option[1]] = option[2]
            body, first = body[1:], first + 1
        while body and not body[0].strip():
            body, first = body[1:], first + 1
        info = directive[2] if directive[1] in ("code-block", "code") else "{" + directive[1] + "}"
        info = options.get("language", "") if directive[1] == "literalinclude" else info
    language = info.split()[0] if info else ""
    code = "".join(f"{line}\n" for line in body)
    return Fence(language, code, first, block=bool(directive), caption=options.get("caption", ""))


# What is printed


def plain(text: str) -> list[str]:
    """The lines of a printed text, with every number as `N` and every run of spaces as one; empty ones at its ends go.

    Of a line that was drawn several times (a bar's) the last state is left.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    lines = [re.sub(r"\s+", " ", _NUMBER.sub("N", line)).strip() for line in lines]
    return "\n".join(lines).strip("\n").split("\n")


def matches(said: str, printed: str) -> bool:
    """Whether a text says what was printed; `...` stands for anything."""
    pattern = []
    for line in plain(said):
        if line == "...":
            pattern.append(r"(?:.*\n)*?")
        else:
            pattern.append(".*".join(map(re.escape, line.split("..."))) + r"\n")
    return re.fullmatch("".join(pattern), "".join(f"{line}\n" for line in plain(printed))) is not None
