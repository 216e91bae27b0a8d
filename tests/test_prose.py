"""Each docstring of the package begins with a verb, or with an article and a noun; ruff's D401 reads functions, too."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]

REFUSED = {
    "What", "How", "Whether", "Which", "Where", "Who", "Whom", "Whose", "When", "Why", "As", "In", "Of", "For", "By",
    "With", "One", "Those", "That", "This", "Some", "Also", "If", "Anything", "Everything", "Nothing",
}  # fmt: skip
"""The first words of questions, and of fragments that have no verb and no noun at their beginning."""


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = []
    for path in sorted((ROOT / "learnerkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(text, str) and text.split(maxsplit=1)[0].rstrip(",:") in REFUSED:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)
