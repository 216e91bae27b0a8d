"""The README: its code runs as it stands, it is short, and what it names is there."""

import ast
import re
from pathlib import Path

import pytest
from launching import run_script

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
HEADER = ["epoch", "train_loss", "valid_loss", "accuracy", "time"]


def code_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def section(title, text=README):
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"there is no section {title!r}"
    return found[1]


def diff_sides():
    "The diff as the code before and the code after."
    (block,) = code_blocks("diff")
    lines = block.splitlines()
    return ["".join(f"{line[1:]}\n" for line in lines if line[0] in f" {sign}") for sign in "-+"]


def tables(text):
    "The tables of a printed text, each a list of rows, each a list of cells; the first row is the header."
    found = []
    for line in text.splitlines():
        cells = line.split()
        if cells[:2] == HEADER[:2]:
            found.append([cells])
        elif found and cells and cells[0].isdigit() and len(cells) == len(found[-1][0]):
            found[-1].append(cells)
    return found


def run(code, namespace):
    exec(compile(code, "README.md", "exec"), namespace)


# What it has, and where


@pytest.mark.parametrize(
    "command",
    [
        "pip install -e '.[examples]' && python -m learnerkit.launch --nproc 2 examples/train_fashion.py",
        "pip install -e '.[dev]' && pytest",
    ],
)
def test_commands_are_each_in_a_block_of_their_own(command):
    assert f"{command}\n" in code_blocks("sh")


@pytest.mark.parametrize("start", ["pip install -e '.[docs]' && python nbs/build.py", "pytest -m slow", "ruff check"])
def test_commands_begin_a_line(start):
    assert re.search(rf"^{re.escape(start)}\b", README, re.MULTILINE)


def test_it_is_short_and_begins_with_what_a_newcomer_needs():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert lines[0] == "# learnerkit"
    assert len(lines[2].split()) < 40
    beginning = "\n".join(lines[:47])
    order = ["pip install", "no GPU", "```python", "```text", "```diff", "torchrun", "learnerkit.launch train.py"]
    places = [beginning.find(part) for part in order]
    assert -1 not in places
    assert places == sorted(places)
    assert len([line for line in lines if line.startswith("Licence:")]) == 1


def test_limits_and_reasons_take_ten_lines_at_most():
    lines = section("What it does not do, and why not another library").strip().splitlines()
    assert len(lines) <= 10
    for name in ("fastai", "Lightning", "Accelerate", "Plain PyTorch"):
        assert any(line.startswith(f"- **{name}**") for line in lines), name


def test_the_licences_of_what_ships_are_named():
    (line,) = [line for line in README.splitlines() if line.startswith("Licence:")]
    words = {"FASHION_MNIST_LICENSE": "Zalando", "CHAT_LINES_LICENSE": "chatterbot", "PENGUINS_NOTICE": "penguin"}
    notices = {p.name for p in (ROOT / "learnerkit" / "assets").iterdir() if p.name.endswith(("LICENSE", "NOTICE"))}
    assert notices == set(words)
    assert [name for name, word in words.items() if word not in line] == []


def test_links_and_files_are_there():
    for text, folder in ((README, ROOT), (CONTRIBUTING, ROOT / ".github")):
        links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
        assert [link for link in links if not (folder / link.partition("#")[0]).exists()] == []
    named = re.findall(r"\b(?:examples|tests|nbs)/[\w/]+\.(?:py|ipynb|md)\b", README + CONTRIBUTING)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_guide_is_linked():
    guides = {f"nbs/guides/{path.name}" for path in (ROOT / "nbs" / "guides").glob("*.md")}
    assert guides - set(re.findall(r"\]\((nbs/guides/\w+\.md)\)", README)) == set()


def test_contributing_names_the_folders():
    lines = section("What is where", CONTRIBUTING).splitlines()
    named = [line.split("|")[1].strip(" `") for line in lines if line.startswith("|") and "`" in line]
    assert len(named) == len(set(named))
    folders = {f"learnerkit/{path.parent.name}/" for path in (ROOT / "learnerkit").glob("*/__init__.py")}
    assert set(named) == folders | {"learnerkit/", "examples/", "nbs/", "tests/"}


# Its code


def test_a_complete_example_ends_by_line_30_and_prints_the_table_that_is_shown(capsys):
    example = code_blocks("python")[0]
    before = README[: README.index(example)].count("\n")
    assert before + example.count("\n") < 30
    run(example, {})
    (table,) = tables(capsys.readouterr().out)
    (shown,) = tables(code_blocks("text")[0])
    assert table[0] == shown[0] == HEADER
    assert [row[0] for row in table] == [row[0] for row in shown]
    assert float(table[-1][3]) > 0.75
    assert Path("models/fashion.pth").is_file()


@pytest.mark.slow
def test_images_texts_and_tables_are_trained_on_as_shown(capsys):
    _, kinds, _ = code_blocks("python")
    short = {'weights="DEFAULT"': "weights=None", "fine_tune(3)": "fine_tune(1, cbs=ShortEpochCallback(0.001))"}
    for shown, quick in short.items():
        assert shown in kinds
        kinds = kinds.replace(shown, quick)
    run("from learnerkit import ShortEpochCallback, accuracy\n" + kinds.replace("loaders(64)", "loaders(2)"), {})
    found = [float(table[-1][3]) for table in tables(capsys.readouterr().out)]
    assert len(found) == 4  # fine_tune prints two tables
    assert min(found[2:]) > 0.8


def test_the_callback_has_five_lines_and_runs(capsys):
    example, *_, callback = code_blocks("python")
    (definition,) = [node for node in ast.parse(callback).body if isinstance(node, ast.ClassDef)]
    assert definition.end_lineno - definition.lineno + 1 == 5
    namespace = {}
    run(example.replace("one_cycle(3,", "one_cycle(1,"), namespace)
    run(callback, namespace)
    assert tables(capsys.readouterr().out)[-1][0] == [*HEADER[:-1], "grad_norm", "time"]


@pytest.mark.slow
def test_the_diff_turns_the_example_into_one_for_several_processes(tmp_path):
    before, after = diff_sides()
    example = code_blocks("python")[0]
    assert before in example
    script = tmp_path / "train.py"
    script.write_text(example.replace(before, after))
    (table,) = tables(run_script(script, nproc=2))
    assert len(table) == 1 + 3
    assert float(table[-1][3]) > 0.7
    assert Path("models/fashion.pth").is_file()
