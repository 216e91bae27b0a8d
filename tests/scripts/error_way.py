"""Two processes, of which rank 1 raises in a hook or in its model: which files of the package its error passes.

This is the script of the ranks, and without a rank's environment the launcher itself. Rank 1 notes the files from the
`raise` until its report is written, and the launcher from reading that report to the first line that it prints of it.
Each prints its part.

A file counts if a function in it is called. What puts things back is no part of the error's way, and is left out with
all that it calls: the cleanups of callbacks (`Dispatch.__exit__`), and what the contexts around a run and its batches
do at their end (`PUT_BACK`); so is what the launcher writes into the files for other programs. Nor does a generator
that is only closed or left, or what the launcher reads of the other rank.
"""

import dis
import inspect
import json
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import learnerkit

PACKAGE = f"{Path(learnerkit.__file__).parent}/"

put_back: set[Any] = set()  # the code of functions
seen: set[str] = set()
paused: list[FrameType] = []


def look_until(last: str) -> None:
    """Note the files from here to the end of a function, and print them."""

    def look(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if event == "call" and not paused:
            if code in put_back:
                paused.append(frame)
            elif begins(frame):
                seen.add(code.co_filename.removeprefix(PACKAGE))
        elif event == "return" and frame in paused:
            paused.clear()
        elif event == "return" and code.co_name == last:
            sys.setprofile(None)
            print(f"passed: {json.dumps(sorted(seen))}", flush=True)

    sys.setprofile(look)


def begins(frame: FrameType) -> bool:
    """Tell whether a function begins: a generator may also go on, or be left by an error."""
    i, code = frame.f_lasti, frame.f_code.co_code
    return i < 0 or (dis.opname[code[i]], code[i + 1]) == ("RESUME", 0)


def train(place: str, kind: str) -> None:
    """Train until rank 1 fails in its third batch."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from learnerkit import Callback, DataLoaders, Learner
    from learnerkit.callback import Dispatch, kept_flags
    from learnerkit.callbacks.training import TrainEvalCallback
    from learnerkit.data.stream import reading
    from learnerkit.optim import no_gradients_left
    from learnerkit.processes.heartbeat import Heartbeat
    from learnerkit.utils import training_modes

    PUT_BACK = (
        Dispatch.__exit__, Dispatch.close, kept_flags, Learner.added_cbs, Learner._part, training_modes, reading,
        no_gradients_left, Heartbeat.close, Heartbeat.phase, TrainEvalCallback.note_modes,
    )  # fmt: skip
    put_back.update(inspect.unwrap(function).__code__ for function in PUT_BACK)
    error = {"ValueError": ValueError, "RuntimeError": RuntimeError}[kind]("the cause")
    due: list[str] = []

    def fail_in(here: str) -> None:
        if here in due:
            look_until("write_report")
            raise error

    class Fails(Callback):
        def before_batch(self) -> None:
            due.extend([place] if self.iter == 2 and os.environ["RANK"] == "1" else [])
            fail_in("hook")

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            fail_in("model")
            return super().forward(x)

    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    learn = Learner(DataLoaders.from_datasets(data, bs=4, device="cpu"), Model(4, 1), nn.MSELoss(), lr=0.1)
    with learn.distrib_ctx():
        learn.fit(1, cbs=Fails())


def launch() -> int:
    """Launch this script, and return the exit code."""
    from learnerkit.launch import cli, events, supervise
    from learnerkit.processes.heartbeat import Heartbeat

    put_back.add(Heartbeat.close.__code__)
    followed = events.LaunchEvents
    put_back.update(function.__code__ for function in (followed.hearing, followed.outcome, followed.signal))
    put_back.update(code for code in followed.hearing.__code__.co_consts if isinstance(code, CodeType))
    record_end = supervise.record_end

    def record(rank: Any) -> None:
        before = sys.getprofile()
        sys.setprofile(None)
        if rank.number == 1:
            look_until("say")
        record_end(rank)
        if rank.number != 1:
            sys.setprofile(before)

    supervise.record_end = record
    return cli.main(["--nproc", "2", __file__, *sys.argv[1:]])


if "RANK" in os.environ:
    train(*sys.argv[1:])
else:
    sys.exit(launch())
