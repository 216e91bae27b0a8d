"""Marks of the functions that every rank must reach. They change nothing: a reader sees them, and a test reads them."""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def collective(function: F) -> F:
    """Mark a function that every rank must reach, in the same order as others: in it ranks wait for each other.

    A function that calls one is one, too, or says by `not_collective` why it is none: `tests/test_architecture.py`
    checks it. Some wait only at times, such as where the model is divided among the ranks.
    """
    return function


def not_collective(why: str) -> Callable[[F], F]:
    """Mark a function that calls a `collective` and that not every rank need reach.

    Args:
        why: the reason, for the reader.
    """
    return lambda function: function
