"""The notebooks run as they stand, and are committed with their outputs."""

import ast
import importlib
import re

import pytest
from helpers import ROOT
from launching import environment
from printed import HEADER

NOTEBOOKS = {  # with so many pictures and tables
    "01_getting_started": (4, 4),
    "02_distributed": (3, 3),
    "03_training": (7, 10),
    "04_writing_callbacks": (4, 3),
    "05_resume": (1, 2),
    "06_scaling": (3, 2),
    "07_looking_inside": (10, 1),
    "08_data": (2, 4),
    "09_batch_and_rate": (1, 2),
    "12_large_models": (1, 3),
}


def read_notebook(name):
    return pytest.importorskip("nbformat").read(ROOT / "nbs" / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_with_its_outputs(name):
    text = (ROOT / "nbs" / f"{name}.ipynb").read_text()
    assert not re.search(r"/(home|root|tmp|work|Users|usr)/", text), (
        "an output shows a path of the machine that made it"
    )
    check_outputs(read_notebook(name), *NOTEBOOKS[name])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_a_notebook_imports_is_there(name):
    cells = [cell.source for cell in read_notebook(name).cells if cell.cell_type == "code"]
    lines = [line for cell in cells for line in cell.splitlines() if not line.startswith(("%", "!"))]
    found = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in found if node.module.split(".")[0] == "learnerkit"]
    assert ours
    for node in ours:
        module = importlib.import_module(node.module)
        assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("ctrl_c")  # nbclient leaves Ctrl-C heard, also where it was ignored
@pytest.mark.soak  # half a minute to two each; their code is that of the pages, which run more often
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, monkeypatch, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    for variable, value in environment().items():
        monkeypatch.setenv(variable, value)
    notebook = read_notebook(name)
    kernel = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    kernel.execute()  # raises if a cell does
    check_outputs(notebook, *NOTEBOOKS[name])
    assert (tmp_path / "models" / f"{name[3:]}.pth").is_file()


def check_outputs(notebook, pictures, tables):
    "Every cell was executed, in order; there are tables and pictures, no errors, and no bar that stayed."
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = [output.data for output in outputs if "data" in output]
    pages = [data["text/html"] for data in shown if data.get("text/html")]  # of a bar that is gone nothing stays
    pages = [page for page in pages if 'class="dataframe"' not in page]  # pandas's
    assert sum("image/png" in data for data in shown) >= pictures
    assert len(pages) >= tables
    for page in pages:
        assert all(f">{name}</th>" in page for name in HEADER)
        assert page.count("<tr>") >= 2
        assert "<progress" not in page
    said = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stderr")
    used = "parallel_ctx" in "".join(cell.source for cell in cells)
    assert said.count("DataParallel needs two GPUs") == used
