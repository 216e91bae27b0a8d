"""Several machines: network namespaces of this one, each with an address of its own, and pure parts without any."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from functools import partial

import psutil
import pytest
from helpers import mostly_slow
from launching import SCRIPTS, environment
from servers import FOREIGN, serving

from learnerkit.launch import rendezvous
from learnerkit.launch.addresses import NodeError, interface_of, is_own, own_address, parse_endpoint
from learnerkit.launch.node_info import check_that_nodes_match, fingerprint, topology_of, versions
from learnerkit.launch.nodes import begin_alone, begin_with_others
from learnerkit.launch.rendezvous import Elastic, Rendezvous, Static
from learnerkit.launch.report import Outcome
from learnerkit.processes.machine import LOOPBACK, LOOPBACK_INTERFACE
from learnerkit.processes.sockets import torch_is_tested

LIMIT = 100  # seconds for any one step of a test


# What nodes tell of themselves


def info(node, nproc=1, host="a", address="10.0.0.1", **about):
    facts = {"versions": {"Python": "3.11", "torch": "2.15.0"}, "script": "train.py (12ab)", "attempt": 0}
    return {"node": node, "host": host, "address": address, "nproc": nproc, "port": 7, "restarts": 1} | facts | about


def test_ranks_are_numbered_node_by_node():
    infos = [info(0, 2), info(1, 1, "b", "10.0.0.2"), info(2, 3), info(3, 1, "b", "10.0.0.2", attempt=2, restarts=5)]
    found = [topology_of(node, infos) for node in range(4)]
    assert [p.first_rank for p in found] == [0, 2, 3, 6]
    assert {p.world_size for p in found} == {7}
    assert [(p.first_local_rank, p.local_world_size) for p in found] == [(0, 5), (0, 2), (2, 5), (1, 2)]
    assert {(p.address, p.port, p.nodes, p.attempt, p.restarts) for p in found} == {("10.0.0.1", 7, 4, 2, 5)}
    assert [p.node for p in found] == [0, 1, 2, 3]
    assert [(p.machine, p.machines) for p in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"versions": {"Python": "3.11", "torch": "2.14.1"}}, r"node 1 \(b, 10.0.0.2\) has torch 2.14.1, node 0 \(a, "),
        ({"script": "other.py (12ab)"}, r"node 1 \(b, 10.0.0.2\) runs other.py \(12ab\), node 0 \(a, 10.0.0.1\) train"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(about, message):
    check_that_nodes_match([info(0), info(1, host="b", address="10.0.0.2")])
    with pytest.raises(NodeError, match=message):
        check_that_nodes_match([info(0), info(1, host="b", address="10.0.0.2") | about])


def test_scripts_are_told_apart_by_what_is_in_them(tmp_path):
    one, other = tmp_path / "train.py", tmp_path / "copy" / "train.py"
    other.parent.mkdir()
    for path in (one, other):
        path.write_text("print(1)")
    assert fingerprint([str(one), "--lr", "1"]) == fingerprint([str(other)])
    other.write_text("print(2)")
    assert fingerprint([str(one)]) != fingerprint([str(other)])
    assert fingerprint(["-m", "pkg.train", "x"]) == "-m pkg.train"
    assert versions()["Python"] == ".".join(map(str, sys.version_info[:2]))


# Addresses


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("node1", ("node1", 29500)),
        ("node1:80", ("node1", 80)),
        ("10.0.0.1:29511", ("10.0.0.1", 29511)),
        ("[::1]:5", ("::1", 5)),
        ("[::1]", ("::1", 29500)),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(text, parts):
    assert parse_endpoint(text, 29500) == parts


@pytest.mark.parametrize("text", ["", ":80", "node1:", "node1:x", "node1:0", "node1:70000", "[::1]:"])
def test_a_text_that_is_no_endpoint_is_refused(text):
    with pytest.raises(ValueError, match="give host:port, such as node1:29500"):
        parse_endpoint(text, 29500)


def test_addresses_of_this_machine_are_known_as_its_own():
    assert own_address(LOOPBACK, 1) == LOOPBACK
    assert interface_of(LOOPBACK) == LOOPBACK_INTERFACE
    assert interface_of("203.0.113.7") is None
    assert is_own(LOOPBACK)
    assert not is_own("203.0.113.7")
    with pytest.raises(NodeError, match="the name 'no.such.host.invalid' is unknown here"):
        own_address("no.such.host.invalid", 1)


def test_alone_there_is_a_new_store_for_every_attempt():
    attempts = [begin_alone(number, nproc=2, restarts=1) for number in range(2)]
    assert [attempt.topology.attempt for attempt in attempts] == [0, 1]
    for attempt in attempts:
        assert attempt.listener.getsockname() == (LOOPBACK, attempt.topology.port)
        attempt.leave()


# Launchers that meet

ONE_SCRIPT = ["-m", "train"]


def other_than_a_launcher(spec, port):
    """How the line begins that tells of something else at a port, and how it ends."""
    if isinstance(spec, Static):
        end = "; give the --master-addr of node 0, and a --master-port that no other program uses there"
        return f"what listens at {LOOPBACK}:{port} does not answer like the launcher of node 0 (", end
    end = "; give an --rdzv-endpoint with a port that no other program uses there"
    return f"what listens at {LOOPBACK}:{port} does not answer like a launcher (", end


@pytest.mark.parametrize("name", mostly_slow(FOREIGN, "http", slow=["silent"]))
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(partial(Static, 1, 2), id="static"),
        pytest.param(partial(Elastic, 2, 2), id="elastic", marks=pytest.mark.slow),
    ],
)
def test_something_else_at_the_port_is_one_error_in_time(monkeypatch, capfd, spec, name):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # put back at the end
    serve, answer = FOREIGN[name]
    said = []
    with serving(serve) as port:
        spec = spec(LOOPBACK, port)
        began = time.monotonic()
        with pytest.raises(NodeError) as caught:
            begin_with_others(0, 1, 0, Rendezvous(spec, 1.0, said.append), ONE_SCRIPT)
        assert time.monotonic() - began < 1.0 + 10  # the machine may be busy; torch tries for longer, or for ever
    start, end = other_than_a_launcher(spec, port)
    message = str(caught.value)
    assert (message.startswith(f"{start}{answer}"), message.endswith(f"){end}"), "\n" in message) == (True, True, False)
    assert (said, *capfd.readouterr()) == ([], "", "")


def test_node_0_says_that_its_port_is_taken(capfd):
    with serving(FOREIGN["silent"][0]) as port, pytest.raises(NodeError, match="and a free --master-port$") as caught:
        begin_with_others(0, 1, 0, Rendezvous(Static(0, 2, LOOPBACK, port), 1.0, print), ONE_SCRIPT)
    assert f"node 0 cannot listen at {LOOPBACK}:{port} (Address already in use" in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is not an address of this machine")
def test_node_0_reaches_its_store_though_its_name_stands_for_another_address(monkeypatch):
    "As on Debian, where a machine's own name stands for 127.0.1.1, at which no other machine can reach it."
    monkeypatch.setattr(rendezvous, "own_address", lambda host, port: "127.0.0.2")
    node, nodes, attempt, store = Rendezvous(Static(0, 1, LOOPBACK, free_port()), 5.0, print).join(0)
    assert (node, nodes, attempt) == (0, 1, 0)
    store.set("as", "ever")


@pytest.mark.slow
def test_a_name_that_resolves_late_is_waited_for(monkeypatch):
    known = iter([False] * 40 + [True])
    monkeypatch.setattr(rendezvous, "resolves", lambda host: host == LOOPBACK and next(known))
    said = []
    node, *_ = Rendezvous(Static(0, 1, LOOPBACK, free_port()), 60.0, said.append).join(0)
    (line,) = said
    assert node == 0
    assert re.fullmatch(rf"waiting for an address for the name {LOOPBACK!r} \(\d+ s\)", line)
    with pytest.raises(NodeError, match=r"^an address for the name 'algo-1' did not come within 0 s \(--timeout\)"):
        Rendezvous(Static(0, 2, "algo-1", 1), 0.1, print).join(0)


@pytest.mark.slow
def test_a_node_that_comes_first_waits_for_node_0():
    said, topologies, port = [], {}, free_port()

    def take_part(node):
        rendezvous = Rendezvous(Static(node, 2, LOOPBACK, port), float(LIMIT), said.append)
        attempt = begin_with_others(0, 1, 0, rendezvous, ONE_SCRIPT)
        topologies[node] = attempt.topology
        attempt.agree_on_end(Outcome("done", node, 0))
        attempt.leave()

    threads = [threading.Thread(target=take_part, args=(node,)) for node in (1, 0)]
    for thread in threads:
        thread.start()
        until(lambda: said, lambda: "no reminder came")
    for thread in threads:
        thread.join(LIMIT)
    assert re.fullmatch(rf"waiting for node 0 at {LOOPBACK}:{port} \(\d+ s\)", said[0])
    found = [topologies[node] for node in (0, 1)]
    assert [(each.node, each.first_rank, each.world_size) for each in found] == [(0, 0, 2), (1, 1, 2)]


class Launcher(subprocess.Popen):
    """A launcher of one node; what it prints goes to a file."""

    def __init__(self, *arguments, prefix=(), cwd, number, **env):
        command = [*prefix, sys.executable, "-m", "learnerkit.launch", *map(str, arguments)]
        self.log = cwd / f"launcher-{number}.txt"
        with self.log.open("w") as log:
            super().__init__(
                command, env=environment() | env, cwd=cwd, start_new_session=True, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_for(self, text):
        """Wait until it has printed this."""
        until(lambda: text in self.log.read_text(), lambda: f"{text!r} did not come:\n{self.log.read_text()}")

    def finish(self):
        """Wait for the end; return the exit code and what was printed."""
        code = self.wait(LIMIT)
        return code, self.log.read_text()

    def lose_power(self):
        """Kill it and what it has started, all in one moment."""
        family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        for process in family:
            process.kill()


def until(true, message):
    """Wait for something."""
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline, message()
        time.sleep(0.05)


@pytest.fixture
def launcher(tmp_path):
    """Start launchers; at the end of the test none of them, nor of their ranks, may be left."""
    started, mark = [], uuid.uuid4().hex

    def start(*arguments, **options):
        started.append(Launcher(*arguments, cwd=tmp_path, number=len(started), NODES_TEST=mark, **options))
        return started[-1]

    yield start
    time.sleep(0.2)
    left = [p for p in psutil.process_iter() if environment_of(p).get("NODES_TEST") == mark]
    for process in left:
        process.kill()
    for process in started:
        process.wait()
    assert not left, left


def environment_of(process):
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}


def free_port():
    with socket.create_server((LOOPBACK, 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.skipif(not torch_is_tested(), reason="a torch that is not known is imported, and asked, first")
def test_the_launcher_prints_one_line_about_something_else_before_it_imports_torch(launcher, tmp_path):
    (tmp_path / "train.py").write_text("print('ran')")
    (tmp_path / "torch.py").write_text("raise ImportError('torch is imported')")
    began = time.monotonic()
    with serving(FOREIGN["silent"][0]) as silent, serving(FOREIGN["speaks first"][0]) as speaking:
        specs = {silent: Elastic(2, 2, LOOPBACK, silent), speaking: Static(1, 2, LOOPBACK, speaking)}
        at = ["--nnodes", 2, "--timeout", 3]
        pair = [
            launcher(*at, "--rdzv-endpoint", f"{LOOPBACK}:{silent}", "train.py"),
            launcher(*at, "--node-rank", 1, "--master-addr", LOOPBACK, "--master-port", speaking, "train.py"),
        ]
        ends = [one.finish() for one in pair]
    assert time.monotonic() - began < 3 + 10
    for (code, printed), (port, spec) in zip(ends, specs.items(), strict=True):
        start, end = other_than_a_launcher(spec, port)
        assert (code, printed.count("\n")) == (1, 1), printed
        assert printed.startswith(f"learnerkit.launch: {start}")
        assert printed.endswith(f"){end}\n")


@pytest.mark.soak
def test_a_missing_node_is_named_and_another_script_refused(launcher, tmp_path):
    for name in ("one.py", "other.py"):
        (tmp_path / name).write_text(f"print({name!r})")
    at = ["--nnodes", 2, "--master-addr", LOOPBACK, "--master-port"]
    first, second = free_port(), free_port()
    waiting = launcher("--timeout", 5, *at, first, "--node-rank", 0, "one.py")
    nobody = launcher("--timeout", 5, *at, free_port(), "--node-rank", 1, "one.py")
    pair = [launcher(*at, second, "--node-rank", rank, name) for rank, name in enumerate(["one.py", "other.py"])]
    code, printed = waiting.finish()
    assert code == 1
    assert re.search(r"^learnerkit\.launch: waiting for node 1 of 2 \(\d+ s\)$", printed, re.MULTILINE)
    assert (
        "learnerkit.launch: node 1 of 2 did not come within 5 s (--timeout); is the launcher running there" in printed
    )
    code, printed = nobody.finish()
    assert code == 1
    assert f"node 0 at {LOOPBACK}:" in printed
    assert "did not come within 5 s" in printed
    for one in pair:
        code, printed = one.finish()
        assert code == 1
        assert "runs other.py (" in printed
        assert "one.py (" in printed
        assert "\none.py\n" not in printed


@pytest.mark.soak
def test_a_failure_on_one_node_is_told_on_all_and_all_start_anew(launcher, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "rank, attempt = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('rank', rank, 'of', os.environ['WORLD_SIZE'], 'local', os.environ['LOCAL_RANK'], flush=True)\n"
        "there = Path(f'there-{sys.argv[1]}-{attempt}')\n"
        "if rank == '1':\n"
        "    there.touch()\n"
        "if attempt < sys.argv[1]:\n"
        "    while rank != '2' or not there.exists():\n"
        "        time.sleep(0.01)\n"
        "    raise KeyError('the cause')\n"
    )
    for fails, code in ((1, 0), (2, 1)):
        at = ["--max-restarts", 1, "--nnodes", 2, "--master-addr", LOOPBACK, "--master-port", free_port()]
        at += ["--events", f"events-{fails}"]
        pair = [launcher(*at, "--node-rank", rank, "--nproc", 2 - rank, "train.py", fails) for rank in (0, 1)]
        printed = []
        for one in pair:
            ended, text = one.finish()
            assert ended == code
            assert text.count("learnerkit.launch: attempt 2 of 2") == 1
            printed.append(text)
        assert printed[0].count(", 127.0.0.1): rank 2 failed (exit code 1): KeyError: 'the cause'") == fails
        assert "KeyError: 'the cause'" in printed[1]
        assert "rank 1 of 3 local 1" in printed[0]
        assert "rank 2 of 3 local 2" in printed[1]
        lines = [json.loads(line) for line in (tmp_path / f"events-{fails}").read_text().splitlines()]
        for node in (0, 1):
            own = [line for line in lines if line["node"] == node]
            failed = ["started", "failed"]
            assert [line["event"] for line in own] == failed + (["started"] if fails == 1 else failed) + ["ended"]
            assert [line["attempt"] for line in own] == [0, 0, 1, *[1] * fails]
            assert {(line["world_size"], line["nproc"]) for line in own if "nproc" in line} == {(3, 2 - node)}
            causes = {(line["rank"], line["cause"]) for line in own if line["event"] == "failed"}
            assert causes == {(2, "KeyError: 'the cause'")}
            assert own[-1]["code"] == code


# Hosts


def train(launcher, host, *options, file="out.json", epochs=2, pause=0.0):
    return launcher(*options, SCRIPTS / "nodes_train.py", file, epochs, pause, prefix=host[0])


@pytest.mark.slow
def test_two_hosts_train_as_one(launcher, hosts, tmp_path):
    a, b, _ = hosts
    at = ["--nnodes", 2, "--master-addr", a[1], "--master-port", 29555, "--nproc", 1]
    late = train(launcher, b, *at, "--node-rank", 1)
    alone = subprocess.run(
        [sys.executable, SCRIPTS / "nodes_train.py", "alone.json", "2", "0"],
        env=environment(),
        cwd=tmp_path,
        timeout=LIMIT,
    )
    assert alone.returncode == 0
    late.wait_for(f"waiting for node 0 at {a[1]}:29555 (")
    first = train(launcher, a, *at, "--node-rank", 0)
    for one in (first, late):
        code, printed = one.finish()
        assert code == 0, printed
    expected, found = (json.loads((tmp_path / name).read_text()) for name in ("alone.json", "out.json"))
    assert (expected.pop("world"), found.pop("world")) == (1, 2)
    assert found.pop("address") == a[1]
    expected.pop("address")
    for name in ("losses", "weights"):
        assert flat(found[name]) == pytest.approx(flat(expected[name]), rel=1e-9)


def flat(x):
    return [number for part in x for number in flat(part)] if isinstance(x, list) else [x]


@pytest.mark.soak
def test_a_host_that_is_killed_ends_the_run_of_the_others(launcher, hosts):
    a, b, _ = hosts
    at = ["--nnodes", 2, "--master-addr", a[1], "--nproc", 1]
    for killed in (1, 0):
        pair = [train(launcher, host, *at, "--node-rank", i, pause=0.2, epochs=99) for i, host in enumerate((a, b))]
        pair[0].wait_for("2 ranks begin")
        time.sleep(3)
        pair[killed].lose_power()
        began = time.monotonic()
        code, printed = pair[1 - killed].finish()
        assert code == 1, printed
        assert time.monotonic() - began < 25
        said = f"node {killed} ({socket.gethostname()}, {(a, b)[killed][1]})"
        assert said in printed
        first = next(line for line in printed.splitlines() if line.startswith("learnerkit.launch: "))
        assert said in first, printed
        assert pair[killed].finish()[0] == -signal.SIGKILL


@pytest.mark.soak
def test_the_autoencoder_runs_on_two_hosts(launcher, hosts, tmp_path):
    at = ["--nnodes", 2, "--rdzv-endpoint", f"{hosts[0][1]}:29557", "--nproc", 1]
    script = SCRIPTS.parents[1] / "examples" / "train_autoencoder.py"
    pair = [launcher(*at, script, "--epochs", 1, prefix=host[0]) for host in hosts[:2]]
    for one in pair:
        code, printed = one.finish()
        assert code == 0, printed
    assert sorted(os.listdir(tmp_path / "models")) == ["autoencoder-1.pth", "autoencoder.pth", "reconstructions.png"]


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_hosts_come_and_go(launcher, hosts, tmp_path):
    "Two begin, a third joins, one is lost: the others go on, each time anew."
    a, b, c = hosts
    at = ["--nnodes", "2:3", "--rdzv-endpoint", f"{a[1]}:29556", "--nproc", 1, "--max-restarts", 1]

    def begun(ranks):
        mark = tmp_path / f"begun-{ranks}"
        until(mark.exists, lambda: "\n".join(log.read_text() for log in sorted(tmp_path.glob("launcher-*.txt"))))
        mark.unlink()

    two = [train(launcher, host, *at, pause=0.1, epochs=999) for host in (a, b)]
    begun(2)
    third = train(launcher, c, *at, pause=0.1, epochs=999)
    begun(3)
    third.lose_power()
    begun(2)
    (tmp_path / "enough").touch()
    for one in two:
        code, printed = one.finish()
        assert code == 0, printed
        assert "another node wants to join: restarting with it" in printed
        assert f"{c[1]}) gives no sign of life" in printed
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["world"], found["attempt"]) == (2, 2)
    assert third.finish()[0] == -signal.SIGKILL


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_host_that_is_asked_to_end_leaves_if_the_others_are_enough(launcher, hosts, tmp_path):
    "Of three the third is asked to end: the others go on. Then the second is: the first alone is too few."
    at = ["--nnodes", "2:3", "--rdzv-endpoint", f"{hosts[0][1]}:29558", "--nproc", 1]

    def begun(ranks):
        until((tmp_path / f"begun-{ranks}").exists, lambda: "\n".join(one.log.read_text() for one in three))

    three = [train(launcher, host, *at, pause=0.1, epochs=999) for host in hosts]
    begun(3)
    time.sleep(1)
    three[2].terminate()
    assert three[2].finish()[0] == 128 + signal.SIGTERM
    begun(2)
    for one in three[:2]:
        assert f"{hosts[2][1]}) was asked to end: restarting without it\n" in one.log.read_text()
    three[1].terminate()
    for one in three[:2]:
        assert one.finish()[0] == 128 + signal.SIGTERM
    assert f"{hosts[1][1]}): asked to end by SIGTERM\n" in three[0].log.read_text()
