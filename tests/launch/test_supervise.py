"""What the launcher says of its processes, without any."""

import io
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import DistError, TCPStore

from learnerkit.endings import Ending, ExceptionReport, is_collective_error
from learnerkit.launch import supervise
from learnerkit.launch.environment import Topology
from learnerkit.launch.report import Outcome, Rank
from learnerkit.processes import rank_main


def says(err):
    """Return what the launcher itself has printed."""
    return [line for line in err.splitlines() if line.startswith("learnerkit.launch: ")]


def report(ranks, reason, began):
    """Print the report, and return the exit code."""
    topology = Topology(len(ranks), 1)
    reason = reason or Outcome("failed")
    supervise.report(ranks, reason, topology, began)
    return supervise.outcome_of(ranks, reason, topology).code


def ended(number, code, at, error="", stop_signals=(), follows=False):
    """Return a rank that has ended; with an error it has written a report."""
    report = ExceptionReport()
    if error:
        report = ExceptionReport(error=error, brief=f"Traceback of {number}", ending=Ending(follows=follows))
    return Rank(number, None, None, at, code, report, list(stop_signals))


def test_the_first_failure_comes_first(capsys):
    ranks = [
        ended(0, 1, 12.5, "RuntimeError: closed"),
        ended(1, -9, 12.0),
        ended(2, -15, 13.0, stop_signals=[15]),
        ended(3, 0, 11.0),
        ended(4, -9, 18.0, stop_signals=[15, 9]),
        ended(5, 143, 13.0, stop_signals=[15]),
        ended(6, -6, 14.0, stop_signals=[15]),
    ]
    assert report(ranks, None, began=10.0) == 137
    assert says(capsys.readouterr().err) == [
        "learnerkit.launch: rank 1 was killed by signal 9 (SIGKILL), as the kernel does when memory runs out "
        "(see dmesg), after 2.0 s",
        "learnerkit.launch: rank 0 then failed: RuntimeError: closed",
        "learnerkit.launch: rank 6 then was killed by signal 6 (SIGABRT)",
        "learnerkit.launch: rank 2 was stopped by the launcher after 3.0 s",
        "learnerkit.launch: rank 3 ended with exit code 0 after 1.0 s",
        "learnerkit.launch: rank 4 did not stop in time and was killed after 8.0 s",
        "learnerkit.launch: rank 5 was stopped by the launcher after 3.0 s",
    ]


def test_ranks_that_fail_alike_share_a_line(capsys):
    ranks = [ended(i, 1, 10.0 - i, "ValueError: 3 images" if i else "OSError: full") for i in range(5)]
    ranks += [ended(5, -9, 20.0), ended(6, -9, 21.0)]
    assert report(ranks, None, began=0.0) == 1
    assert says(capsys.readouterr().err) == [
        "learnerkit.launch: rank 4 failed (exit code 1) after 6.0 s:",
        "learnerkit.launch: ranks 1, 2, 3 then failed: ValueError: 3 images",
        "learnerkit.launch: rank 0 then failed: OSError: full",
        "learnerkit.launch: ranks 5, 6 then were killed by signal 9 (SIGKILL), as the kernel does when memory runs out "
        "(see dmesg)",
    ]


KILLED, ABORTED = ended(0, -9, 4.0), ended(0, -6, 4.0)
OWN = ended(1, 1, 3.0, "ValueError: mine")
CLOSED = ended(2, 1, 2.0, "RuntimeError: [gloo/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:1")
FOLLOWER = ended(3, 1, 1.0, "PeerError: rank 0 failed", follows=True)


@pytest.mark.parametrize(
    ("in_order", "code"),
    [
        ([OWN, KILLED, CLOSED, FOLLOWER], 1),
        ([KILLED, CLOSED, FOLLOWER], 137),
        ([KILLED, ended(2, 1, 2.0, "DistNetworkError: failed to recv")], 137),
        ([KILLED, ended(2, 1, 2.0, "RuntimeError: NCCL Error 2: unhandled system error")], 137),
        ([OWN, ended(0, -6, 2.0)], 1),
        ([CLOSED, ABORTED, FOLLOWER], 1),  # either may be the echo of the other: the time decides
        ([ABORTED, ended(2, 1, 5.0, "DistBackendError: NCCL error")], 134),
        ([ended(2, 1, 2.0, "RuntimeError: shapes differ"), KILLED], 1),
        ([ended(2, 1, 2.0, "DistanceError: too far"), KILLED], 1),
    ],
)
def test_the_cause_comes_before_its_echoes(capsys, in_order, code):
    for ranks in (in_order, in_order[::-1]):
        assert report(ranks, None, began=0.0) == code
        lines = says(capsys.readouterr().err)
        assert [int(line.split()[2]) for line in lines] == [rank.number for rank in in_order]


