"""The page of errors: reads its entries, and writes what the search page needs to find them by a message.

Each entry quotes a few messages, or how they begin, as templates with {...} for each value.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[1] / "errors.md"

_ENTRY = re.compile(
    r"^\(([a-z0-9-]+)\)=\n### (.+)\n\n((?:- `.+\n)+)\n((?:.|\n)+?)(?=\n\([a-z0-9-]+\)=\n|\n## |\Z)", re.M
)
_ADDRESS = re.compile(r" \(errors\.html#([a-z0-9-]+)\)$")


class Entry(NamedTuple):
    """An entry of the page: its anchor, its title, the templates that it quotes, and what it says about them."""

    slug: str
    title: str
    templates: list[str]
    text: str


def entries(page: Path = PAGE) -> list[Entry]:
    """The entries of the page."""
    return [
        Entry(slug, title, [re.sub(r"^- (`+) ?| ?`+$", "", line) for line in shown.splitlines()], text.strip())
        for slug, title, shown, text in _ENTRY.findall(page.read_text(encoding="utf-8"))
    ]


def normal(template: str) -> str:
    """A template without the names of values, line ends and the address, to compare it with another one."""
    return re.sub(r"\{[^{}]*\}", "{}", _ADDRESS.sub("", " ".join(template.split())))


def address(template: str) -> str | None:
    """The anchor of the entry that a message names at its end."""
    found = _ADDRESS.search(template)
    return found and found[1]


def index_script() -> str:
    """The templates with the anchors and titles of their entries, for _static/errors.js."""
    rows = [[normal(template), entry.slug, entry.title] for entry in entries() for template in entry.templates]
    return f"const errorIndex = {json.dumps(rows, ensure_ascii=False)};\n"


def setup(app: Any) -> dict[str, Any]:
    """Let Sphinx's search page find entries by messages."""

    def write(app: Any) -> None:
        file = Path(app.outdir, "_static", "errors-index.js")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(index_script(), encoding="utf-8")

    def add_scripts(app: Any, page: str, *_: Any) -> None:
        for name in ("errors-index.js", "errors.js") if page == "search" else ():
            app.add_js_file(name)

    app.connect("builder-inited", write)
    app.connect("html-page-context", add_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
