"""Training scripts after published methods, each as a plain loop and as a Learner: equal, and shorter.

A port is a file of this folder. It has `loop()`, which trains a model in a plain loop and returns the model and the
loss of each step, and `learner(*cbs)`, which makes a Learner for the same; `fit(learn)` trains it. Everything is in
float64, and random numbers that a method needs come with the data, so that they are the same on any number of
processes. What both sides share stands above the line `# The loop`, and is not counted.
"""

import io
import tokenize
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
from helpers import mostly_slow
from resume_jobs import Kill, Killed, different

from learnerkit import CheckpointCallback

HERE = Path(__file__).parent
PORTS = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("test_"))
TOLERANCE = 1e-9
SHARE = 0.6  # of the lines of the loops

EACH_PORT = pytest.mark.parametrize("name", PORTS)


def port(name):
    """The module of a port."""
    return import_module(f"ports.{name}")


@cache
def by_loop(name):
    """The tensors of the model that the loop has trained, and the losses of its steps."""
    torch.manual_seed(0)
    model, losses = port(name).loop()
    return dict(model.state_dict()), losses


def by_learner(name, *cbs):
    """Those that the Learner has trained; on ranks, with the batches of the loop cut into a piece for each."""
    torch.manual_seed(0)
    module = port(name)
    learn = module.learner(*cbs)
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(split_batches=True, **getattr(module, "OPTIONS", {})):
        module.fit(learn)
    fits = *learn.recorder.history, learn.recorder
    return dict(learn.model.state_dict()), [loss for fit in fits for loss in fit.step_losses]


def assert_alike(found, expected):
    """Compare weights and losses."""
    (weights, losses), (their_weights, their_losses) = found, expected
    torch.testing.assert_close(losses, their_losses, rtol=0, atol=TOLERANCE)
    assert weights.keys() == their_weights.keys()
    for name, tensor in their_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=TOLERANCE, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("name", mostly_slow(PORTS, *PORTS[::2]))
def test_a_learner_trains_as_the_loop_does(name):
    assert_alike(by_learner(name), by_loop(name))


@EACH_PORT
def test_a_loop_trains(name):
    losses = by_loop(name)[1]
    assert len({round(loss, 12) for loss in losses}) > len(losses) // 2


@pytest.mark.ranks(2, soak=[3])
@pytest.mark.parametrize("name", mostly_slow(PORTS, "moco", slow=["nanogpt"]))
def test_ranks_train_as_the_loop_does(name):
    assert_alike(by_learner(name), by_loop(name))


def check_resume(name, folder):
    """A run that is killed in mid-epoch ends, once it is resumed, as one that is not."""
    whole = by_learner(name)
    with pytest.raises(Killed):
        by_learner(name, CheckpointCallback(folder, every=1), Kill(at=len(whole[1]) * 5 // 8))
    again = by_learner(name, CheckpointCallback(folder, resume=True), Kill())
    assert different(again[0], whole[0]) == []
    assert again[1] == whole[1]


@pytest.mark.parametrize("name", mostly_slow(PORTS, "lstm", slow=["dqn"]))
def test_a_killed_run_goes_on_exactly(name, tmp_path):
    check_resume(name, tmp_path)


@pytest.mark.ranks(soak=[2])
@pytest.mark.filterwarnings("ignore:.*batches of this epoch are read again")
@EACH_PORT
def test_a_killed_run_goes_on_exactly_on_ranks(name, tmp_path):
    check_resume(name, tmp_path)


def code_lines(text):
    """The number of lines with code: without blank ones, comments and docstrings."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines, begins = set(), True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and not (begins and token.type == tokenize.STRING):
            lines.update(range(token.start[0], token.end[0] + 1))
        begins = token.type in skipped
    return len(lines)


def lengths(name):
    """The lines of code of the loop, and of the Learner."""
    _, rest = (HERE / f"{name}.py").read_text().split("\n# The loop\n")
    loop, learner = rest.split("\n# The Learner\n")
    return code_lines(loop), code_lines(learner)


def test_the_learners_are_shorter_than_the_loops():
    found = {name: lengths(name) for name in PORTS}
    loops, learners = (sum(column) for column in zip(*found.values(), strict=True))
    assert learners <= SHARE * loops, f"{learners} lines for {loops}: {found}"


def test_lines_of_code_are_counted_as_they_are_read():
    assert code_lines('"""Text."""\n\n# why\nx = [\n    1,\n]\ndef f():\n    "Text."\n    return x  # so\n') == 5
