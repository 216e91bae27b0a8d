"""Progress: plain lines in a pipe, a bar in a terminal, one live output in a notebook."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from helpers import make_data, make_dls, make_learner, raising
from torch.utils.data import DataLoader

from learnerkit import Callback, CancelFitException, DataLoaders, ProgressCallback, Recorder, ShowGraphCallback, mae
from learnerkit.callbacks import progress
from learnerkit.text import columns

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from learnerkit import Callback, DataLoaders, Learner
from learnerkit.callbacks import progress

progress._REFRESH = 0  # draw at every batch
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
dls = DataLoaders(DataLoader(data, 4), DataLoader(data, 4), device="cpu")
learn = Learner(dls, nn.Linear(4, 1), nn.MSELoss())
learn.fit(3)
print("between")
learn.validate()
learn.get_preds()
learn.add_cb(Callback(after_batch=lambda cb: 1 / 0))
try:
    learn.fit(1)
except ZeroDivisionError:
    print("the end", flush=True)
"""

ROW = re.compile(r"^ +[0-2]( +\d+\.\d{6}){2} +\d\d:\d\d\.\d$")


@pytest.mark.soak
def test_in_a_pipe_there_are_whole_lines_and_no_bar(script_env):
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=script_env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\r" not in done.stdout
    assert "\x1b" not in done.stdout
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["epoch", "train_loss", "valid_loss", "time"]
    assert all(ROW.match(line) for line in lines[:3])
    assert lines[3] == "between"
    assert lines[-1] == "the end"
    assert [line for line in lines[4:-1] if line.split()[0] != "epoch"] == []


