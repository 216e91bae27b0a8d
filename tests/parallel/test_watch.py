"""What a rank's watch makes of what its threads see, without other ranks: stand-ins take the place of the rest."""

import json
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from learnerkit.distributed import meeting
from learnerkit.endings import Ending
from learnerkit.parallel import watch
from learnerkit.parallel.watch import Watch

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
