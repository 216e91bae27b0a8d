"""Data, in three parts: the structure of a batch, the order of the samples, and the display of data.

The structure of a batch:

- loaders.py has the loaders of a Learner, and splits a batch into inputs and targets.
- batches.py walks through nested batches, counts their samples, moves and joins them.
- cuts.py cuts a batch along the dimension of its samples.

The order of the samples:

- stream.py is the index stream of a loader: from a position on, for a rank, with the random numbers of an epoch.
- order.py has the generators and samplers that decide the order of an epoch, and copies of loaders in another order.
- position.py is the position in the data that a fit has reached; iterable.py is the same for data without an index.
- rows.py reads whole batches of tensors; lengths.py puts samples of similar length together.
- weights.py draws by class; parts.py chooses the rows to validate on.

The display of data: show.py.
"""

from learnerkit.data.loaders import DataLoaders

__all__ = ["DataLoaders"]
