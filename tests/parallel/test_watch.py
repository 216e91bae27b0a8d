"""What a rank's watch makes of what its threads see, without other ranks: stand-ins take the place of the rest."""

import json
import os
import sys
import time
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
from helpers import make_learner

from learnerkit import Callback, CheckpointCallback
from learnerkit.distributed import meeting
from learnerkit.endings import Ending
from learnerkit.parallel import watch
from learnerkit.parallel.watch import Watch
from learnerkit.processes.heartbeat import Heartbeat

STOP = json.dumps(["stop", None])


def looks(seen, monkeypatch, since=60.0):
    """Whether a watch with a timeout of 4 s that sees a rank wait, or not, once a second finds a standstill."""
    found, over = [], chain(repeat(False, len(seen)), repeat(True))
    waits = iter(seen)
    monkeypatch.setattr(watch, "waits_for_ranks", lambda *args: next(waits))
    Watch._look(
        SimpleNamespace(
            timeout=4.0,
            failure=None,
            _main=0,
            _over=SimpleNamespace(wait=lambda seconds: next(over)),
            heartbeat=SimpleNamespace(live=lambda waits: None, read=lambda: {"since": since}),
            _diagnose=lambda: found.append(True),
        )
    )
    return bool(found)


@pytest.mark.parametrize(("seen", "stands"), [([1] * 4, False), ([1] * 5, True), ([1, 1, 1, 0] * 9, False)])
def test_a_standstill_is_one_wait_that_is_longer_than_the_timeout(seen, stands, monkeypatch):
    assert looks(seen, monkeypatch) == stands


def test_a_rank_that_waits_now_and_then_has_not_come_to_a_standstill(monkeypatch):
    """It may be seen in another wait each time: what tells is how long ago its last hook was called."""
    assert not looks([1] * 9, monkeypatch, since=0.5)


def test_a_stack_has_the_users_lines_before_its_last_ones():
    stacks = []
    look = Callback(after_pred=lambda cb: stacks.append(watch._stack(sys._getframe())))

    def my_own_function():
        make_learner(cbs=look).fit(1)

    my_own_function()
    assert "make_learner(cbs=look).fit(1)" in stacks[0]
    assert "in _fit\n" not in stacks[0]
    assert stacks[0].splitlines()[-1].strip().startswith("look = Callback(")


def test_the_first_failure_that_is_told_is_kept(monkeypatch):
    monkeypatch.setattr(watch, "open_sockets", lambda: ())
    monkeypatch.setattr(watch.dist, "get_backend_config", lambda: "cpu:gloo")
    monkeypatch.setattr(meeting, "group_is_dead", False)
    told = [json.dumps(["failed", vars(Ending(rank=rank, cause="it"))]) for rank in (2, 1)]
    messages = iter([*told, STOP])
    rank = SimpleNamespace(
        rank=0,
        failure=None,
        hang_up=lambda failure: Watch.hang_up(rank, failure),
        _over=SimpleNamespace(wait=lambda seconds: None),
        _inbox=SimpleNamespace(get=lambda key: next(messages)),
    )
    Watch._listen(rank)
    assert rank.failure.rank == 2


@pytest.fixture
def heartbeat(monkeypatch):
    """The heartbeat that a launcher would have made for this process, and would read."""
    heartbeat = Heartbeat.new()
    monkeypatch.setenv("LEARNERKIT_HEARTBEAT", f"{os.getpid()} {heartbeat.path}")
    yield heartbeat
    heartbeat.close()


class Looks(Callback):
    """Waits in each batch until the heartbeat shows its place, for some seconds at most; keeps those that it missed."""

    run_valid = True

    def __init__(self, heartbeat, patience):
        super().__init__()
        self.heartbeat, self.patience = heartbeat, patience
        self.missed, self.phases = [], []

    def before_fit(self):
        self.phases.append(self.heartbeat.read()["phase"])

    def before_batch(self):
        place = ("training" if self.training else "evaluation", self.epoch, self.iter)
        end = time.monotonic() + self.patience
        while (seen := tuple(map(self.heartbeat.read().get, ("phase", "epoch", "step")))) != place:
            if time.monotonic() > end:
                self.missed.append((place, seen))
                return
            time.sleep(0.001)

    def after_train(self):
        self.learn.validate()  # a run inside a run, whose end is not that of the outer one
        assert self.heartbeat.read()["phase"] or self.patience < 1


def test_the_heartbeat_of_one_process_shows_where_it_is_if_others_follow_the_launch(heartbeat, monkeypatch, tmp_path):
    file = tmp_path / "events.jsonl"
    facts = {"process": os.getpid(), "path": str(file), "node": 0, "attempt": 2}
    monkeypatch.setenv("LEARNERKIT_EVENTS", json.dumps(facts))
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.001)
    looks = Looks(heartbeat, patience=20)
    learn = make_learner(cbs=[looks, CheckpointCallback(tmp_path / "runs")])
    for n_epoch in (2, 1):
        learn.fit(n_epoch)
        assert heartbeat.read()["phase"] == ""
    assert (looks.missed, looks.phases) == ([], ["", ""])
    saved = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["fit"], line["epoch"], line["step"]) for line in saved] == [
        (0, 0, 2), (0, 1, 4), (0, 1, 4), (1, 0, 2), (1, 0, 2)
    ]  # fmt: skip
    assert {(line["event"], line["node"], line["attempt"]) for line in saved} == {("saved", 0, 2)}


def test_one_process_writes_no_heartbeat_if_nobody_follows_the_launch(heartbeat, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.001)
    looks = Looks(heartbeat, patience=0.2)
    make_learner(cbs=looks).fit(1)
    assert {seen for _, seen in looks.missed} == {("", 0, 0)}