@pytest.mark.parametrize(("at", "failed", "named"), [(1.0, CLOSED, True), (3.0, CLOSED, False), (3.0, FOLLOWER, True)])
def test_a_rank_that_left_too_early_is_the_cause(capsys, at, failed, named):
    assert report([failed, ended(1, 0, at)], None, began=0.0) == 1
    first = says(capsys.readouterr().err)[0]
    left = f"learnerkit.launch: rank 1 left before the others: it ended with exit code 0 after {at:.1f} s"
    assert (first == left) is named


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer", True),
        ("RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv", True),
        ("RuntimeError: Connection reset by peer", True),
        ("RuntimeError: NCCL communicator was aborted on rank 1.", True),
        ("RuntimeError: in a collective:\n  WorkNCCL(SeqNum=2, OpType=ALLREDUCE) ran for 600000 ms", True),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited", True),
        ("DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 clients joined.", True),
        ("DistQueueEmptyError: queue is empty", True),
        ("DistError", True),
        ("DistanceError: too far", False),
        ("RuntimeError: shapes differ", False),
        ("ValueError: NCCL is not a backend for the CPU", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("RuntimeErrorOfMine: nccl", False),
        ("", False),
    ],
)
def test_errors_that_another_rank_may_have_caused(error, expected):
    assert is_collective_error(error) is expected


def test_torchs_own_error_of_a_lost_store_is_one_of_them():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(DistError) as caught:
        TCPStore("127.0.0.1", port, timeout=timedelta(seconds=0.1))
    assert is_collective_error(f"{type(caught.value).__name__}: {caught.value}")


def test_report_of_a_run_that_was_asked_to_end(capsys):
    obedient = [ended(0, 143, 3.0, stop_signals=[15]), ended(1, 0, 3.0, stop_signals=[15])]
    assert report(obedient, signal.SIGTERM, began=0.0) == 143
    assert capsys.readouterr().err == ""
    failing = [ended(0, 1, 3.0, "OSError: disk full", stop_signals=[15])]
    assert report(failing, signal.SIGTERM, began=0.0) == 143
    assert "failed (exit code 1) after 3.0 s:\n  Traceback of 0" in capsys.readouterr().err
    assert report(failing, signal.SIGINT, began=0.0) == 130
    assert "failed (exit code 1) after 3.0 s:\n  OSError: disk full\n" in capsys.readouterr().err


def test_a_rank_that_fails_when_the_ranks_are_stopped_for_a_node_that_joins_is_no_failure(capsys):
    reason, topology = Outcome("joined", text="another node wants to join"), Topology(1, 1, nodes=2)
    ranks = [ended(0, 1, 12.5, "RuntimeError: closed")]
    assert supervise.outcome_of(ranks, reason, topology) == reason
    supervise.report(ranks, reason, topology, 10.0)
    assert says(capsys.readouterr().err) == [
        "learnerkit.launch: another node wants to join",
        "learnerkit.launch: rank 0 then failed: RuntimeError: closed",
    ]


def test_control_characters_are_escaped(capsys):
    supervise.say("a\tb\n\x1b[2J\x00\r\x7f\x9b\u2028\u202e é 日本")
    expected = "learnerkit.launch: a\tb\n  \\x1b[2J\\x00\\r\\x7f\\x9b\\u2028\\u202e é 日本\n"
    assert capsys.readouterr().err == expected


def test_a_report_that_cannot_be_written_is_printed(capsys):
    full = os.open("/dev/full", os.O_WRONLY)
    rank_main.write_report(full, 1, ValueError("lost?"))
    assert "ValueError: lost?" in capsys.readouterr().err


def test_a_brief_traceback_keeps_of_this_package_the_last_frame_alone():
    def fails():
        raise ZeroDivisionError

    package = {}
    exec(compile("def call(f):\n    f()", supervise.__file__, "exec"), package)
    try:
        try:
            package["call"](fails)
        except ZeroDivisionError:
            package["call"](Rank)
    except TypeError as error:
        found = rank_main.format_error(error)
        shown = rank_main.user_traceback(error)
    assert shown == found["brief"]
    assert found["error"].startswith("TypeError: Rank.__init__() missing")
    assert found["traceback"].count(f'File "{supervise.__file__}"') == 2
    first, _, second = found["brief"].partition("During handling of the above exception")
    assert supervise.__file__ not in first
    assert "in fails" in first
    assert second.count(f'File "{supervise.__file__}", line 2, in call') == 1
    assert os.path.basename(__file__) in second


