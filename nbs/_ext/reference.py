"""What the reference has beside docstrings: the loop, the commands' help, and links of names.

- `Learner` in single backticks, in a docstring, is a link if there is such a public name, and code otherwise.
- A type in a signature is found under its public name, wherever the class is defined.
- A docstring may have `*` and `|` in its text; they are taken as they are.
- The code below a heading of `reference/examples.md` stands below the docstring that the heading names.
- ``{training-loop}`` is the text in `learnerkit.events`; each event in it is a target of ``{ref}``,
  such as `event-after_loss`.
- ``{command-help} module:function`` is the help text of the parser that the function makes.
"""

import json
import keyword
import os
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject, PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

import learnerkit
from learnerkit.callback import Callback
from learnerkit.events import LOOP, Event

NAME = re.compile(r"[A-Za-z_][\w.]*")
PLACES = {name: f"learnerkit.{name}" for name in (*learnerkit.__all__, *learnerkit._UNLISTED)} | {
    place.rpartition(".")[2]: f"learnerkit.{place}" for place in learnerkit._OLD.values()
}
"""Names that are links wherever they stand, and what the reference has them under."""

EXAMPLES = Path(__file__).parents[1] / "reference" / "examples.md"


def name_role(
    role: str, rawtext: str, text: str, lineno: int, inliner: Any, options: Any = None, content: Any = ()
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Make a link of a public name, and code of any other text."""
    if NAME.fullmatch(text) and not keyword.iskeyword(text):
        return PythonDomain.roles["obj"]("py:obj", rawtext, text, lineno, inliner)
    return [nodes.literal(rawtext, text)], []


def resolve_public(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contnode: nodes.Element
) -> nodes.Element | None:
    """Find `learnerkit.learner.Learner.fit`, or `Learner.fit` on the page of another module, as the public name."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target:
        return None
    parts = target.split(".")
    at = max((i for i, part in enumerate(parts) if part in PLACES), default=None)
    if at is None or (at and parts[0] != "learnerkit"):
        return None
    public = ".".join([PLACES[parts[at]], *parts[at + 1 :]])
    domain = env.domains.python_domain
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], public, node, contnode)


def skip_hooks(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the hooks of callbacks, and what they remember: the class's own docstring says what it does."""
    owner = str(getattr(obj, "__qualname__", "")).split(".")[0]
    remembers = name in ("state_dict", "load_state_dict") and owner not in (Callback.__name__, "Learner")
    if name in set(Event) or remembers:
        return True
    return None


def shorten_event(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Leave the loop out of the docstring of `Event`: the page draws it."""
    if obj is Event:
        lines[:] = [lines[0].rstrip(":") + ".", ""]


def escape(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Take the text of a docstring as it is: in single backticks is code, and no other character is markup."""
    parts = re.split(r"(``.*?``|`[^`]*`)", "\n".join(lines), flags=re.DOTALL)
    parts[::2] = [re.sub(r"[*|]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    lines[:] = "".join(parts).split("\n")
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # a comment: napoleon takes what stands before a colon in the first line for a type


@cache
def examples() -> dict[str, str]:
    """The code of the examples, by the names in their headings."""
    found = re.findall(r"^## (\S+)\n\n```\S*(?: python)?\n(.*?)^```$", EXAMPLES.read_text("utf-8"), re.M | re.S)
    return dict(found)


def add_example(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put the example of a class or a method below its docstring."""
    if code := examples().get(name.removeprefix("learnerkit.")):
        lines += ["", ".. code-block:: python", "", *("   " + line for line in code.splitlines()), ""]


def name_lexer(app: Sphinx, docname: str, content: list[str]) -> None:
    """Say of a notebook that its code is IPython's, which has lines such as ``!ls``."""
    if app.env.doc2path(docname).suffix == ".ipynb":
        notebook = json.loads(content[0])
        notebook["metadata"].setdefault("language_info", {})["pygments_lexer"] = "ipython3"
        content[0] = json.dumps(notebook)


class TrainingLoop(SphinxDirective):
    """The loop as a text, with links to the cancels and targets at the events."""

    def run(self) -> list[nodes.Node]:
        """Make the block."""
        block = nodes.literal_block("the loop", "", classes=["training-loop"])  # unlike its text: not highlighted
        seen: set[str] = set()
        for word in re.split(r"(\w+)", LOOP.strip("\n")):
            if word in set(Event) and word not in seen:
                seen.add(word)
                block += self.event(word)
            elif word in PLACES:
                block += self.link(word)
            else:
                block += nodes.Text(word)
        return [block]

    def event(self, name: str) -> nodes.Element:
        """An event where it first stands, which pages can link to."""
        label = f"event-{name}"
        domain = self.env.domains.standard_domain
        domain.anonlabels[label] = self.env.docname, label
        domain.labels[label] = self.env.docname, label, name
        return nodes.strong(name, name, ids=[label])

    def link(self, name: str) -> nodes.Element:
        """A link to a public name."""
        return addnodes.pending_xref(
            "", nodes.inline(name, name), refdomain="py", reftype="obj", reftarget=PLACES[name],
            refexplicit=True, refdoc=self.env.docname,
        )  # fmt: skip


class CommandHelp(SphinxDirective):
    """What a command prints with --help."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Make the block."""
        module, _, function = self.arguments[0].partition(":")
        with mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}):
            text = getattr(import_module(module), function)().format_help()
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Add all this to Sphinx."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.add_role("name", name_role)
    app.add_directive("training-loop", TrainingLoop)
    app.add_directive("command-help", CommandHelp)
    app.connect("missing-reference", resolve_public)
    app.connect("autodoc-skip-member", skip_hooks)
    app.connect("autodoc-process-docstring", shorten_event)
    app.connect("autodoc-process-docstring", escape, priority=400)  # before napoleon, which writes markup
    app.connect("autodoc-process-docstring", add_example, priority=600)  # after napoleon, whose sections come first
    app.connect("source-read", name_lexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
