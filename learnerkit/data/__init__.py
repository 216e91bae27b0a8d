"""Data, in three parts: what a batch is, who reads which sample, and how data are shown.

What a batch is:

- loaders.py has the loaders of a Learner, and splits a batch into inputs and targets.
- batches.py walks through nested batches, counts their samples, moves and joins them.
- cuts.py cuts a batch along the dimension of its samples.

Who reads which sample:

- stream.py is the stream of a loader's indices: from a place on, for a rank, with the random numbers of an epoch.
- order.py has what decides the order of an epoch, and copies of loaders with another order.
- position.py is the place in the data that a fit has come to; iterable.py is the same for data without an index.
- rows.py reads whole batches of tensors; lengths.py puts samples of similar length together.
- weights.py draws by class; parts.py chooses the rows to validate on.

How data are shown: show.py.
"""

from learnerkit.data.loaders import DataLoaders

__all__ = ["DataLoaders"]
