"""Cancels: what follows each of them, event by event, and what it leaves of step and gradients."""

import pytest
import torch
from helpers import (
    CANCELS,
    EPOCH,
    FIT,
    LEVEL_OF,
    TRAIN_BATCH,
    VALIDATE,
    make_dls,
    make_learner,
    notes,
    raising,
    spy,
    weights,
    words,
)
from torch import nn

from learnerkit import (
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
)

# The table of fastai, with our cleanups

UPTO_BACKWARD = words("before_batch after_pred after_loss before_backward")
VALID_ON = [*VALIDATE, "after_epoch", "cleanup_epoch"]
START, END = words("before_fit before_epoch before_train"), words("after_fit cleanup_fit")

TABLE = {
    # (the cancel, the event that raises it in the first batch): the events of an epoch of two batches and one
    (CancelBackwardException, "before_backward"): [
        *START,
        *UPTO_BACKWARD,
        *words("after_cancel_backward after_backward before_step after_step after_batch cleanup_batch"),
        *TRAIN_BATCH,
        *words("after_train cleanup_train"),
        *VALID_ON,
        *END,
    ],
    (CancelStepException, "before_step"): [
        *START,
        *UPTO_BACKWARD,
        *words("after_backward before_step after_cancel_step after_step after_batch cleanup_batch"),
        *TRAIN_BATCH,
        *words("after_train cleanup_train"),
        *VALID_ON,
        *END,
    ],
    (CancelBatchException, "after_pred"): [
        *START,
        *words("before_batch after_pred after_cancel_batch after_batch cleanup_batch"),
        *TRAIN_BATCH,
        *words("after_train cleanup_train"),
        *VALID_ON,
        *END,
    ],
    (CancelBatchException, "before_step"): [
        *START,
        *UPTO_BACKWARD,
        *words("after_backward before_step after_cancel_batch after_batch cleanup_batch"),
        *TRAIN_BATCH,
        *words("after_train cleanup_train"),
        *VALID_ON,
        *END,
    ],
    (CancelTrainException, "after_loss"): [
        *START,
        *words("before_batch after_pred after_loss cleanup_batch after_cancel_train after_train cleanup_train"),
        *VALID_ON,
        *END,
    ],
    (CancelValidException, "before_validate"): [
        *FIT[: FIT.index("before_validate") + 1],
        *words("after_cancel_validate after_validate cleanup_validate after_epoch cleanup_epoch"),
        *END,
    ],
    (CancelEpochException, "before_step"): [
        *START,
        *UPTO_BACKWARD,
        *words("after_backward before_step cleanup_batch cleanup_train after_cancel_epoch after_epoch cleanup_epoch"),
        *END,
    ],
    (CancelFitException, "after_backward"): [
        *START,
        *UPTO_BACKWARD,
        *words("after_backward cleanup_batch cleanup_train cleanup_epoch after_cancel_fit after_fit cleanup_fit"),
    ],
}


@pytest.mark.parametrize(("cancel", "event"), TABLE)
def test_each_cancel_goes_on_where_its_table_says(cancel, event):
    log = []
    learn = make_learner(cbs=[spy(log), raising(event, cancel, order=1)])
    log.clear()
    learn.fit(1)
    assert log == TABLE[cancel, event]


def test_a_cancelled_epoch_is_followed_by_the_next():
    log = []
    learn = make_learner(cbs=[spy(log), raising("before_train", CancelEpochException, order=1)])
    log.clear()
    learn.fit(2)
    cut = words("before_epoch before_train cleanup_train after_cancel_epoch after_epoch cleanup_epoch")
    assert log == ["before_fit", *cut, *EPOCH, *END]


def test_validation_batches_can_be_cancelled_and_validation_ended():
    log = []
    learn = make_learner(
        make_dls(valid=12),
        cbs=[
            spy(log),
            raising("after_pred", CancelBatchException, lambda cb: not cb.training and cb.iter == 0, order=1),
            raising("after_loss", CancelValidException, lambda cb: not cb.training and cb.iter == 1, order=1),
        ],
    )
    log.clear()
    learn.fit(1)
    assert log[log.index("before_validate") : -4] == words("""
        before_validate before_batch after_pred after_cancel_batch after_batch cleanup_batch
        before_batch after_pred after_loss cleanup_batch after_cancel_validate after_validate cleanup_validate
    """)


