"""What travels between the kernel and its workers, tried in one process: copies there, changes back."""

from dataclasses import dataclass, field

import torch
from torch import nn

from learnerkit.notebook import pickling, transfer


@dataclass
class Holder:
    """Stands for a callback."""

    model: nn.Module
    weights: list
    notes: dict = field(default_factory=dict)


@dataclass(slots=True)
class Range:
    """Stands for an object without a dictionary."""

    low: float
    high: float = 0.0


def sent(*objects, known=()):
    """The objects as they are read from a file, and the list of all that the pickler has met."""
    pickler = pickling.make_pickler(pickling.numbered(known))
    pickler.lists = True
    pickler.dump(objects)
    pickler.lists = False
    pickler.dump(pickler.met)
    file, path = pickler.save()
    with file:
        return *pickling.read(path, list(known), 2, mapped=True), pickler.met


def test_tensors_and_objects_that_are_one_stay_one():
    model = nn.Linear(3, 2)
    model.weight.tag = "its own"
    view = model.bias.detach()[1:]
    (holder, again, part), there, here = sent(Holder(model, [model.weight]), model, view)
    assert holder.model is again is not model
    assert holder.weights[0] is again.weight
    assert isinstance(again.weight, nn.Parameter)
    assert (again.weight.requires_grad, again.weight.tag, part.requires_grad) == (True, "its own", False)
    assert len(here) == len(there)
    assert there[[x is model for x in here].index(True)] is again
    with torch.no_grad():
        again.bias[1] = 7.0
    assert part.item() == 7.0
    assert model.bias[1] != 7.0


def test_what_the_reader_has_already_is_its_own():
    model, lock = nn.Linear(3, 2), object()
    (holder, found), _, _ = sent(Holder(model, []), lock, known=[model, lock])
    assert holder.model is model
    assert found is lock


def test_changes_are_what_is_another_object_by_then_and_what_can_change_in_place():
    holder = Holder(nn.Linear(3, 2), [1], {"kept": 1, "removed": 2, "replaced": "a"})
    objects = [holder, holder.notes, holder.weights, Range(1.0)]
    before = [transfer._contents(x) for x in objects]
    holder.notes |= {"replaced": "b", "new": 3}
    del holder.notes["removed"]
    holder.model = None
    objects[3].high = 2.0
    assert sorted(transfer._changes(objects, before), key=str) == [
        (0, "model", None), (1, "new", 3), (1, "removed", transfer.Removed), (1, "replaced", "b"), (2, "items", [1]),
        (3, "high", 2.0),
    ]  # fmt: skip


def test_values_are_copied_into_memory_that_a_tensor_has_alone():
    alone, whole = torch.zeros(4), torch.zeros(4)
    seen, part = alone.view(2, 2), whole[:2]
    transfer._set_data(alone, torch.arange(4.0), alone=True)
    assert seen.flatten().tolist() == [0, 1, 2, 3]
    transfer._set_data(part, torch.ones(2), alone=False)
    assert (part.tolist(), whole.tolist()) == ([1, 1], [0, 0, 0, 0])
    transfer._set_data(alone, torch.ones(3, dtype=torch.float64, requires_grad=True), alone=True)
    assert (alone.tolist(), alone.dtype, alone.requires_grad) == ([1, 1, 1], torch.float64, True)
