"""Checkpoints for the tests: small states that are told by a number, and ways to spoil files."""

import hashlib
import json
import random
from contextlib import contextmanager

import torch

from learnerkit.checkpoints import storage


def state_of(number, size=100):
    """(weights, state, own, info) of a small run."""
    generator = torch.Generator().manual_seed(number)
    weights = {"a": torch.randn(size, generator=generator), "b.c": torch.randn(3, 5, generator=generator).half()}
    moments = {0: {"step": torch.tensor(float(number)), "exp_avg": torch.randn(size, generator=generator)}}
    state = {"opt": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}, "name": f"run {number}"}
    return weights, state, {"random": torch.get_rng_state(), "text": "its own"}, {"number": number}


def save(found, number, name="", **kwargs):
    """Save the state of that number."""
    found.save(name or f"step{number}", *state_of(number, **kwargs))


def save_and_wait(found, number, **kwargs):
    """The same, until it is on disk."""
    save(found, number, **kwargs)
    found.wait()


def is_state(checkpoint, number, size=100):
    """Whether a checkpoint has exactly the state of that number."""
    weights, state, own, info = state_of(number, size)
    read, opt = checkpoint.weights(), checkpoint.state()["opt"]["state"][0]
    return (
        checkpoint.info == info
        and read.keys() == weights.keys()
        and all(torch.equal(read[name], weights[name]) for name in weights)
        and all(torch.equal(opt[name], value) for name, value in state["opt"]["state"][0].items())
        and checkpoint.own(0)["text"] == own["text"]
    )


def spoil(path, place):
    """Flip a bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def three(path, **kwargs):
    """A directory with three checkpoints."""
    found = storage.Storage(path, **kwargs)
    for number in (1, 2, 3):
        save(found, number)
    found.wait()
    return found


def write_manifest(folder, manifest):
    """Write the manifest of a checkpoint, with the digest that goes with it."""
    unsigned = {key: value for key, value in manifest.items() if key != "sha256"}
    (folder / "manifest.json").write_bytes(storage._signed(unsigned))


def resign(folder):
    """Give a checkpoint whose files were changed a manifest that fits them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(folder, manifest)


@contextmanager
def largest_file(n_bytes):
    """Let no file of this process grow beyond so many bytes, as if the disk were full."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
