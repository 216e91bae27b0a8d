"""Machines for the tests of launchers."""

import os
import shutil
import subprocess
import uuid

import pytest


@pytest.fixture(scope="module")
def hosts():
    """Three network namespaces joined by a switch: (what a command there begins with, the address) of each."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the program `ip`")
    mark = uuid.uuid4().hex[:6]
    names = [f"lk{mark}{i}" for i in range(3)]
    switch = f"lk{mark}s"

    def ip(*words, check=True):
        return subprocess.run(["ip", *map(str, words)], check=check, capture_output=True, text=True)

    try:
        if ip("netns", "add", switch, check=False).returncode:
            pytest.skip("network namespaces cannot be made here")
        if ip("-n", switch, "link", "add", "bridge", "type", "bridge", check=False).returncode:
            pytest.skip("a network bridge cannot be made here")
        ip("-n", switch, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "net0", "type", "veth", "peer", "name", f"port{i}", "netns", switch)
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
            ip("-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
        yield [(["ip", "netns", "exec", name], f"10.77.0.{i + 1}") for i, name in enumerate(names)]
    finally:
        for name in (*names, switch):
            ip("netns", "del", name, check=False)
