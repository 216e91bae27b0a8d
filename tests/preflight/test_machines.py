"""The preflight check: what is concluded from made-up facts, and real runs."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import read_report
from launching import SCRIPTS, environment, in_time

from learnerkit import __version__
from learnerkit.preflight import joint_checks, local_checks, machines, report
from learnerkit.preflight.facts import Board
from learnerkit.preflight.joint_checks import JOINT
from learnerkit.preflight.local_checks import LOCAL
from learnerkit.preflight.report import HINT, NOTHING, OK, WRONG, Finding

GPU = {"type": "cuda", "name": "H100", "index": 0, "id": "u0", "memory": 80 * 2**30, "free": 79 * 2**30, "peers": [1]}
LINK = {"devices": {"mlx5_0": "400 Gb/sec"}, "opens": True, "disabled": None, "lockable": None}
NET = {
    "set": {}, "names": ["lo", "docker0", "eth0"], "resolved": "10.0.0.1", "resolved_at": "eth0",
    "route": "10.0.0.1", "route_at": "eth0",
}  # fmt: skip
SEEN = {
    "versions": {"python": "3.11.7", "torch": "2.15.0", "learnerkit": "0.1.0", "CUDA": None, "driver": None},
    "devices": {"type": "cpu", "name": "CPU", "id": None},
    "threads": {"threads": 1, "cores": [0, 1]},
    "interface": NET,
    "infiniband": LINK,
    "ports": {"meet": "10.0.0.1:29500", "picked": [32768, 60999]},
    "/dev/shm": {"size": 32 * 2**30, "free": 32 * 2**30},
    "open files": {"soft": 65536, "hard": 65536, "sharing": "file_descriptor"},
    "file system": {"folder": "/home/me", "seen": True, "refused": ""},
    "backend": {"config": "cpu:gloo,cuda:nccl"},
    "clock": {"ahead": [0.0, 0.001]},
    "all-reduce": {"seconds": [[2**12, 1e-4], [2**20, 1e-3], [2**24, 1e-2]], "right": True},
}


def facts(*seen, hosts="aa"):
    """The facts of so many ranks, each on its host, all alike but for what is in `seen`."""
    everyone = []
    for rank, host in enumerate(hosts):
        own = seen[rank] if rank < len(seen) else {}
        changed = {topic: {**SEEN[topic], **own.get(topic, {})} for topic in SEEN}
        everyone.append({"rank": rank, "host": host, "machine": f"{host} 1234", "peer access": {}, **changed})
    return everyone


def judge(topic, everyone):
    """The findings of a topic."""
    return (LOCAL | JOINT)[topic][1](everyone)


def on(hosts, topic, *seen):
    """The only finding of a topic."""
    (finding,) = judge(topic, facts(*({topic: each} for each in seen), hosts=hosts))
    return finding


# What is concluded


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aabb"])
def test_where_all_is_well_nothing_is_said_against_it(hosts):
    everyone = facts(*({"interface": {"resolved": f"10.0.0.{ord(h)}"}} for h in hosts), hosts=hosts)
    everyone[0]["clock"] = {"ahead": [0.0] * len(hosts)}
    for topic in [*LOCAL, *JOINT]:
        (finding,) = judge(topic, everyone)
        assert finding.mark in (OK, NOTHING), finding
        assert finding.advice == ""
    (finding,) = machines.judge_ranks(everyone, [])
    assert finding.mark == (OK if len(hosts) > 1 else NOTHING)


def test_ranks_that_did_not_come_are_named():
    (finding,) = machines.judge_ranks(facts(hosts="aab"), [3])
    assert finding == Finding(
        WRONG, "rank 3 of 4 did not come within 30 s; here are a (2), b (1)",
        "does every launcher run, and what have those ranks printed?",
    )  # fmt: skip
    (finding,) = machines.judge_ranks(facts(hosts="a"), list(range(1, 8)))
    assert finding.text.startswith("ranks 1, 2, 3, 4, 5 and 2 more of 8 did not")


def test_versions_that_differ_are_told():
    old = {"versions": {"torch": "2.4.0", "driver": "535"}}
    found = judge("versions", facts({}, old, old, hosts="abb"))
    assert found == [
        Finding(WRONG, "torch 2.4.0 on ranks 1, 2 (b), 2.15.0 on rank 0 (a)", "install the same torch on all machines"),
        Finding(HINT, "driver 535 on ranks 1, 2 (b), None on rank 0 (a)", "install the same driver on all machines"),
    ]
    text = on("ab", "versions").text
    assert text == "python 3.11.7, torch 2.15.0, learnerkit 0.1.0"


def test_two_ranks_on_one_gpu_are_told():
    found = on("aa", "devices", GPU, GPU)
    assert (found.mark, found.text) == (WRONG, "one GPU for ranks 0, 1 (a), which NCCL refuses")
    assert "LOCAL_RANK" in found.advice
    assert on("ab", "devices", GPU, GPU) == Finding(OK, "2 x H100, 79 GB of 80 GB free")
    assert on("aa", "devices", GPU, GPU | {"id": "u1", "index": 1}).mark == OK


def test_devices_of_two_kinds_are_told():
    found = on("ab", "devices", GPU, GPU | {"name": "A100"})
    assert (found.mark, found.text) == (HINT, "A100 on rank 1 (b), H100 on rank 0 (a)")
    found = on("ab", "devices", GPU)
    assert (found.mark, found.text) == (WRONG, "CPU on rank 1 (b), H100 on rank 0 (a)")
    assert "CUDA_VISIBLE_DEVICES" in found.advice


def test_a_gpu_that_another_program_uses():
    found = on("ab", "devices", GPU, GPU | {"free": 2**30})
    assert (found.mark, found.text) == (HINT, "1 GB of 80 GB free on rank 1 (b)")
    assert "nvidia-smi" in found.advice


def test_missing_peer_access_is_told():
    second = GPU | {"id": "u1", "index": 1, "peers": [0]}
    pair = [{"devices": GPU}, {"devices": second}]
    assert judge("peer access", facts(*pair)) == [Finding(OK, "between all GPUs")]
    assert judge("peer access", facts(*pair, hosts="ab")) == [Finding(NOTHING, "one GPU")]
    pair[0] = {"devices": GPU | {"peers": []}}
    (found,) = judge("peer access", facts(*pair))
    assert (found.mark, "ranks 0-1" in found.text, "NCCL_P2P_DISABLE=1" in found.advice) == (HINT, True, True)


def test_more_threads_than_cores_are_told():
    many = {"threads": 8, "cores": [0, 1, 2, 3]}
    found = on("aa", "threads", many, many)
    assert (found.mark, found.text[:13], found.advice) == (HINT, "16 on 4 cores", "export OMP_NUM_THREADS=2")
    assert on("aab", "threads", many, many).text.endswith("(on a)")
    assert on("aaa", "threads").advice == "start fewer processes"
    assert on("aa", "threads", {"cores": [0]}, {"cores": [1]}) == Finding(OK, "2 on 2 cores")


# As Debian has it in /etc/hosts, and a host that does not know its own name.
@pytest.mark.parametrize("resolved", ["127.0.1.1", None])
def test_a_host_name_that_leads_nowhere_is_told(resolved):
    nowhere = {"resolved": resolved, "resolved_at": "lo" if resolved else None}
    assert on("aa", "interface", nowhere, nowhere).mark == OK
    found = on("ab", "interface", {}, nowhere)
    assert found.mark == WRONG
    assert f"resolves to {resolved or 'nothing'}" in found.text
    assert found.text.endswith("(on b)")
    assert "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0" in found.advice
    assert "/etc/hosts" in found.advice
    named = nowhere | {"set": {"GLOO_SOCKET_IFNAME": "eth0"}}
    assert on("aa", "interface", named, named) == Finding(OK, "eth0 (10.0.0.1)")
    assert on("ab", "interface", named, named).mark == OK


def test_interfaces_that_cannot_be_right_are_told():
    loop = {"set": {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}, "route_at": "ib0"}
    assert on("aa", "interface", loop, loop).mark == OK
    found = on("ab", "interface", loop, loop)
    assert found.mark == WRONG
    assert found.text.startswith("GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME set to loopback")
    assert found.advice == "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0"
    found = on("aa", "interface", *[{"set": {"GLOO_SOCKET_IFNAME": "eth9"}}] * 2)
    assert (found.mark, found.text) == (WRONG, "GLOO_SOCKET_IFNAME=eth9, but there are only lo, docker0, eth0")
    assert found.advice == "unset GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, which one machine does not need"
    docker = {"resolved": "172.17.0.1", "resolved_at": "docker0"}
    first, second = judge("interface", facts({"interface": docker}, {"interface": docker}, hosts="ab"))
    assert (first.mark, first.text) == (WRONG, "the host's name resolves to 172.17.0.1, as does that of b (on a)")
    assert "as does that of a (on b)" in second.text


@pytest.mark.parametrize(
    ("link", "mark", "advice"),
    [
        ({}, OK, ""),
        ({"devices": {}}, WRONG, "NCCL_IB_DISABLE=1 on all"),
        ({"disabled": "1"}, HINT, "NCCL_IB_HCA=mlx5_0"),
        ({"disabled": "0"}, OK, ""),
        ({"opens": False}, HINT, "--device=/dev/infiniband"),
        ({"lockable": 2**16}, HINT, "ulimit -l unlimited"),
    ],
)
def test_infiniband_that_cannot_be_used_is_told(link, mark, advice):
    everyone = facts({"devices": GPU}, {"devices": GPU, "infiniband": link}, hosts="ab")
    (found,) = judge("infiniband", everyone)
    assert (found.mark, advice in found.advice) == (mark, True)
    for f in everyone:
        f["infiniband"] = LINK | {"devices": {}}
    assert judge("infiniband", everyone)[0].mark == OK


def test_a_small_range_of_ports_is_told():
    found = on("a", "ports", {"picked": [40000, 40100]})
    assert (found.mark, "ip_local_port_range" in found.advice) == (HINT, True)


@pytest.mark.parametrize(
    ("megabytes", "ranks", "mark"), [(64, 1, WRONG), (512, 8, WRONG), (512, 1, HINT), (4000, 4, HINT), (4096, 4, OK)]
)
def test_small_shared_memory_is_told(megabytes, ranks, mark):
    small = {"size": 2 * megabytes * 2**20, "free": megabytes * 2**20}
    found = on("a" * ranks, "/dev/shm", *[small] * ranks)
    assert found.mark == mark
    assert ("bus error" in found.text) == ("--shm-size" in found.advice) == (mark != OK)
    assert "old files" not in found.advice
    if mark != OK:
        assert "old files" in on("a", "/dev/shm", {"size": 2**40, "free": 2**20}).advice
    assert on("a", "/dev/shm", {"size": None}).mark == NOTHING


def test_a_low_limit_of_open_files_is_told():
    assert on("aa", "open files", *[{"soft": 1024}] * 2).mark == OK
    found = on("a" * 20, "open files", *[{"soft": 1024}] * 20)
    assert (found.mark, found.advice) == (WRONG, "ulimit -n 65536 before the start")
    assert "1152 may be needed" in found.text
    found = on("ab", "open files", {"soft": 256, "hard": 256})
    assert found.text.endswith("(on a)")
    assert "nofile" in found.advice


def test_machines_that_differ_and_are_fine_are_one_line():
    found = on("abc", "/dev/shm", {"free": 30 * 2**30}, {"free": 31 * 2**30})
    assert found == Finding(OK, "30 GB free of 32 GB (on a)")


@pytest.mark.parametrize(("ahead", "words"), [(5.0, "5.0 s ahead of"), (-61.2, "61.2 s behind")])
def test_clocks_that_differ_are_told(ahead, words):
    found = on("abc", "clock", {"ahead": [0.0, 0.2, ahead]})
    assert (found.mark, found.text) == (HINT, f"up to {words} rank 0's on rank 2 (c)")
    assert "NTP" in found.advice


def test_file_systems_that_ranks_do_not_share_are_told():
    blind = {"seen": False, "folder": "/elsewhere"}
    found = on("abb", "file system", {}, blind, blind)
    assert (found.mark, found.text) == (HINT, "what rank 0 writes to /home/me is not seen by ranks 1, 2 (b)")
    assert "rank0_first(..., per_node=True)" in found.advice
    assert found.advice.endswith("checkpoints lie on a")
    assert on("aab", "file system", {}, blind, blind).advice == "start all in one directory, not in /elsewhere"
    found = on("ab", "file system", {"refused": "OSError: read-only", "seen": False}, blind)
    assert (found.mark, found.text) == (HINT, "rank 0 cannot write to /home/me: OSError: read-only")


def test_all_reduce_is_measured_and_checked():
    bandwidth = on("aaaa", "all-reduce").text  # 2**24 bytes in 10 ms, times 2 * 3 / 4
    assert bandwidth == "4 KB 0.1 ms, 0.061 GB/s; 1 MB 1 ms, 1.6 GB/s; 16 MB 10 ms, 2.5 GB/s"
    found = on("ab", "all-reduce", {}, {"right": False})
    assert (found.mark, found.text) == (WRONG, "the sum is wrong on rank 1 (b)")
    slow = {"seconds": [[2**26, 1.0]]}
    assert on("ab", "all-reduce", slow).mark == OK
    (found,) = judge("all-reduce", facts({"devices": GPU, "all-reduce": slow}, hosts="ab"))
    assert (found.mark, "NCCL_SOCKET_IFNAME" in found.advice, "NCCL_IB_HCA" in found.advice) == (HINT, True, True)


def test_backend_of_the_devices_in_use():
    assert on("aa", "backend").text == "gloo for cpu; all are connected"
    assert judge("backend", facts({"devices": GPU}))[0].text == "nccl for cuda, gloo for cpu; all are connected"


def test_a_check_that_fails_is_a_finding():
    everyone = facts(hosts="ab")
    everyone[1]["ports"] = machines.attempt(lambda: [][0])
    assert machines.judged("ports", None, everyone) == [
        Finding(NOTHING, "could not be checked on rank 1 (b): IndexError: list index out of range")
    ]
    (found,) = machines.judged("threads", lambda everyone: 1 / 0, everyone)
    assert found == Finding(NOTHING, "could not be checked on rank 0: ZeroDivisionError: division by zero")
    everyone[0]["backend"] = {"error": "RuntimeError: no way"}
    (found,) = machines.judged("backend", None, everyone, JOINT["backend"][2])
    assert (found.mark, found.text) == (WRONG, "failed on rank 0 (a): RuntimeError: no way")
    assert "GLOO_SOCKET_IFNAME" in found.advice


def test_lines_fit_the_terminal_and_cannot_steer_it():
    long = " ".join(["interface"] * 30)
    printed = report.lines("interface", Finding(WRONG, f"\x1b[2J\nforged {long}", long))
    assert max(map(len, printed)) <= 98
    assert printed[0].startswith("!!  interface   \\x1b[2J forged interface")
    (advice,) = [line for line in printed if line.lstrip().startswith("-> ")]
    assert advice.index("->") == 16
    assert {len(line) - len(line.lstrip()) for line in printed[1:]} == {16, 19}


# Real runs


def run(*command, timeout=600, cwd=None, **env):
    """Exit code, standard output and error of a command; nothing may be left in `cwd`."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env=environment() | env, capture_output=True, text=True, timeout=timeout, cwd=cwd,
    )  # fmt: skip
    if cwd is not None:
        assert os.listdir(cwd) == []
    return done.returncode, done.stdout, done.stderr


