"""Requests to a run from outside, by signals."""

SAVE, INTERRUPT, END = 1, 2, 3


class Request:
    """A request to a run from outside: to save, to save and raise KeyboardInterrupt, or to save and leave.

    Attributes:
        mine: the request to this rank: 0, `SAVE`, `INTERRUPT` or `END`.
        agreed: the request that all ranks know of, at the same place of the loop.
        since: the time at which this rank got `mine`, on the monotonic clock.
        heard: a callback acts on requests, so Ctrl-C can wait for it.
        failed: a rank has failed, so that nothing can be saved any more: SIGTERM ends this process at once.
    """

    def __init__(self) -> None:
        self.mine = self.agreed = 0
        self.since = 0.0
        self.heard = self.failed = False

    def ask(self, what: int) -> None:
        """Request something, unless a stronger request is pending."""
        self.mine = max(self.mine, what)

    def clear(self) -> None:
        """Forget the request; it has been served."""
        self.mine = self.agreed = 0