class Facts(Callback):
    "Notes, at the end of each training batch, whether a step was taken and whether gradients are left."

    order = 1000
    run_valid = False

    def __init__(self):
        super().__init__()
        self.steps, self.grads = [], []

    def before_train(self):
        self._weight = self.model[0].weight.detach().clone()

    def cleanup_batch(self):
        weight = self.model[0].weight
        self.steps.append(not torch.equal(weight, self._weight))
        self.grads.append(weight.grad is not None and bool(weight.grad.any()))
        self._weight = weight.detach().clone()


@pytest.mark.parametrize(
    ("cancel", "event", "stepped", "kept"),
    [
        (None, None, True, False),
        (CancelBackwardException, "before_backward", False, False),  # a step is taken, with no gradients to step along
        (CancelStepException, "before_step", False, False),
        (CancelBatchException, "before_step", False, True),  # that is how gradients accumulate
        (CancelBatchException, "after_backward", False, True),
        (CancelBatchException, "before_backward", False, False),
        (CancelBatchException, "after_step", True, False),
        (CancelBatchException, "after_batch", True, False),
        (CancelTrainException, "before_step", False, True),
        (CancelTrainException, "after_batch", True, False),
        (CancelEpochException, "before_step", False, True),
        (CancelFitException, "before_step", False, True),
        (CancelFitException, "after_step", True, True),
    ],
)
def test_what_a_cancel_leaves_of_step_and_gradients(cancel, event, stepped, kept):
    facts = Facts()
    learn = make_learner(cbs=[facts] + ([raising(event, cancel)] if cancel else []))
    learn.fit(1)
    assert facts.steps[0] is stepped
    assert facts.grads[0] is kept


def test_after_a_cancelled_backward_the_step_is_taken_with_the_gradients_there_are():
    def seed_gradients(cb):
        for p in cb.model.parameters():
            p.grad = torch.ones_like(p)
        raise CancelBackwardException

    learn = make_learner(make_dls(train=4), cbs=Callback(before_backward=seed_gradients))
    before = weights(learn.model)
    learn.fit(1)
    for name, value in learn.model.state_dict().items():
        torch.testing.assert_close(value, before[name] - 0.1)


def test_gradients_kept_by_a_cancelled_batch_join_those_of_the_next():
    whole = make_learner(make_dls(train=8, bs=8), loss_func=nn.MSELoss(reduction="sum"), lr=0.01)
    halves = make_learner(
        make_dls(train=8, bs=4),
        loss_func=nn.MSELoss(reduction="sum"),
        lr=0.01,
        cbs=raising("before_step", CancelBatchException),
    )
    whole.fit(1)
    halves.fit(1)
    for a, b in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cancel", CANCELS)
def test_a_cancel_in_its_own_levels_last_event_just_ends_the_level(cancel):
    log = []
    event = f"after_{LEVEL_OF[cancel]}"
    learn = make_learner(cbs=[spy(log), raising(event, cancel, order=1)])
    log.clear()
    learn.fit(1)
    assert log == FIT


@pytest.mark.parametrize(
    ("cancel", "event"),
    [
        (CancelBatchException, "before_train"),
        (CancelBatchException, "after_epoch"),
        (CancelStepException, "after_loss"),
        (CancelStepException, "before_backward"),
        (CancelBackwardException, "before_step"),
        (CancelTrainException, "before_epoch"),
        (CancelTrainException, "after_validate"),
        (CancelValidException, "after_train"),
        (CancelValidException, "before_batch"),
        (CancelEpochException, "before_fit"),
        (CancelEpochException, "after_fit"),
    ],
)
def test_a_cancel_outside_its_level_escapes(cancel, event):
    log = []
    learn = make_learner(cbs=[spy(log), raising(event, cancel, order=1)])
    log.clear()
    with pytest.raises(cancel) as e:
        learn.fit(1)
    assert type(e.value) is cancel
    place, explained = notes(e.value)
    assert place == f"raised in Callback.{event}"
    assert explained.startswith(f"this event is outside of what {cancel.__name__} ends; what it does: ")
    assert log[-1] == "cleanup_fit"


def test_evaluation_is_cancelled_like_a_fit():
    for cancel, event in [(CancelValidException, "after_loss"), (CancelBatchException, "after_pred")]:
        learn = make_learner(make_dls(valid=8))
        expected = learn.validate()
        assert learn.validate(cbs=raising(event, cancel, lambda cb: cb.iter == 1)) != expected
        assert learn.validate() == expected
