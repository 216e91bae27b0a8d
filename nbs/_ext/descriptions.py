"""What pages have beside their text: pictures of the notebooks, a description, and captions in the sidebar.

- ``{notebook-picture} 01_getting_started.ipynb cell-05`` is a figure with the picture that this cell has drawn, and its
  ``image.alt`` as the alt text. The content of the directive is the caption.
- The description of a page, for search engines and previews, is its first paragraph.
- The captions of a page's tables of contents stand in the sidebar, too.
"""

import base64
import html
import json
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.parsers.rst.directives.images import Figure
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


class NotebookPicture(Figure):
    """A figure with the picture that a cell of a notebook has drawn."""

    required_arguments = 2  # the notebook, and the id of the cell
    optional_arguments = 0
    final_argument_whitespace = False
    option_spec = {**(Figure.option_spec or {}), "alt": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Write the picture to a file, and make the figure."""
        env = self.state.document.settings.env
        name, cell_id = self.arguments
        notebook = Path(env.srcdir, name)
        env.note_dependency(str(notebook))
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        cell = next(cell for cell in cells if cell["id"] == cell_id)
        picture = next(
            output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {})
        )
        file = Path(env.doctreedir, "pictures", f"{notebook.stem}-{cell_id}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode("".join(picture)))
        self.options.setdefault("alt", cell["metadata"]["mystnb"]["image"]["alt"])
        self.arguments = ["/" + os.path.relpath(file, env.srcdir)]
        return super().run()


def describe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Give a page its first paragraph as its description."""
    first = next(iter(doctree.findall(nodes.paragraph)), None) if doctree is not None else None
    if first is not None:
        text = html.escape(" ".join(first.astext().split()))
        context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{text}" />'


def captions(env: BuildEnvironment) -> list[tuple[str, str]]:
    """The captions of tables of contents, each with the first page below it."""
    found = [node for toc in env.tocs.values() for node in toc.findall(addnodes.toctree)]
    return [(node["caption"], node["entries"][0][1]) for node in found if node.get("caption")]


def add_captions(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Put the captions into the theme's sidebar, which has only the pages."""
    for caption, first in captions(app.env):
        address = re.escape("#" if first == page else context["pathto"](first))
        item = rf'<li class="toctree-l\d[^"]*"><a class="[^"]*" href="{address}">'
        shown = f'<li class="toc-caption">{html.escape(caption)}</li>'
        context["furo_navigation_tree"] = re.sub(item, rf"{shown}\g<0>", context["furo_navigation_tree"], count=1)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add all this to Sphinx."""
    app.add_directive("notebook-picture", NotebookPicture)
    app.connect("html-page-context", describe)
    app.connect("html-page-context", add_captions, priority=900)  # after the theme has made its sidebar
    return {"parallel_read_safe": True, "parallel_write_safe": True}