def marks(out):
    """The mark of each topic."""
    return {topic: mark for topic, (mark, _) in read_report(out)[0].items()}


@pytest.mark.soak
def test_the_doctor_finds_two_processes_well(tmp_path):
    start, used = time.monotonic(), os.times()
    code, out, err = run("learnerkit.doctor", "--nproc", 2, cwd=tmp_path)
    took, now = time.monotonic() - start, os.times()
    assert (code, err) == (0, ""), out + err
    found = marks(out)
    assert list(found) == ["ranks", *LOCAL, *JOINT]
    assert {topic for topic, mark in found.items() if mark == NOTHING} <= {"peer access", "infiniband", "/dev/shm"}
    assert {found[topic] for topic in ("ranks", "versions", *JOINT)} == {OK}
    assert re.search(r"4 KB \S+ ms, \S+ GB/s; 1 MB \S+ ms, \S+ GB/s; 16 MB \S+ ms, \S+ GB/s\n", out)
    assert f"torch {torch.__version__}" in out
    assert out.endswith("\nall is well\n")
    worked = now.children_user + now.children_system - used.children_user - used.children_system
    assert in_time(min(took, worked), 20)  # the machine may be busy with other things


@pytest.mark.soak
def test_the_doctor_on_one_process_says_what_it_could_not_check(tmp_path):
    code, out, err = run("learnerkit.doctor", cwd=tmp_path)
    assert (code, err) == (0, ""), out + err
    assert list(marks(out)) == ["ranks", *LOCAL, "file system"]
    assert re.match(r"--  ranks       1 on .*: nothing between processes could be checked \(--nproc 2\)\n", out)


