"""The files of the package that a checkpoint passes, when it is written and when it is read."""

import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from resume_jobs import Kill, Killed, make, run

import learnerkit
from learnerkit import CheckpointCallback
from learnerkit.checkpoints.storage import Storage
from learnerkit.run_state import Resumption

PACKAGE = str(Path(learnerkit.__file__).parent)

HELPERS = {"callback.py", "utils.py", "values.py", "torch_internals.py", "text.py", "shards.py",
           "clusters/place.py", "clusters/slurm.py", "clusters/table.py", "processes/event_file.py"}  # fmt: skip
"""They have attributes looked up, wrappers and shards taken off, texts made safe, ranks numbered by the variables of a
cluster and lines appended for the launcher, and know of no checkpoint."""


class Look:
    """Notes the files whose functions are called.

    Not those of a part of the run that is asked for its state, or gets it back, beyond its own file; nor properties.
    """

    def __init__(self):
        self.files, self.inside = set(), {}

    def __call__(self, frame, event, arg):
        code, thread = frame.f_code, threading.get_ident()
        file = code.co_filename.removeprefix(f"{PACKAGE}/")
        if file == code.co_filename or event not in ("call", "return"):
            return
        is_part = "state_dict" in code.co_name and file.startswith(("callbacks/", "data/"))
        if event == "return":
            self.inside[thread] = self.inside.get(thread, 0) - is_part
            return
        owner = type(frame.f_locals.get("self"))
        if not self.inside.get(thread) and not isinstance(getattr(owner, code.co_name, None), property):
            self.files.add(file)
        self.inside[thread] = self.inside.get(thread, 0) + is_part

    @contextmanager
    def on(self, look=True):
        before = sys.getprofile()
        found = self if look else None
        sys.setprofile(found)
        threading.setprofile(found)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before)


def watch(monkeypatch, look, owner, name, looks=True):
    own = getattr(owner, name)

    def call(*args, **kwargs):
        with look.on(looks):
            return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("job", ["plain"])
def test_a_checkpoint_passes_eight_files_when_it_is_written_and_eight_when_it_is_read(job, tmp_path, monkeypatch):
    written, read = Look(), Look()
    with monkeypatch.context() as patch:
        watch(patch, written, CheckpointCallback, "_save")
        with suppress(Killed):
            run(job, make(job, tmp_path, Kill(9)))
    for owner, name in ((Storage, "newest"), (CheckpointCallback, "_take_up"), (Resumption, "enter")):
        watch(monkeypatch, read, owner, name)
    for name in ("_compare", "_tell"):  # what the user is told
        watch(monkeypatch, read, CheckpointCallback, name, looks=False)
    run(job, make(job, tmp_path, resume=True))
    for files in (written.files - HELPERS, read.files - HELPERS):
        found = {"distributed" if file.startswith("distributed/") else file for file in files}  # the room counts as one
        assert {"checkpoints/callback.py", "checkpoints/storage.py", "run_state.py", "files.py"} <= found
        assert len(found) <= 8, sorted(found)
