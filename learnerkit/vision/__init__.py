"""Networks for images: `classifier.py` makes a classifier of a known network, with weights or without."""

from learnerkit.vision.classifier import (
    IMAGENET_STATS,
    ConcatPool,
    MethodBody,
    Normalize,
    create_head,
    split_layers,
    vision_learner,
)

__all__ = [
    "IMAGENET_STATS", "ConcatPool", "MethodBody", "Normalize", "create_head", "split_layers", "vision_learner",
]  # fmt: skip
