"""Installed from a wheel and as an editable install, each in a fresh environment that finds the other packages here."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser

import pytest
from helpers import ROOT

import learnerkit

pytestmark = pytest.mark.slow
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
FIT = """
import torch
from torch import nn
from learnerkit import DataLoaders, Learner, accuracy
from learnerkit.datasets import chat_lines, fashion_mnist_sample, penguins

dls = DataLoaders.from_datasets(*fashion_mnist_sample(), bs=64)
learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), nn.CrossEntropyLoss(), metrics=accuracy)
learn.fit(1, 1e-2)
print(len(chat_lines()), len(penguins()), learn.__module__, __import__("learnerkit").__file__)
"""


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=CLEAN, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is installed, so that a build leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "learnerkit", folder / "learnerkit", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def install(tmp_path):
    """Install something in a fresh environment, whose commands are then in the folder that this returns."""

    def installed(*what):
        venv.create(tmp_path / "venv")
        commands = tmp_path / "venv" / "bin"
        run(sys.executable, "-m", "pip", "--python", commands / "python", "install", "--no-deps", *what)
        packages = run(commands / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        with open(f"{packages}/torch_and_others.pth", "w") as paths:
            paths.write(sysconfig.get_path("purelib"))
        return commands

    return installed


def test_a_wheel_has_all_files_and_its_install_trains(source, install, tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith("/METADATA"))
        facts = Parser().parsestr(archive.read(about).decode())
    files = {str(path.relative_to(source)) for path in (source / "learnerkit").rglob("*") if path.is_file()}
    assert "learnerkit/py.typed" in files
    assert files == {name for name in names if not name.startswith("learnerkit-")}
    assert any(name.endswith("/LICENSE") for name in names)
    assert (facts["Version"], facts["License-File"]) == (learnerkit.__version__, "LICENSE")
    assert facts.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert "torch>=2.10" in facts.get_all("Requires-Dist")

    commands = install(wheel)
    assert run(commands / "learnerkit", "--version") == f"learnerkit {learnerkit.__version__}\n"
    (tmp_path / "fit.py").write_text(FIT)
    *table, last = run(commands / "learnerkit", "launch", "fit.py", cwd=tmp_path).splitlines()
    assert float(table[-1].split()[3]) > 0.5
    assert str(tmp_path / "venv") in last


@pytest.mark.soak
def test_mypy_and_pyright_follow_an_editable_install(source, install, tmp_path):
    commands = install("-e", source)
    python = commands / "python"
    # Only whether it is found: what mypy says of the scripts, the project's own run of it tells (see pyproject.toml).
    options = ("--follow-imports=skip", "--python-executable", python, "--cache-dir", tmp_path / "cache")
    run(sys.executable, "-m", "mypy", *options, "-c", "import learnerkit", cwd=tmp_path)
    settings = {
        "include": ["typed"], "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error", "reportMissingImports": "error",
    }  # fmt: skip
    shutil.copytree(ROOT / "tests" / "typed", tmp_path / "typed")
    (tmp_path / "pyright.json").write_text(json.dumps(settings))
    printed = run(
        sys.executable, "-m", "basedpyright", "-p", tmp_path / "pyright.json", "--pythonpath", python, cwd=tmp_path
    )
    assert "0 errors, 0 warnings" in printed