@pytest.mark.soak
def test_torchrun_starts_it_too(tmp_path):
    code, out, err = run(
        "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "learnerkit.doctor", cwd=tmp_path
    )
    assert code == 0, out + err
    assert marks(out)["all-reduce"] == OK


def run_case(*case, cwd=None):
    """Run a case of tests/scripts/doctor_cases.py on two ranks."""
    return run("learnerkit.launch", "--nproc", 2, SCRIPTS / "doctor_cases.py", *case, cwd=cwd)


@pytest.mark.slow
def test_the_doctor_tells_how_two_machines_differ(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    code, out, err = run_case("other_machine", there, cwd=here)
    assert code == 1, out + err
    assert os.listdir(there) == []
    found = marks(out)
    assert {topic for topic, mark in found.items() if mark == WRONG} == {"versions", "interface", "all-reduce"}
    assert {topic for topic, mark in found.items() if mark == HINT} == {"file system", "clock"}
    text = " ".join(out.split())
    assert rf"learnerkit 0.0.9 on rank 1 (host1\x1b[2J), {__version__} on rank 0 (host0\x1b[2J)" in text
    assert re.search(r"up to [45]\.\d s ahead of rank 0's on rank 1", text)  # 5.0 s, and what a busy machine adds
    assert "could not be checked on rank 1 (host1\\x1b[2J): ZeroDivisionError" in text
    assert "set to loopback" in text
    assert "the sum is wrong on rank 1 (host1" in text
    assert out.endswith("\n3 problems (errors.html#doctor)\n")


def test_a_rank_that_cannot_import_torch_says_so():
    code, out, err = run_case("no_torch")
    assert (code, out) == (1, "")
    assert re.search(r"learnerkit.doctor: rank 1 \(\S+\) cannot import torch with \S+python\S*:\n    \w+Error: ", err)
    assert "install torch there" in err


@pytest.mark.soak
def test_a_rank_that_does_not_come():
    code, out, err = run_case("silent")
    assert code == 1, out + err
    assert "!!  ranks       rank 1 of 2 did not come within 3 s" in out
    assert marks(out)["open files"] == OK
    assert "all-reduce" not in marks(out)
    assert out.endswith("\n1 problem (errors.html#doctor)\n")


@pytest.mark.soak
def test_nobody_where_the_ranks_should_meet():
    code, out, err = run_case("alone_in_the_dark")
    assert (code, out) == (1, "")
    assert re.search(r"learnerkit.doctor: rank \d \(\S+\) could not reach the others at 127.0.0.1:9:\n", err), err
    assert "nc -vz 127.0.0.1 9" in err


@pytest.mark.soak
def test_a_check_that_hangs_is_ended():
    code, out, err = run_case("stuck", "all-reduce")
    assert code == 1, out + err
    assert "!!  all-reduce  has not ended after 3 s\n                -> NCCL_DEBUG=INFO" in out
    assert out.endswith("\n1 problem (errors.html#doctor)\n")


@pytest.mark.soak
def test_what_fails_on_one_rank_is_told_though_the_others_wait():
    code, out, err = run_case("fails", "backend")
    assert code == 1, out + err
    assert "!!  backend     failed on rank 1 (" in out
    assert "IndexError: list index out of range" in out
    assert list(marks(out))[-1] == "backend"
    assert out.endswith("\n1 problem (errors.html#doctor)\n")


@pytest.mark.soak
def test_its_file_goes_when_it_is_stopped(tmp_path):
    command = [sys.executable, "-m", "learnerkit.launch", "--nproc", "2", str(SCRIPTS / "doctor_cases.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "stuck", "file system"], env=environment(), cwd=tmp_path, **pipes) as process:
        while next(process.stdout) != "looking\n":
            pass
        (file,) = os.listdir(tmp_path)
        assert file.startswith(".learnerkit-doctor-")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_written(monkeypatch, tmp_path):
    board = Board(torch.distributed.HashStore(), 0, 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(joint_checks.Path, "write_text", lambda *args: (_ for _ in ()).throw(OSError(30, "read-only")))
    found = joint_checks.look_at_files(board)
    assert found == {"folder": str(tmp_path), "seen": False, "refused": "OSError: [Errno 30] read-only"}


def test_the_command_line_of_the_doctor_starts_the_checks(capsys, monkeypatch):
    for arguments, code in ((["--help"], 0), (["--nproc"], 2)):
        with pytest.raises(SystemExit) as caught:
            machines.main(arguments)
        assert caught.value.code == code
    out, err = capsys.readouterr()
    assert "--nproc N" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "--rank" not in out
    seen = []
    monkeypatch.setattr(machines.cli, "main", lambda argv, prog: seen.append(argv) or 7)
    monkeypatch.setattr(machines, "examine", lambda: 9)
    assert machines.main(["--gpus", "0,1", "train.py"]) == 7
    assert seen == [["--check", "--gpus", "0,1", "train.py"]]
    assert machines.main(["--rank"]) == 9
    assert machines.cli.parse(["--check", "--nproc", "2"]).job.command == ["-m", "learnerkit.doctor", "--rank"]


@pytest.mark.gpu
def test_the_doctor_describes_a_gpu(tmp_path):
    found = local_checks.look_at_device()
    assert found["type"] == "cuda"
    assert 0 < found["free"] <= found["memory"]
    assert found["index"] not in found["peers"]
    assert found["id"]
    command = [sys.executable, "-m", "learnerkit.doctor"]  # on two GPUs and more: NCCL too
    done = subprocess.run(command, env=environment(gpus=True), capture_output=True, text=True, timeout=120)
    assert marks(done.stdout)["devices"] in (OK, HINT), done.stdout + done.stderr
    assert f"{torch.cuda.device_count()} x " in done.stdout or "free on rank" in done.stdout
    assert torch.cuda.device_count() == 1 or "nccl for cuda, gloo for cpu" in done.stdout
