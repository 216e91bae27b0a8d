"""What those need who join: the commands of the check, the workflow, the changelog, the metadata and the templates."""

import os
import re
import subprocess
import tomllib
from itertools import product

import pytest
import yaml
from helpers import ROOT

import learnerkit

GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CHANGELOG = (GITHUB / "CHANGELOG.md").read_text(encoding="utf-8")
INSTALL, TESTS = "pip install -e .[dev]", ["pip install -e .[dev]", "pytest"]
STYLE = ["ruff check .", "ruff format --check .", "mypy"]
PARTS = {
    None: [*TESTS, "pytest -m slow", *STYLE],
    "quick": TESTS,
    "slow": [INSTALL, "pytest -m slow"],
    "check": [INSTALL, *STYLE],
    "docs": ["pip install -e .[docs]", "python nbs/build.py"],
}


# The commands of the check


@pytest.fixture
def check(tmp_path):
    """Run `.ci/run` with commands that only print how they were called, or exit with an error; return what it did."""

    def run(*arguments, fails=None):
        for name in ("python3", "pip", "pytest", "ruff", "mypy", "python"):
            text = f'echo "ran {name} $*"; exit {int(name == fails)}'
            if name == "python3":  # makes the environment, whose commands are these
                text = 'test "$1 $2" = "-m venv" && mkdir -p "$3/bin" && touch "$3/bin/activate"'
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
        return subprocess.run([ROOT / ".ci" / "run", *arguments], capture_output=True, text=True, env=env, timeout=60)

    return run


@pytest.mark.parametrize("part", PARTS)
def test_the_check_runs_the_commands_of_the_readme(part, check, tmp_path):
    done = check(*[part] if part else [])
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^ran (.*?) ?$", done.stdout, re.M) == PARTS[part]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # the environment is removed


def test_the_check_ends_with_the_first_command_that_fails(check):
    for fails, last in (("pip", INSTALL), ("pytest", "pytest"), ("ruff", STYLE[0]), ("mypy", "mypy")):
        done = check(fails=fails)
        assert done.returncode == 1
        assert re.findall(r"^ran (.*?) ?$", done.stdout, re.M)[-1] == last


def test_the_check_refuses_a_part_that_it_does_not_have(check):
    done = check("quik")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "got 'quik'; the parts are quick, slow, check and docs\n"


def test_the_workflow_runs_each_part_of_the_check_on_the_oldest_and_the_newest():
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    ran = set()
    for job in jobs.values():
        matrix = dict(job["strategy"]["matrix"])
        left_out = matrix.pop("exclude", [])
        (command,) = [step["run"] for step in job["steps"] if "run" in step]
        assert command == ".ci/run ${{ matrix.part }}"
        for values in product(*matrix.values()):
            run = dict(zip(matrix, values, strict=True))
            if run not in left_out:
                ran.add((run["part"], run.get("python"), run.get("torch")))
    assert {part for part, _, _ in ran} == set(PARTS) - {None}
    oldest = PROJECT["requires-python"].removeprefix(">=")
    for part in ("quick", "slow"):
        assert {torch for name, python, torch in ran if (name, python) == (part, oldest)} >= {"oldest"}
        assert any(python != oldest and torch == "newest" for name, python, torch in ran if name == part)


def test_the_longest_tests_run_each_week_as_the_readme_says():
    workflow = yaml.safe_load((GITHUB / "workflows" / "soak.yml").read_text())
    assert workflow[True]["schedule"]  # YAML reads the key `on` as true
    (job,) = workflow["jobs"].values()
    install, tests = [step["run"] for step in job["steps"] if "run" in step]
    readme = (ROOT / "README.md").read_text()
    assert f"{install} && pytest" in readme
    assert re.search(rf"^{tests} ", readme, re.M)


def test_the_oldest_torch_of_the_workflow_is_the_oldest_that_is_allowed():
    lines = (ROOT / ".ci" / "oldest.txt").read_text().splitlines()
    assert f"{PROJECT['dependencies'][0].replace('>=', '==')}.*" in lines
    assert ".ci/oldest.txt" in (GITHUB / "workflows" / "ci.yml").read_text()


# The changelog and the version


def test_the_changelog_begins_with_what_is_unreleased_and_this_version():
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.M)
    assert headings[0] == "[Unreleased]"
    versions = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\](?: - \d{4}-\d\d-\d\d)?", heading) for heading in headings[1:]]
    assert all(versions), headings
    assert versions[0][1] == learnerkit.__version__
    numbers = [tuple(map(int, version[1].split("."))) for version in versions]
    assert numbers == sorted(set(numbers), reverse=True)


def test_the_changelog_has_its_six_headings_in_order_and_entries_below_each():
    order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for version in re.split(r"^## ", CHANGELOG, flags=re.M)[1:]:
        parts = re.split(r"^### ", version, flags=re.M)[1:]
        kinds = [part.partition("\n")[0] for part in parts]
        assert kinds == [kind for kind in order if kind in kinds]
        for part in parts:
            lines = [line for line in part.splitlines()[1:] if line]
            assert lines, kinds
            assert all(line.startswith(("- ", "  ")) for line in lines)


def test_the_version_is_the_same_wherever_it_is_written():
    cited = yaml.safe_load((GITHUB / "CITATION.cff").read_text())
    (date,) = re.findall(rf"^## \[{re.escape(learnerkit.__version__)}\] - (\S+)$", CHANGELOG, re.M)
    assert (cited["version"], str(cited["date-released"])) == (learnerkit.__version__, date)
    install = (ROOT / "nbs" / "guides" / "install.md").read_text()
    assert set(re.findall(r"learnerkit[- ](\d+\.\d+\.\d+)", install)) == {learnerkit.__version__}
    minor = learnerkit.__version__.rpartition(".")[0]
    pages = [install, (ROOT / "README.md").read_text(), (ROOT / "nbs" / "explanations" / "releases.md").read_text()]
    assert {number for page in pages for number in re.findall(r"\b[Vv]ersion (0\.\d+)\b", page)} == {minor}


# The metadata


def expand(extra):
    """The packages of an extra; one that is made of others has theirs."""
    for requirement in EXTRAS[extra]:
        others = re.fullmatch(r"learnerkit\[(.*)\]", requirement)
        if others:
            for other in others[1].split(","):
                yield from expand(other)
        else:
            yield requirement


def test_dev_has_all_extras_but_the_peers():
    every = {requirement for extra in EXTRAS if extra != "peers" for requirement in expand(extra)}
    assert set(expand("dev")) == every


def test_the_guide_on_installing_names_every_extra():
    install = (ROOT / "nbs" / "guides" / "install.md").read_text()
    table = install[install.index("## Further packages") : install.index("## In an editor")]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    assert {name for cell in first for name in re.findall(r"`(\w+)`", cell)} == set(EXTRAS) - {"peers"}


# The templates


@pytest.mark.parametrize("page", sorted(GITHUB.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s:]+)\)", page.read_text())
    assert [link for link in links if not (GITHUB / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_a_form_is_one_that_the_site_can_show(name):
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form.keys() >= {"name", "description", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input"}
    assert len({field["id"] for field in fields}) == len({field["attributes"]["label"] for field in fields})
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_a_report_of_a_bug_has_the_versions_the_processes_and_a_program():
    text = (GITHUB / "ISSUE_TEMPLATE" / "bug_report.yml").read_text()
    assert [word for word in ("learnerkit.doctor", "Number of processes", "minimal program") if word not in text] == []
