"""The code of the guides and explanations runs as it stands, and prints what they say; see tests/pages.py."""

import ast
import contextlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import SCRIPTS, environment, without_chatter
from pages import NBS, Fence, all_pages, fences, matches, needs, plain

LANGUAGES = {"python", "sh", "text", "diff", "json", "toml", "yaml", "markdown", "bash", "html", ""}

EACH_PAGE = pytest.mark.parametrize("page", all_pages(), ids=lambda path: str(path.relative_to(NBS)))


@EACH_PAGE
def test_the_code_of_a_page_is_valid(page):
    for fence in fences(page.read_text(encoding="utf-8")):
        where = f"{page.relative_to(NBS)}, line {fence.line}"
        is_directive = fence.language.startswith("{")
        assert is_directive or fence.language in LANGUAGES, f"{where}: a fence of an unknown language"
        if fence.language == "python":
            try:
                ast.parse("\n" * (fence.line - 1) + fence.code)
            except SyntaxError as e:
                raise AssertionError(f"{page.relative_to(NBS)}, line {e.lineno}: {e.msg}") from None
        if fence.runs:
            long = [n for n, line in enumerate(fence.code.splitlines(), fence.line) if len(line) > 120]
            assert not long, f"{where}: lines over 120 characters: {long}"


class PageServer:
    """A process that runs pages, each in a fork of itself."""

    def __init__(self):
        environ = environment() | {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}
        for name in ("PYTHONWARNINGS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_CURRENT_TEST"):
            environ.pop(name, None)
        command = [sys.executable, str(SCRIPTS / "page_server.py")]
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, page, folder):
        """Run a page in an empty folder; return what is wrong with it."""
        folder.mkdir()
        results = folder.parent / f"{folder.name}.results"
        print(json.dumps({"page": str(page), "folder": str(folder), "results": str(results)}), file=self.process.stdin)
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the process that runs the pages has ended with {self.process.wait()}"
        answer = json.loads(answer)
        found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        wrong = [problem for said in found for problem in problems(page, said)]
        if answer["status"] != 0:
            last = f"after the fence of line {found[-1]['line']}" if found else "at its first fence"
            error = Path(f"{results}.error")
            why = error.read_text() if error.exists() else ""
            wrong.append(f"{page.name}: its process ended with {answer['status']}, {last}\n{why}")
        wrong += [f"{page.name}: it has left a process behind: {command}" for command in answer["left"]]
        return "\n\n".join(wrong)

    def close(self):
        """End it."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def problems(page, said):
    """What is wrong with a fence that was run."""
    fence = next(fence for fence in fences(page.read_text(encoding="utf-8")) if fence.line == said["line"])
    printed = without_chatter(said["printed"])
    where = f"{page.name}, line {said['at']}"
    if said["error"]:
        return [f"{where}: {said['error'].strip()}\n--- printed:\n{printed}"]
    if fence.text is not None and not matches(fence.text.code, printed):
        return [f"{where}: it prints not what line {fence.text.line} says\n{compared(fence.text, printed)}"]
    return []


def compared(text: Fence, printed: str) -> str:
    """What the page says, and what was printed, as they are compared."""
    said = "\n".join(plain(text.code))
    got = "\n".join(plain(printed))
    return f"--- the page, as it is compared:\n{said}\n--- printed, as it is compared:\n{got}\n--- printed:\n{printed}"


@pytest.fixture(scope="module")
def server():
    """A process that runs pages."""
    server = PageServer()
    yield server
    server.close()


def missing(page):
    """The packages that a page needs and that are not there."""
    return [name for name in needs(page.read_text(encoding="utf-8")) if importlib.util.find_spec(name) is None]


LONG = (
    "agreement.md", "carried_state.md", "checkpoint.md", "config.md", "cross_validation.md", "equal.md", "examples.md",
    "gan.md", "hang.md", "images.md", "imbalance.md", "language_model.md", "large_models.md", "launching.md",
    "memory.md", "object_stores.md", "one_gpu_to_many.md", "other_libraries.md", "own_loader.md", "ray.md",
    "reinforcement.md", "search.md", "segmentation.md", "serve.md", "slow.md", "tables.md", "texts.md", "tracking.md",
    "training.md", "transformers.md",
)  # fmt: skip
"""They start many processes, wait, or train for long, and show what tests of `-m slow` have, too."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.soak if p.name in LONG else pytest.mark.slow) for p in all_pages()],
    ids=lambda path: str(path.relative_to(NBS)),
)
def test_the_code_of_a_page_runs(page, server, tmp_path):
    if missing(page):
        pytest.skip(f"the page needs {', '.join(missing(page))}")
    wrong = server.run(page, tmp_path / "page")
    assert not wrong, f"\n{wrong}"


# Of the test itself

PAGE = """\
# A page

```{code-block} python
:caption: add.py

import sys
print("sum", int(sys.argv[1]) + 1)
sys.exit(int(sys.argv[1]) == 3)
```

```python
x = 1
print("x is", x, "and 2.50")
```
```text
x is 7   and ...
```

```sh
pip install nothing
python add.py 1
```

```text
sum 2
```

Some text.

<!-- raises: ZeroDivisionError -->
```python
def fail():
    return x / 0

fail()
```
```text
ZeroDivisionError: division by zero
```

<!-- exit: 1 -->
```sh
python add.py 3
```
"""


def run(server, folder, text):
    "What is wrong with a page of this text."
    page = folder / "page.md"
    page.write_text(text)
    return server.run(page, folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("x = 1\n", "x = 2\n", ""),
        ("x = 1\n", "y = 1\n", "page.md, line 13: Traceback"),
        ("x is 7", "y is 7", "page.md, line 12: it prints not what line 16 says"),
        ("sum 2", "sum", "page.md, line 20: it prints not what line 25 says"),
        ("x / 0", "x / 1", "page.md, line 32: it should raise ZeroDivisionError"),
        ("Zero", "Value", "page.md, line 33: it should raise ValueDivisionError"),
        ("add.py 3", "add.py 2", "page.md, line 43"),
        ("x = 1", "import os; os._exit(5)", "page.md: its process ended with 5, at its first fence"),
        pytest.param(  # which is waited for
            "x = 1", "import subprocess; x = 1; subprocess.Popen(['sleep', '61'])", "left a process behind: sleep 61",
            marks=pytest.mark.soak,
        ),
    ],
)  # fmt: skip
def test_a_page_that_does_not_do_what_it_says_is_found(old, new, problem, server, tmp_path):
    wrong = run(server, tmp_path, PAGE.replace(old, new, 1))
    assert (problem in wrong) if problem else not wrong, wrong


def test_a_text_is_compared_without_its_numbers():
    assert matches("loss  0.25\n", "loss 1e-03\n")
    assert matches("a ... c\n...\nend\n", "a b c\n1\n2\nend\n")
    assert matches("0 00:00.1", "12  01:02.3\n\n")
    assert not matches("loss 0.25", "loss nan")
    assert not matches("a\nb", "a\nc\nb")
    assert not matches("conv1 3", "conv2 3")
    assert plain("a\rb\n") == ["b"]
