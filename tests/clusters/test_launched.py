"""Real processes over gloo in the environments of clusters: they train as one process does."""

import json
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from launching import SCRIPTS, environment

from learnerkit.launch.addresses import ANYWHERE, NodeError, interface_of, own_address

LIMIT = 300  # seconds for any one run, also on a busy machine
SCRIPT = str(SCRIPTS / "nodes_train.py")
LAUNCH = [sys.executable, "-m", "learnerkit.launch", "--timeout", str(LIMIT), SCRIPT]


def free_port():
    with socket.create_server(("", 0)) as listener:
        return str(listener.getsockname()[1])


def finish(command, folder, env):
    """Run a command in a folder to its end and return what it printed."""
    done = subprocess.run(
        [*command, "result.json", "2", "0"], cwd=folder, env=environment() | env, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def result_of(folder, commands, envs):
    """Run the processes of a job together; return what rank 0 has found, and what each has printed."""
    folder.mkdir()
    with ThreadPoolExecutor() as pool:
        printed = list(pool.map(finish, commands, [folder] * len(envs), envs))
    return json.loads((folder / "result.json").read_text()), printed


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of one process."""
    return result_of(tmp_path_factory.mktemp("alone") / "run", [[sys.executable, SCRIPT]], [{}])[0]


def assert_equal(found, alone):
    assert found["world"] == 2
    for name in ("losses", "values", "weights"):
        np.testing.assert_allclose(flat(found[name]), flat(alone[name]), rtol=1e-9, err_msg=name)


def flat(numbers):
    """The numbers in lists of lists."""
    return [x for each in numbers for x in flat(each)] if isinstance(numbers, list) else [numbers]


@pytest.mark.soak
def test_two_pods_of_kubeflow_train_as_one_process(alone, tmp_path):
    port = free_port()
    envs = [
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node), "PET_MASTER_PORT": port,
         "PET_MASTER_ADDR": "localhost", "MASTER_ADDR": "localhost", "RANK": str(node), "WORLD_SIZE": "2"}
        for node in range(2)
    ]  # fmt: skip
    found, printed = result_of(tmp_path / "run", [LAUNCH] * 2, envs)
    assert_equal(found, alone)
    for node, text in enumerate(printed):
        assert f"learnerkit.launch: Kubeflow says node {node} of 2, with node 0 at localhost:{port} (PET_NNODES" in text


@pytest.mark.soak
def test_processes_of_mpirun_train_as_one_process_without_a_launcher(alone, tmp_path):
    port = free_port()
    envs = [
        {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": rank,
         "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": port}
        for rank in "01"
    ]  # fmt: skip
    found, printed = result_of(tmp_path / "run", [[sys.executable, SCRIPT]] * 2, envs)
    assert_equal(found, alone)
    assert "learnerkit: Open MPI says rank 0 of 2, with rank 0 at 127.0.0.1:" in printed[0]
    assert "learnerkit: " not in printed[1]


def own_hosts(file):
    """The beginning of a command that sees this file in the place of /etc/hosts."""
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(file)]


def can_have_own_hosts():
    """Tell whether this machine allows that, and has an address by which its launchers can meet."""
    try:
        own_address(ANYWHERE, 1)
    except NodeError:
        return False
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run([*own_hosts("/etc/hosts"), "true"], stderr=subprocess.DEVNULL).returncode
    )


@pytest.mark.soak
@pytest.mark.skipif(not can_have_own_hosts(), reason="no /etc/hosts of its own for a process, or no network")
def test_two_machines_of_sagemaker_wait_for_a_name_and_train_as_one_process(alone, tmp_path):
    address = own_address(ANYWHERE, 1)
    interface = interface_of(address)
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    port = free_port()
    envs = [
        {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": f"algo-{node}", "SM_NUM_GPUS": "0",
         "SM_MASTER_PORT": port, "SM_NETWORK_INTERFACE_NAME": interface}
        for node in (1, 2)
    ]  # fmt: skip
    folder = tmp_path / "run"
    with ThreadPoolExecutor() as pool:
        run = pool.submit(result_of, folder, [[*own_hosts(hosts), *LAUNCH]] * 2, envs)
        # The name is known only when both have asked for it in vain for some time.
        time.sleep(8)
        hosts.write_text(f"127.0.0.1 localhost\n{address} algo-1\n")
        found, printed = run.result(LIMIT)
    assert_equal(found, alone)
    assert found["address"] == address
    for node, text in enumerate(printed):
        assert f"learnerkit.launch: SageMaker says node {node} of 2, with node 0 at algo-1:{port} (SM_HOSTS" in text
        assert "learnerkit.launch: waiting for an address for the name 'algo-1' (" in text


@pytest.mark.soak
def test_a_failure_count_leads_to_a_resume(tmp_path):
    def attempt(folder, count, faults):
        folder.mkdir(exist_ok=True)
        env = {"LEPTON_JOB_TOTAL_WORKERS": "1", "LEPTON_JOB_NAME": "job", "LEPTON_JOB_FAILURE_COUNT": str(count),
               "FAULT": faults}  # fmt: skip
        command = [sys.executable, "-m", "learnerkit.launch", "--nproc", "2", str(SCRIPTS / "checkpoint_run.py")]
        done = subprocess.run(
            command, cwd=folder, env=environment() | env, capture_output=True, text=True, timeout=LIMIT
        )
        return done.returncode, done.stderr

    faults = "kill:1:15,none:0:0"  # in each attempt of the cluster
    assert attempt(tmp_path / "run", 0, faults)[0] == 137
    code, said = attempt(tmp_path / "run", 1, faults)
    assert (code, "Lepton says one node, attempt 2" in said) == (0, True), said
    assert attempt(tmp_path / "whole", 0, "none:0:0")[0] == 0
    for name in ("end-0", "end-1"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert len((tmp_path / "run" / "order-0").read_bytes()) < 2 * len((tmp_path / "whole" / "order-0").read_bytes())
