"""The pairs of programs in `nbs/coming_from`: each two train the same network, to the same losses.

`pytest -m peers` runs those of other libraries, where they are installed; `pytest -m slow` the rest.
"""

import contextlib
import io
import re
import runpy
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import WAYS, environment

PROGRAMS = Path(__file__).parents[2] / "nbs" / "coming_from"
PEERS = ("fastai", "lightning", "accelerate", "pytorch")
TOLERANCE = 1e-9
NUMBERED = r"^([a-z_]+)((?: -?\d+\.\d+(?:e-?\d+)?)+)$"  # a line of a program's result: a name, and losses


def accelerate_launch(nproc):
    """As its program says; on a free port, as another test may run beside this one."""
    options = ["--multi_gpu", "--num_processes", str(nproc), "--main_process_port", "0"]
    return ["env", "ACCELERATE_USE_CPU=true", sys.executable, "-m", "accelerate.commands.launch", *options]


STARTED_BY = {"pytorch": {1: WAYS["torchrun"], 2: WAYS["torchrun"]}, "accelerate": {2: accelerate_launch}}


@cache
def losses_of(program, nproc, by, folder):
    """The losses that a program prints, by name; it runs in a folder of its own."""
    peer, side = program.split("_")
    place = Path(folder) / f"{program}_{nproc}_{by is None}"
    place.mkdir()
    printed = io.StringIO()
    if side == "ours" and nproc == 1:  # here, because a new process takes longer to start than to train
        with contextlib.chdir(place), contextlib.redirect_stdout(printed):
            runpy.run_path(str(PROGRAMS / f"{program}.py"), run_name="__main__")
    else:
        start = STARTED_BY.get(peer, {}).get(nproc) if side == "theirs" else None
        start = start or WAYS["launch" if nproc > 1 else "python"]
        done = subprocess.run(
            [*start(nproc), *filter(None, [by]), str(PROGRAMS / f"{program}.py")],
            env=environment(), cwd=place, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        printed.write(done.stdout)
        assert done.returncode == 0, f"{program} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    # Each says so; several processes that train alone would come to the same losses.
    assert nproc == 1 or f"{nproc} processes" in printed.getvalue(), printed.getvalue()
    # A bar that is not on a terminal has its lines separated by carriage returns alone.
    found = re.findall(NUMBERED, printed.getvalue().replace("\r", "\n"), re.MULTILINE)
    assert len(found) == 3, printed.getvalue()
    return {name: [float(loss) for loss in losses.split()] for name, losses in found}


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """What a program comes to; each program runs once on as many processes."""
    folder = str(tmp_path_factory.mktemp("programs"))
    yield lambda program, nproc=1, by=None: losses_of(program, nproc, by, folder)
    losses_of.cache_clear()


def needs(peer):
    """Skip where another library is not installed."""
    if peer != "pytorch" and find_spec(peer) is None:
        pytest.skip(f"needs {peer}")


def on_page(peer):
    """The losses on a page, by name."""
    return {
        name: [float(loss) for loss in losses.split()]
        for name, losses in re.findall(NUMBERED, (PROGRAMS / f"{peer}.md").read_text(), re.MULTILINE)
    }


def within(found, expected, tolerance=TOLERANCE):
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=0, abs=tolerance), name


@pytest.mark.peers
@pytest.mark.parametrize(
    ("peer", "nproc"),
    [
        ("lightning", 1), ("accelerate", 1), ("accelerate", 2),
        pytest.param("pytorch", 1, marks=pytest.mark.soak), ("pytorch", 2),
    ],
)  # fmt: skip
def test_two_programs_come_to_the_same_losses(losses, peer, nproc):
    needs(peer)
    within(losses(f"{peer}_theirs", nproc), losses(f"{peer}_ours", nproc))


@pytest.mark.peers
def test_fastai_comes_to_the_same_losses_but_for_its_schedule_in_float32(losses):
    needs("fastai")
    ours = losses("fastai_ours")
    within(losses("fastai_theirs"), ours, tolerance=1e-6)
    in_float64 = str(Path(__file__).with_name("fastai_in_float64.py"))
    within(losses("fastai_theirs", by=in_float64), ours)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("peer", [p if p == "pytorch" else pytest.param(p, marks=pytest.mark.soak) for p in PEERS])
def test_the_page_shows_what_the_program_comes_to(losses, peer):
    # To fewer digits than two programs on one machine: another processor may sum in another order.
    within(losses(f"{peer}_ours"), on_page(peer), tolerance=1e-6)


@pytest.mark.peers
@pytest.mark.parametrize("peer", ["accelerate", "pytorch"])
def test_a_program_comes_to_the_same_losses_on_two_processes(losses, peer):
    within(losses(f"{peer}_ours", 2), losses(f"{peer}_ours"))


@pytest.mark.parametrize("peer", PEERS)
def test_each_page_shows_both_programs(peer):
    page = (PROGRAMS / f"{peer}.md").read_text()
    shown = re.findall(r"^`{3,}\{literalinclude\} (\S+)$", page, re.MULTILINE)
    assert shown == [f"{peer}_theirs.py", f"{peer}_ours.py"]
    for name in shown:
        compile((PROGRAMS / name).read_text(), name, "exec")
