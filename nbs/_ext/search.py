"""The search of the site: names are found by their parts, and each result has a part of its page.

Excerpts come from a script with the texts of all pages. Sphinx's own would be fetched, which a browser refuses where
the site is read from a folder.
"""

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def parts(word: str) -> list[str]:
    """The words in a name: `ImageData` has "Image" and "Data", `resnet34` has "resnet"; a plain word has none."""
    found = _PART.findall(word)
    return [] if found == [word] else [part for part in found if len(part) > 2]


class Words(SearchEnglish):
    """English, in which a name counts as itself and as the words in it."""

    def split(self, input: str) -> list[str]:
        """The words of a text."""
        words = super().split(input)
        return words + [part for word in words for part in parts(word)]


def text_of(doctree: nodes.document) -> str:
    """The text of a page, without outputs in HTML."""
    blocks = doctree.findall(lambda node: isinstance(node, nodes.TextElement) and not isinstance(node, nodes.Inline))
    return " ".join(" ".join(block.astext() for block in blocks if not isinstance(block, nodes.raw)).split())


def setup(app: Sphinx) -> dict[str, Any]:
    """Let Sphinx search so."""
    texts: dict[str, str] = {}

    def note(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
        if doctree is not None:
            texts[page] = text_of(doctree)
        for name in ("search-texts.js", "search.js") if page == "search" else ():
            app.add_js_file(name)

    def write(app: Sphinx, error: Exception | None) -> None:
        script = f"const searchTexts = {json.dumps(texts, ensure_ascii=False)};\n"
        Path(app.outdir, "_static", "search-texts.js").write_text(script, encoding="utf-8")

    app.add_search_language(Words)
    app.connect("html-page-context", note)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
