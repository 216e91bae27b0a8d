"""Data: loaders, batches, and the order in which samples are drawn."""

from learnerkit.data.loaders import DataLoaders

__all__ = ["DataLoaders"]