def run_in_terminal(script, env, columns=100):
    """What a script writes to a terminal, standard output and error together."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=side,
        stdout=side,
        stderr=side,
        env=env | {"TERM": "xterm"},
        close_fds=True,
    )
    os.close(side)
    found = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        found += piece
    os.close(main)
    assert process.wait(timeout=60) == 0, found
    return found.decode()


def screen(text):
    """The lines a terminal shows at the end."""
    lines, row, column = [[]], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]", text):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append([])
            column = 0
        elif part == "\r":
            column = 0
        elif part == "\x1b[A":
            row = max(0, row - 1)
        elif part.startswith("\x1b"):
            continue
        else:
            line = lines[row]
            line += " " * (column + 1 - len(line))
            line[column] = part
            column += 1
    return ["".join(line).rstrip() for line in lines]


@pytest.mark.slow
def test_in_a_terminal_the_bar_shows_loss_and_remaining_time_and_rows_stay_whole(script_env):
    text = run_in_terminal(SCRIPT, script_env)
    bars = [part for part in re.split(r"[\r\n]", text) if "|" in part]
    assert any(
        re.search(r"epoch \d/3.* \d+%.*\|.*\| *\d+/18 .*\[\d\d:\d\d<(\d\d:\d\d|\?).*loss \d+\.\d+", b) for b in bars
    )
    assert any("18/18" in b for b in bars)
    assert any("validating" in b for b in bars)
    assert any("predicting" in b for b in bars)
    assert all(len(bar) <= 100 for bar in bars)
    shown = [line for line in screen(text) if line]
    # The bar is gone in the end, and nothing of it is left in a line.
    assert not any("|" in line or "%" in line for line in shown)
    assert shown[0].split() == ["epoch", "train_loss", "valid_loss", "time"]
    assert [bool(ROW.match(line)) for line in shown[1:4]] == [True] * 3
    assert shown[4] == "between"
    assert shown[-1] == "the end"


def test_a_row_that_is_printed_is_flushed(capsys, monkeypatch):
    flushed = []
    learn = make_learner(
        cbs=Callback(before_epoch=lambda cb: flushed.append(len(capsys.readouterr().out.splitlines())))
    )
    learn.fit(3)
    assert sum(flushed) + len(capsys.readouterr().out.splitlines()) == 4
    assert flushed[1:] in ([2, 1], [1, 1])


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_fit_goes_on_where_the_caller_has_closed_a_standard_file(closed, monkeypatch):
    # Python sets it to None then, as after `python train.py >&-`.
    learn = make_learner()
    monkeypatch.setattr(sys, closed, None)
    learn.fit(1)
    learn.say("the end")
    assert learn.recorder.values


def test_letters_that_the_output_does_not_have_are_escaped(monkeypatch):
    # A fit must not end after an epoch because of the name of a metric.
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    progress.print_above("größe")
    assert stream.buffer.getvalue() == b"gr\\xf6\\xdfe\n"


# The notebook


class Cell:
    "What a notebook cell shows."

    def __init__(self):
        self.outputs, self.history = [], []

    def display(self, content, raw=False, display_id=None, **kwargs):
        assert raw
        assert display_id
        self.outputs.append(None)
        place = len(self.outputs) - 1

        def show(content, raw=False, **kwargs):
            assert raw
            assert not content or {"text/html", "text/plain"} <= content.keys()
            self.outputs[place] = content
            self.history.append(content.get("text/html", ""))

        show(content, raw=True)
        return SimpleNamespace(update=show)


@pytest.fixture
def cell(monkeypatch):
    import IPython.display

    found = Cell()
    monkeypatch.setattr(IPython.display, "display", found.display)
    monkeypatch.setattr(progress, "front_end", lambda: "notebook")
    monkeypatch.setattr(progress, "_REFRESH", 0)
    return found


def table(html):
    """The cells of the rows of an HTML table."""
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def test_in_a_notebook_a_fit_is_one_output_with_a_table_and_a_bar(cell, capsys):
    learn = make_learner(make_dls(train=12), metrics=mae)
    logger = learn.logger
    learn.fit(2)
    assert len(cell.outputs) == 1
    last = cell.outputs[0]["text/html"]
    header, *rows = table(last)
    assert header == ["epoch", "train_loss", "valid_loss", "mae", "time"]
    assert [row[0] for row in rows] == ["0", "1"]
    for row, values in zip(rows, learn.recorder.values, strict=True):
        assert [float(value) for value in row[1:4]] == pytest.approx(values, abs=1e-6)
    live = [html for html in cell.history if "<progress" in html]
    assert any('value="6"' in html and 'max="6"' in html for html in live)
    assert any(re.search(r"epoch 1/2 .*3/6 .*\[\d\d:\d\d&lt;(\d\d:\d\d|\?).*loss \d+\.\d+", html) for html in live)
    assert any("validating" in html for html in live)
    assert "<progress" not in last
    plain = cell.outputs[0]["text/plain"].splitlines()
    assert [len(line.split()) for line in plain] == [5, 5, 5]
    assert capsys.readouterr() == ("", "")
    assert learn.logger is logger


def test_what_is_said_stands_among_the_rows_of_a_notebooks_table(cell, capsys):
    learn = make_learner(cbs=Callback(after_step=lambda cb: cb.train_iter == 2 and cb.learn.say("<half> way")))
    learn.fit(2)
    (output,) = cell.outputs
    assert [row[0] for row in table(output["text/html"])] == ["epoch", "0", "&lt;half&gt; way", "1"]
    assert output["text/plain"].splitlines()[2] == "<half> way"
    assert capsys.readouterr() == ("", "")
    said = next(html for html in cell.history if "way" in html)
    assert said.index("way") < said.index("<progress")
    learn.say("between")
    assert capsys.readouterr().out == "between\n"


def test_what_is_said_is_said_by_rank_0_alone(capsys, monkeypatch):
    learn = make_learner()
    learn.say("one")
    learn.say(2)
    monkeypatch.setenv("RANK", "1")
    learn.say("three")
    assert capsys.readouterr().out == "one\n2\n"


def test_wide_characters_keep_the_columns_straight(capsys):
    learn = make_learner(metrics={"准确率": mae, "평균 절대 오차": mae, "naïve": mae})
    learn.fit(2)
    lines = capsys.readouterr().out.splitlines()
    assert len({columns(line) for line in lines}) == 1
    ends = [[columns(line[: match.end()]) for match in re.finditer(r"[^ ](?=  |$)", line)] for line in lines]
    assert ends[0] == ends[1] == ends[2]


def test_a_row_is_seen_before_the_next_epoch_begins(cell, monkeypatch):
    monkeypatch.setattr(progress, "_REFRESH", 60)  # seconds: the bar shows nothing after its begin
    seen = []
    look = Callback(before_epoch=lambda cb: cb.epoch == 1 and seen.append(len(table(cell.outputs[0]["text/html"]))))
    make_learner(cbs=look).fit(2)
    assert seen == [2]


def test_every_fit_has_an_output_of_its_own(cell):
    learn = make_learner()
    learn.fit(1)
    learn.fit(2)
    assert [len(table(output["text/html"])) for output in cell.outputs] == [2, 3]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, CancelFitException])
def test_the_bar_goes_however_a_fit_ends(cell, error):
    learn = make_learner(cbs=raising("after_batch", error, lambda cb: cb.epoch == 1, order=99))
    logger = learn.logger
    with pytest.raises(error) if error is not CancelFitException else nullcontext():
        learn.fit(3)
    (output,) = cell.outputs
    assert "<progress" not in output["text/html"]
    assert len(table(output["text/html"])) == 2
    assert learn.logger is logger


def test_names_and_values_are_escaped(cell):
    learn = make_learner(metrics={"<b>a&b</b>": mae})
    learn.fit(1)
    html = cell.outputs[0]["text/html"]
    assert "&lt;b&gt;a&amp;b&lt;/b&gt;" in html
    assert "<b>" not in html


def test_evaluation_in_a_notebook_leaves_no_table(cell):
    learn = make_learner()
    learn.validate()
    learn.get_preds()
    assert all("<table" not in html for html in cell.history)
    assert cell.outputs == [{}, {}]  # nor an empty line


class Figures:
    """What a cell displays with an id: the curves of each figure, by output, as they were shown."""

    def __init__(self):
        self.shown = []

    def display(self, figure, display_id):
        assert display_id
        curves = []
        self.shown.append(curves)

        def update(figure):
            curves.append({line.get_label(): len(line.get_xdata()) for line in figure.axes[0].lines})

        update(figure)
        return SimpleNamespace(update=update)


def test_the_graph_of_a_notebook_is_drawn_anew_after_each_epoch(monkeypatch, plt, capsys):
    import IPython.display

    figures = Figures()
    monkeypatch.setattr(IPython.display, "display", figures.display)
    learn = make_learner(make_dls(train=40), cbs=ShowGraphCallback())
    learn.fit(1)  # in a script
    assert figures.shown == []
    monkeypatch.setattr(progress, "front_end", lambda: "notebook")
    learn.remove_cb(ProgressCallback)
    learn.fit(2)
    learn.fit(1)
    learn.validate()
    (first, last), (other,) = figures.shown
    assert [first["valid"], last["valid"], other["valid"]] == [1, 2, 1]
    assert last["train (smoothed)"] == first["train (smoothed)"] + 10
    assert plt.get_fignums() == []
    monkeypatch.setenv("RANK", "1")
    learn.fit(1)
    assert len(figures.shown) == 2


def test_a_loader_without_length_has_a_bar_without_end(cell):
    class Unsized:
        def __iter__(self):
            return iter(DataLoader(make_data(), 4))

    make_learner(DataLoaders(Unsized(), device="cpu")).fit(1)
    live = [html for html in cell.history if "<progress" in html]
    assert live
    assert not any("max=" in html for html in live)


def test_evaluation_in_mid_fit_keeps_the_bar_of_the_fit(cell):
    seen = []

    def ask(cb):
        if cb.task == "fit" and cb.training:
            cb.learn.validate()

    def look(cb):
        if cb.task == "fit" and cb.training:
            seen.append(cell.history[-1])

    learn = make_learner(cbs=[Callback(after_pred=ask), Callback(after_batch=look, order=99)])
    learn.fit(1)
    assert [re.search(r'value="(\d)" max="(\d)"', html).groups() for html in seen] == [("1", "2"), ("2", "2")]
    assert not any("validating" in html for html in seen)
    assert len(cell.outputs) == 1


def test_other_ranks_show_nothing(cell, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    learn = make_learner()
    learn.logger = lambda row: None
    learn.fit(1)
    assert cell.outputs == []
    assert capsys.readouterr() == ("", "")


def test_a_logger_of_ones_own_is_left_in_its_place(cell):
    rows = []
    learn = make_learner()
    learn.logger = rows.append
    learn.fit(2)
    assert len(rows) == 2


def test_without_progress_the_table_is_printed_all_the_same(capsys):
    learn = make_learner()
    learn.remove_cb(ProgressCallback)
    learn.fit(2)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_without_a_recorder_there_is_nothing_to_show_and_nothing_breaks(cell):
    learn = make_learner()
    learn.remove_cb(Recorder)
    learn.fit(1)
    learn.validate()