def test_a_whole_traceback_is_shown_on_request(capsys, monkeypatch):
    rank = ended(1, 1, 3.0, "ValueError: mine")
    rank.report = replace(rank.report, traceback="the whole of it")
    report([rank], None, began=0.0)
    assert "the whole" not in capsys.readouterr().err
    monkeypatch.setenv("LEARNERKIT_TRACEBACK", "full")
    report([rank], None, began=0.0)
    assert "the whole of it" in capsys.readouterr().err


def test_a_long_chain_of_errors_has_a_brief_traceback():
    error = None
    for i in range(1100):
        try:
            raise ValueError(i) from error
        except ValueError as e:
            error = e
    assert "ValueError: 0\n" in rank_main.format_error(error)["brief"]


def test_a_long_message_is_cut():
    for text in ("begin" + "\x1b" * 3_000_000 + "end", "begin\n" + "line\n" * 1_000_000 + "end"):
        found = rank_main.format_error(ValueError(text))
        for name, limit in {"error": 1100, "brief": 10_100, "traceback": 1_000_100}.items():
            assert "ValueError: begin" in found[name]
            assert len(found[name]) < limit
        assert found["brief"].rstrip().endswith("end")


def test_the_guard_kills_the_groups_that_have_not_ended():
    def start(*command, **options):
        return subprocess.Popen(command, process_group=0, stdin=subprocess.PIPE, **options)

    with start("sleep", "60") as left, start("sleep", "60") as ended:
        with start(sys.executable, "-IS", str(supervise.GUARD), str(left.pid), str(ended.pid)) as guard:
            guard.stdin.write(b"%d\n" % ended.pid)
        assert left.wait(60) == -signal.SIGKILL
        assert ended.poll() is None
        ended.kill()


def test_a_guard_that_is_halted_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(supervise, "KILL_SECONDS", 0.2)
    before = psutil.Process().children()
    with supervise.guarded([]):
        (guard,) = [child for child in psutil.Process().children() if child not in before]
        guard.suspend()
    assert not guard.is_running()


def test_a_broken_report_is_no_report():
    process = subprocess.Popen(["true"], process_group=0)
    process.wait()
    rank = Rank(0, SimpleNamespace(pid=process.pid, returncode=-9), io.BytesIO(b'{"time": 1.0, "cod'), ended=5.0)
    supervise.record_end(rank)
    assert (rank.code, rank.ended) == (-9, 5.0)


@pytest.mark.parametrize(
    ("topology", "file"),
    [(Topology(2, 1, attempt=3), "rank-*.log"), (Topology(1, 1, first_rank=5, attempt=3), "rank-5.log")],
)
def test_where_the_output_goes_is_said_if_it_is_not_shown(capsys, tmp_path, topology, file):
    for folder, tee, said in ((tmp_path, False, True), (tmp_path, True, False), (None, False, False)):
        supervise.Output(folder, topology, tee)
        line = f"learnerkit.launch: output goes to {tmp_path / 'attempt-3' / file}\n" if said else ""
        assert capsys.readouterr() == ("", line)


class LosesANode:
    """An attempt in which another node is lost, which becomes known only after a while."""

    def __init__(self, nodes, after):
        self.topology, self.known = Topology(1, 1, nodes=nodes), time.monotonic() + after
        self.lost = Outcome("lost", 1, text="node 1 gives no sign of life")

    @property
    def ended_elsewhere(self):
        return self.lost if time.monotonic() >= self.known else None

    @property
    def may_have_lost_a_node(self):
        return self.ended_elsewhere is None


def test_other_nodes_get_time_to_tell_of_the_cause(monkeypatch):
    monkeypatch.setattr(supervise, "CAUSE_SECONDS", 0.2)

    def watched(error, nodes, after):
        attempt = LosesANode(nodes, after)
        ranks = [ended(0, 1, time.monotonic(), error)]
        return supervise.watch(ranks, lambda seconds: time.sleep(seconds) or [], attempt) == attempt.lost

    gloo = "RuntimeError: [gloo/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:1"
    assert watched(gloo, nodes=2, after=0.1)
    assert watched(gloo, nodes=2, after=0.5)  # in doubt for longer than that
    assert not watched(gloo, nodes=1, after=0.1)
    assert not watched("ValueError: mine", nodes=2, after=0.1)
