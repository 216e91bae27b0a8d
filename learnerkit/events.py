"""The events of the training loop, their order, and the exceptions that cut it short."""

from enum import StrEnum

from learnerkit.endings import mark

LOOP = """
Learner(...)
    after_create
fit
    before_fit
    for each epoch
        before_epoch
        train
            before_train
            for each batch
                before_batch
                (the model predicts)
                after_pred
                (the loss)
                after_loss
                before_backward
                (the gradients)
                after_cancel_backward    on CancelBackwardException
                after_backward
                before_step
                (the optimizer's step)
                after_cancel_step        on CancelStepException
                after_step
                (the gradients are cleared)
                after_cancel_batch       on CancelBatchException
                after_batch
                cleanup_batch
            after_cancel_train           on CancelTrainException
            after_train
            cleanup_train
        validate
            before_validate
            for each batch, without gradients
                before_batch after_pred after_loss after_batch cleanup_batch as above
            after_cancel_validate        on CancelValidException
            after_validate
            cleanup_validate
        after_cancel_epoch               on CancelEpochException
        after_epoch
        cleanup_epoch
    after_cancel_fit                     on CancelFitException
    after_fit
    cleanup_fit
"""


class Event(StrEnum):  # noqa: D101 - its docstring is LOOP
    # The same text is used by `show_training_loop`, and by a test that compares it with a recorded run.
    __doc__ = f"Every event a callback can listen to, in the order of the loop:\n{LOOP}"

    after_create = "after_create"
    before_fit = "before_fit"
    before_epoch = "before_epoch"
    before_train = "before_train"
    before_batch = "before_batch"
    after_pred = "after_pred"
    after_loss = "after_loss"
    before_backward = "before_backward"
    after_cancel_backward = "after_cancel_backward"
    after_backward = "after_backward"
    before_step = "before_step"
    after_cancel_step = "after_cancel_step"
    after_step = "after_step"
    after_cancel_batch = "after_cancel_batch"
    after_batch = "after_batch"
    cleanup_batch = "cleanup_batch"
    after_cancel_train = "after_cancel_train"
    after_train = "after_train"
    cleanup_train = "cleanup_train"
    before_validate = "before_validate"
    after_cancel_validate = "after_cancel_validate"
    after_validate = "after_validate"
    cleanup_validate = "cleanup_validate"
    after_cancel_epoch = "after_cancel_epoch"
    after_epoch = "after_epoch"
    cleanup_epoch = "cleanup_epoch"
    after_cancel_fit = "after_cancel_fit"
    after_fit = "after_fit"
    cleanup_fit = "cleanup_fit"


INNER_EVENTS = tuple(e for e in Event if "_batch" in e or e.endswith(("_pred", "_loss", "_backward", "_step")))
"""The events of one batch: only for these do a callback's `run_train` and `run_valid` matter."""


class CancelException(Exception):
    """Base of the exceptions by which a callback cuts the loop short; never raised itself.

    Args:
        agreed: every rank raises this cancel at the same place, so they need not tell each other of it first.
    """

    def __init__(self, *args: object, agreed: bool = False) -> None:
        super().__init__(*args)
        if agreed:
            mark(self, agreed=True)


class FitDone(CancelException):
    """Ends a fit that an earlier process has done: at the end of `before_fit`, and without `after_fit`."""


class CancelBatchException(CancelException):
    """Skip the rest of this batch: `after_cancel_batch`, `after_batch`. Gradients made so far are kept."""


class CancelBackwardException(CancelException):
    """Skip the backward pass: `after_cancel_backward`, `after_backward`; the step is still taken."""


class CancelStepException(CancelException):
    """Skip the optimizer's step: `after_cancel_step`, `after_step`; gradients are cleared."""


class CancelTrainException(CancelException):
    """End this epoch's training: `after_cancel_train`, `after_train`; validation follows."""


class CancelValidException(CancelException):
    """End this epoch's validation: `after_cancel_validate`, `after_validate`."""


class CancelEpochException(CancelException):
    """End this epoch: `after_cancel_epoch`, `after_epoch`; the next one follows."""


class CancelFitException(CancelException):
    """End the fit: `after_cancel_fit`, `after_fit`."""
