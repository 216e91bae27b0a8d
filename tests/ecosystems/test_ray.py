"""Ray Train makes a process group itself, and runs the training in a thread: all is as with our launcher."""

import json
import os
from importlib.util import find_spec

import pytest
from kernel import gone
from launching import run_script

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),  # Ray starts a dozen processes, three times workers
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[train]"),  # an import of it sets variables
]


def test_workers_of_ray_train_as_the_processes_of_the_launcher_do(short_path, monkeypatch):
    monkeypatch.setenv("HOME", str(short_path / "home"))
    settings = {
        "USAGE_STATS_ENABLED": 0,
        "AUTH_MODE": "disabled",  # otherwise it writes a token to HOME
        "TRAIN_HEALTH_CHECK_INTERVAL_S": 0.2,
        "TRAIN_WORKER_GROUP_START_TIMEOUT_S": 600,  # a busy machine needs longer than 60 s
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"RAY_{name}", str(value))
    folders = {way: short_path / way for way in ("home", "ray", "launcher", "python")}
    for folder in folders.values():
        folder.mkdir()
    printed = run_script("on_ray.py", folders["ray"], "ray", way="python", timeout=1500)
    run_script("on_ray.py", folders["launcher"], nproc=2)
    run_script("on_ray.py", folders["python"], way="python")
    numbers = {way: json.loads((folders[way] / "numbers.json").read_text()) for way in ("ray", "launcher", "python")}

    # A worker was killed in the second epoch, and the run has resumed from the last checkpoint.
    assert (folders["ray"] / "killed").exists()
    assert "resumed fit 0 in epoch 1, step 35" in printed
    assert numbers["ray"] == numbers["launcher"]
    assert len(numbers["ray"]["losses"]) == 78
    assert numbers["ray"] == {name: close(value) for name, value in numbers["python"].items()}

    # Each epoch is reported once, by both workers, and the function's value is returned.
    seen = json.loads((folders["ray"] / "ray.json").read_text())
    values = numbers["ray"]["values"]
    assert seen["returned"] == values[-1]
    reported = list(map(json.loads, (folders["ray"] / "reported").read_text().splitlines()))
    rows = [{"epoch": epoch, "valid_loss": valid} for epoch, (_, valid) in enumerate(values)]
    assert reported[:3] == [[row, row] for row in rows]

    # In the second training one rank cancels a fit before it reports the epoch, fails in the next, and trains again.
    assert len(reported) == 3
    first, second = (json.loads((folders["ray"] / f"rank{rank}.json").read_text()) for rank in (0, 1))
    for rank in (first, second):
        assert rank["steps"] == 26
        assert rank["ranks"] == [0, 1]
        assert rank["same"]
    assert first["failed"][0] == "PeerError"
    assert first["failed"][1].startswith("rank 1 failed in before_batch of On (epoch 0, step 5): ValueError: the first")
    assert second["failed"] == ["ValueError", "the first cause"]
    assert seen["failures"]  # those that Ray has seen when it looked, of one worker or of both
    assert all("the first cause" in text for text in seen["failures"].values())
    assert abs(first["ended"] - second["ended"]) < 30  # the watch alone would need 60 s

    # No process is left, and no file outside of the folder for Ray.
    assert gone(seen["processes"])
    assert os.listdir(folders["home"]) == []


def close(value):
    "Equal but for rounding."
    if isinstance(value[0], list):
        return [pytest.approx(each, rel=1e-9, abs=1e-12) for each in value]
    return pytest.approx(value, rel=1e-9, abs=1e-12)
