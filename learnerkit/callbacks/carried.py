"""A state that a model carries from one batch to the next, such as that of a recurrent network."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from learnerkit import distributed
from learnerkit.callback import Callback
from learnerkit.data.batches import to_device
from learnerkit.data.cuts import cut_rows, even_spans, join_rows, map_rows, parted, row_counts, rows_in
from learnerkit.state import State
from learnerkit.utils import itself, unwrap
from learnerkit.values import describe, map_batch


class CarriedState(Callback):
    """Carries a model's state from each batch to the next, as truncated backpropagation through time does.

    Subclass it, and say by `start` what the state is for rows that begin: `forward(x, state)` then gets the state
    after its inputs, or as the keyword `state` if it takes keywords, and returns `(prediction, new_state)`.
    `learn.pred` is the prediction alone. The new state, detached, is for the next batch, whose row i goes on where row
    i of this one has ended. So all batches of an epoch have as many rows. A subclass may have further hooks; in
    those that this class has, it calls `super()`'s.

    Training resets the state in each epoch; validation and prediction have a separate state, which starts fresh.
    Checkpoints have the state: a run goes on with it in the middle of an epoch. Several processes need
    `split_batches=True`, by which each of them has the same rows of every batch, or `sharded=True`, by which each has
    separate batches. If a run is resumed on another number of processes, the rows are redistributed.

    The method is described by Williams and Peng 1990 (https://doi.org/10.1162/neco.1990.2.4.490).

    Args:
        dim: the dimension of the rows in the tensors of a state, 1 for those of `nn.LSTM`, which are (layers, rows,
            features). A tensor that does not have it belongs to all rows.
        reset: 'epoch': reset the state when the training of an epoch begins; 'never': only by `restart`, so that a
            state also outlives its fit.

    Raises:
        ValueError: another `dim` or `reset`; during a fit, a batch that has other rows than the state, a model that
            returns something else, or processes that share the batches out among themselves.
    """

    order = 12  # behind what wraps the model, and what gives a rank its loader

    def __init__(self, dim: int = 0, reset: str = "epoch") -> None:
        if type(dim) is not int or dim < 0:
            raise ValueError(f"got dim={dim!r}; it is the dimension of the rows in the tensors of a state: 0, 1, ...")
        if reset not in ("epoch", "never"):
            raise ValueError(f"got reset={reset!r}; it takes 'epoch' or 'never'")
        self.dim, self.reset = dim, reset
        self._state: Any = None  # the state before the batch; `None`: that of `start`
        self._new: list = []  # the state after the batch, once its forward pass is over
        self._gave = False  # whether the forward pass got a state
        self._outer: list[tuple[Any, list]] = []  # the states that validations have interrupted
        self._hooks = ExitStack()

    def start(self, n: int) -> Any:
        """Return the state of rows that begin: a tensor, or nested tuples, lists and dicts of tensors.

        Args:
            n: how many rows.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method `start`: let it return the state of n rows that begin, such as "
            "torch.zeros(n, 64)"
        )

    def restart(self, rows: Tensor | None = None) -> None:
        """Reset the state of all rows, or of those whose episode has ended.

        Before the forward pass this resets the state that the batch begins with, and after it the state that the next
        batch begins with.

        Args:
            rows: a mask of shape (rows,) of this process, True for rows to reset.
        """
        state = self._new[0] if self._new else self._state
        if rows is None or state is None:
            state = None
        else:
            fresh, begins = iter(rows_in(self._begun(len(rows)), self.dim)), rows.to(self.learn.dls.device)

            def put(old: Tensor, dim: int, place: tuple) -> Tensor:
                return torch.where(begins.view(-1, *(1,) * (old.ndim - dim - 1)), next(fresh), old)

            state = map_rows(put, state, self.dim, itself)
        if self._new:
            self._new = [state]
        else:
            self._state = state

    # Whose state it is

    def before_fit(self) -> None:
        model = self.learn.model
        if isinstance(model, nn.DataParallel):
            raise ValueError(
                f"{self!r} has one state for each process, and DataParallelCallback cuts batches for several devices "
                "of one: use a process for each device, learn.distrib_ctx(split_batches=True)"
            )
        bare = unwrap(model)
        self._hooks = ExitStack()
        self._hooks.callback(bare.register_forward_pre_hook(self._give, with_kwargs=True).remove)
        self._hooks.callback(bare.register_forward_hook(self._take).remove)

    def cleanup_fit(self) -> None:
        self._hooks.close()

    def before_train(self) -> None:
        self._check_ranks()
        if self.reset == "epoch":
            self._state = None
        self._new = []

    def before_validate(self) -> None:
        self._outer.append((self._state, self._new))
        self._state, self._new = None, []
        self._check_ranks()

    def cleanup_validate(self) -> None:
        self._state, self._new = self._outer.pop()

    def _check_ranks(self) -> None:
        dl: Any = self.learn.dl
        if self.learn.n_ranks > 1 and dl.per_step > 1 and not getattr(dl, "sharded", False):
            raise ValueError(
                f"{self!r} carries a state from batch to batch, but the processes take the batches in turn, so that "
                "none of them has two in a row: use distrib_ctx(split_batches=True), or sharded=True if each process "
                "reads data of its own"
            )

    # A batch

    def _give(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        # A callback may call the model itself, with another state.
        self._gave = "state" not in kwargs and (not args or len(args) == len(self.learn.xb))
        if not self._gave:
            return None
        state = self._before(args, kwargs)
        return ((*args, state), kwargs) if args else (args, kwargs | {"state": state})

    def _before(self, args: tuple, kwargs: dict) -> Any:
        "Return the state that a forward pass begins with; a batch may have several passes, as with a closure."
        learn, n = self.learn, self.learn.batch_size
        if not n:  # This rank has no rows in this step, or a stand-in sample.
            counts = row_counts(args or (kwargs,), parted(learn.dls.batch_dim, (), len(args), 0)[0])
            return self._begun(next(iter(counts.values()), 0))
        if self._state is None:
            self._state = self._begun(n)
        self._check_rows(self._state, "the state that is carried")
        return self._state

    def _take(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if not self._gave:
            return output
        if not isinstance(output, tuple | list) or len(output) != 2:
            raise ValueError(
                f"the model returned {describe(output)}; with {self!r} it returns a pair, (prediction, new_state)"
            )
        pred, state = output
        if self.learn.batch_size:
            self._check_rows(state, "the state that the model returned")
            self._new = [map_batch(Tensor.detach, state)]
        return pred

    def after_batch(self) -> None:
        if self._new:
            self._state = self._new.pop()

    def _begun(self, n: int) -> Any:
        return to_device(self.start(n), self.learn.dls.device)

    def _check_rows(self, state: Any, what: str) -> None:
        n = self.learn.batch_size
        for t in rows_in(state, self.dim):
            if t.shape[self.dim] != n:
                raise ValueError(
                    f"{what} has {t.shape[self.dim]} rows, and the batch {n}: row i of a batch goes on where row i of "
                    "the one before has ended, so all batches have as many rows (drop_last=True leaves a last, smaller "
                    f"one out). They are counted in dimension {self.dim} of the state's tensors, by "
                    f"{self!r}(dim={self.dim})"
                )

    # Checkpoints

    def state_dict(self) -> State:
        """Return the state of this rank's rows."""
        return {"own": {"state": self._state}}

    def load_state_dict(self, state: State) -> None:
        """Restore the state; on another number of ranks, take this rank's rows of all states."""
        if "ranks" in state:
            known = [own["state"] for own in state["ranks"] if own["state"] is not None]
            mine = self._recut(join_rows(known, self.dim)) if known else None
        else:
            mine = state["own"]["state"]
        self._state, self._new = to_device(mine, self.learn.dls.device), []

    def _recut(self, whole: Any) -> Any:
        "Return this rank's rows of a state that has the rows of all ranks."
        if self.learn.n_ranks == 1:
            return whole
        total = next((t.shape[self.dim] for t in rows_in(whole, self.dim)), 0)
        return cut_rows(whole, self.dim, *even_spans(total, distributed.world_size(), 1)[distributed.rank()])
