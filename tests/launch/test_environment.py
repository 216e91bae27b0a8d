"""The environment that the launcher and a notebook's workers share."""

import os
import sys

import pytest

from learnerkit.launch.environment import Topology, rank_environment
from learnerkit.processes.machine import shared_file
from learnerkit.text import escaped, escaped_line, killed_by


def test_a_rank_gets_its_place_in_the_environment():
    given = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "old", "GROUP_RANK": "1"}
    given |= {"KEPT": "yes", "NCCL_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": "3", "GROUP_NAME": "mine"}
    given |= {"NODE_RANK": "2", "NODE_RANKING": "mine", "ROLE_NAME": "old", "ROLE_NAMES": "mine"}
    given |= {"LEARNERKIT_REPORT": "1"}
    copy = dict(given)
    env = rank_environment(given, Topology(2, 1234), 1, gpus="5,6")
    assert given == copy
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    assert env == {
        "KEPT": "yes",
        "GROUP_NAME": "mine",
        "NODE_RANKING": "mine",
        "ROLE_NAMES": "mine",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": loopback,
        "TP_SOCKET_IFNAME": loopback,
        "CUDA_VISIBLE_DEVICES": "5,6",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    assert rank_environment({"OMP_NUM_THREADS": "4"}, Topology(2, 1), 0)["OMP_NUM_THREADS"] == "4"
    assert rank_environment({"TORCH_CPP_LOG_LEVEL": "INFO"}, Topology(2, 1), 0)["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert "OMP_NUM_THREADS" not in rank_environment({}, Topology(1, 1), 0)
    assert rank_environment(given, Topology(1, 1), 0)["CUDA_VISIBLE_DEVICES"] == "3"


def test_signals_have_names_where_there_are_any():
    assert "signal 9 (SIGKILL), as the kernel does when memory runs out" in killed_by(9)
    assert killed_by(11) == "was killed by signal 11 (SIGSEGV)"
    assert "real-time" in killed_by(40)


def test_what_goes_into_a_line_stays_there():
    assert escaped("a\tb\nc\x1b[2J\r\u2028é") == "a\tb\nc\\x1b[2J\\r\\u2028é"
    assert escaped_line("a\tb\nc\x1b[2J") == "a\\tb\\nc\\x1b[2J"


def test_a_shared_file_is_found_by_its_path():
    file, path = shared_file(8)
    with file, open(path, "rb") as again:
        file.write(b"abc")
        file.flush()
        assert again.read() == b"abc" + bytes(5)


@pytest.mark.parametrize("process", [os.getppid(), 0])
def test_a_shared_file_is_found_where_proc_has_not_this_process(process, monkeypatch):
    # /proc is not mounted, or in a new PID namespace is that of another one, where the number is of another process.
    monkeypatch.setattr(os, "getpid", lambda: process)
    test_a_shared_file_is_found_by_its_path()
