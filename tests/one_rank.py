"""What one rank does and others do not, and a fit in which it happens."""

import time

from learnerkit import Callback, distributed
from learnerkit.events import INNER_EVENTS

LAST = distributed.world_size() - 1


class Do(Callback):
    """Does something once, on the last rank or some, at an event: of the second batch of the first epoch, if of one."""

    def __init__(self, event, action, ranks=(LAST,), training=True, order=0, at=1):
        super().__init__(order=order, **{event: lambda self: self.act()})
        self.event, self.action, self.ranks, self.done = event, action, ranks, False
        self.place = (training, 0, at)

    def act(self):
        learn = self.learn
        if self.done or distributed.rank() not in self.ranks:
            return
        if self.event in INNER_EVENTS and (learn.training, learn.epoch, learn.iter) != self.place:
            return
        self.done = True
        self.action()


def throw(error):
    """What raises an error when it is called."""

    def action():
        raise error

    return action


def fit(learn, epochs=2, **options):
    """(error or None, seconds) of a fit on all ranks."""
    start, error = time.monotonic(), None
    try:
        with learn.distrib_ctx(**options), learn.no_logging(), learn.no_bar():
            learn.fit(epochs)
    except (Exception, KeyboardInterrupt) as e:
        error = e
    return error, time.monotonic() - start
