"""Augmentation of whole batches on the device; each callback has its own stream of random numbers."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from learnerkit import arguments, distributed
from learnerkit.callback import Callback, running
from learnerkit.data.rows import draw_seed
from learnerkit.distributed import seeds
from learnerkit.losses import no_loss
from learnerkit.utils import overrides, owner_of, replaced, spanned_devices
from learnerkit.values import describe


class _Drawing(Callback):
    """Draws random numbers from its own stream in each batch, so that all others are as they would be without it.

    In training they depend on the seed of the epoch's sample order, the fit, the step and the rank alone, so that a
    resumed run draws the same again. In evaluation each reading of the data begins where the global generator is.
    """

    def __init__(self) -> None:
        self._seeds: dict[bool, int] = {}  # by whether the learner trains
        self._outer: list[int] = []  # those of the evaluations that others have interrupted

    def before_train(self) -> None:
        learn = self.learn
        position = learn._position
        seed = torch.initial_seed() if position is None else position.seed()
        self._seeds[True] = seeds.mixed_seed(seed, learn.n_fits, learn.epoch)

    def before_validate(self) -> None:
        self._outer.append(self._seeds.get(False, 0))
        if self.run_valid:
            self._seeds[False] = draw_seed()  # A fit restores the generator afterwards.

    def cleanup_validate(self) -> None:
        self._seeds[False] = self._outer.pop()

    def _seed(self, *more: Any) -> int:
        "Return the seed of this batch on this rank."
        learn = self.learn
        rank = distributed.rank() if learn.n_ranks > 1 else 0
        return seeds.mixed_seed(self._seeds.get(learn.training, 0), learn.iter, rank, *more)

    def _stream(self) -> AbstractContextManager:
        "Return a context in which this callback draws from its own stream."
        others = [cb for cb in self.learn.cbs if isinstance(cb, _Drawing)]
        return seeds.own_stream(self._seed(others.index(self)), self.learn.dls.device)


class BatchTransform(_Drawing):
    """Transforms the inputs of whole batches on the device: an augmentation, or a normalisation.

    Its draws from torch's generators, on the host and on the device, come from its own stream: all other random numbers
    are those of a fit without it, ranks draw different ones, and a resumed fit draws the same ones.

    Args:
        fn: f(x) -> x, such as a transform of `torchvision.transforms.v2`, on the first of the inputs. A module is moved
            to the loaders' device, as the model is.
        train: apply it in training.
        valid: apply it in validation and prediction.
        with_targets: call f(x, y) -> (x, y) instead; `y` is a tuple if there are several targets.

    Raises:
        TypeError: `fn` is no function.
        ValueError: a function that returns None, or, with `with_targets`, no pair, or a batch without targets.
    """

    order = -3  # before mixing, and before other callbacks see the batch

    def __init__(
        self, fn: Callable[..., Any], train: bool = True, valid: bool = False, with_targets: bool = False
    ) -> None:
        super().__init__()
        if not callable(fn) or isinstance(fn, type):
            raise TypeError(f"got fn={fn!r}; it is a function of a batch of inputs, such as v2.RandomHorizontalFlip()")
        self.fn = fn
        self.run_train = train
        self.run_valid = valid
        self.with_targets = with_targets

    def before_train(self) -> None:
        super().before_train()
        self._move()

    def before_validate(self) -> None:
        super().before_validate()
        self._move()

    def _move(self) -> None:
        "Move a module with buffers, such as the filters of a spectrogram."
        if isinstance(fn := owner_of(self.fn), nn.Module) and not spanned_devices(fn):
            fn.to(self.learn.dls.device)

    def before_batch(self) -> None:
        learn = self.learn
        if not learn.batch_size:  # a rank without data in this step
            return
        first, *rest = learn.xb
        with self._stream():
            if not self.with_targets:
                x = self.fn(first)
                if x is None:
                    raise ValueError(f"{self.fn} returned None; BatchTransform needs the new inputs")
                learn.xb = (x, *rest)
                return
            if not learn.yb:
                raise ValueError("BatchTransform(with_targets=True): the batches have no targets")
            result = self.fn(first, learn.y)
        if not isinstance(result, tuple | list) or len(result) != 2:  # kornia's augmentations return a list
            raise ValueError(f"{self.fn} returned {describe(result)}; BatchTransform(with_targets=True) needs (x, y)")
        before, (x, y) = learn.yb, result
        targets = (y,) if len(before) == 1 else y
        if not isinstance(targets, tuple | list) or len(targets) != len(before):
            raise ValueError(
                f"{self.fn} returned {describe(y)} as y; BatchTransform(with_targets=True) needs a tuple of "
                f"{len(before)}, as many targets as the batches have"
            )
        learn.yb = tuple(targets)
        # A model that makes its own loss has its targets among the inputs.
        new = {id(old): each for old, each in zip(before, targets, strict=True)}
        if isinstance(x, Mapping):
            x = {name: new.get(id(part), part) for name, part in x.items()}
        learn.xb = (x, *(new.get(id(other), other) for other in rest))


class _Mixing(_Drawing):
    """Mixes each sample of a batch with another one, and the losses of their two targets alike.

    Args:
        kind: the class of `torchvision.transforms.v2` that mixes.
        alpha: the parameter of the Beta distribution of the shares.
    """

    order = -2  # after `BatchTransform`; the losses are mixed before other callbacks change them
    run_valid = False
    reads_predictions = True  # DataParallelCallback gathers them, as the loss is computed twice.

    def __init__(self, kind: str, alpha: float) -> None:
        super().__init__()
        arguments.check_number("alpha", alpha, lambda a: 0 < a < math.inf, "a number above 0, and finite")
        from torchvision.transforms import v2

        self.alpha = alpha
        self._mix = getattr(v2, kind)(alpha=float(alpha))  # its distribution has none for whole numbers
        self._place = (0, 1)  # its index among the callbacks of this kind, and their number
        self._mixed: tuple[Tensor, Tensor] | None = None  # a sample's own share, and the other sample's index
        self._others: tuple = ()  # the other samples' targets

    def before_fit(self) -> None:
        learn = self.learn
        if learn.loss_func is None and not overrides(learn, "_loss"):
            raise ValueError(
                f"{self!r} mixes the losses of two targets, and this model makes its own loss from the batch: give "
                "the Learner a loss_func, or mix in the model"
            )

    def before_train(self) -> None:
        super().before_train()
        mixing = running(self.learn.cbs, _Mixing)
        self._place = mixing.index(self), len(mixing)

    def before_batch(self) -> None:
        learn, (place, of) = self.learn, self._place
        self._mixed = None
        if learn.batch_size < 2 or (of > 1 and self._seed() % of != place):
            return
        x = self._only_input()
        # The labels are the samples' numbers. What comes back says who was mixed with whom, and how much of each.
        own = torch.eye(len(x), device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        images = x if x.ndim == 4 else x.reshape(len(x), -1, 1, 1)
        with self._stream():
            images, shares = self._mix(images, own)
        learn.xb = (images.view_as(x),)
        share = shares[0, 0].clone()
        self._mixed = share, shares.fill_diagonal_(-1).argmax(1)

    def _only_input(self) -> Tensor:
        learn = self.learn
        x = learn.xb[0]
        if len(learn.xb) > 1 or not isinstance(x, Tensor) or not x.is_floating_point() or len(x) != learn.batch_size:
            raise ValueError(
                f"{self!r} mixes one floating-point tensor of inputs with a row for each sample, and the inputs are "
                f"{describe(learn.xb)}; convert them (BatchTransform does it on the device), or mix in the model, for "
                "instance behind its embedding"
            )
        return x

    def after_pred(self) -> None:
        if self._mixed is None:
            return
        learn, (_, other) = self.learn, self._mixed
        if not learn.yb:
            raise no_loss(learn)
        if not all(isinstance(y, Tensor) and y.ndim and len(y) == learn.batch_size for y in learn.yb):
            raise ValueError(
                f"{self!r} mixes the losses of two samples' targets, and needs targets that are tensors with a row for "
                f"each sample; they are {describe(learn.yb)}"
            )
        self._others = tuple(y[other] for y in learn.yb)

    def after_loss(self) -> None:
        if self._mixed is None:
            return
        learn, (share, _) = self.learn, self._mixed
        loss = learn.loss
        loss_grad = learn.loss_grad
        with replaced(learn, yb=self._others):
            learn._loss()
        learn.loss = share * loss + (1 - share) * learn.loss
        learn.loss_grad = share * loss_grad + (1 - share) * learn.loss_grad

    def cleanup_train(self) -> None:
        self._mixed, self._others = None, ()  # A cancelled batch has left them.


class MixUp(_Mixing):
    """Trains on weighted means of two samples, and the same means of their losses (Zhang et al., arXiv:1710.09412).

    Batches are mixed by `torchvision.transforms.v2.MixUp`, with one share for a batch, drawn from Beta(alpha, alpha).
    The loss is share * loss(pred, y) + (1 - share) * loss(pred, y of the other sample): for a cross-entropy without
    class weights the one with soft targets, and it is defined for every loss that is a mean over samples. Targets stay
    hard, so metrics on training batches are those of the sample with the share. It acts in training alone. With several
    callbacks of this kind (`cbs=[MixUp(), CutMix()]`) one of them acts in each batch, each as often as the others.

    Args:
        alpha: the larger, the more evenly samples are mixed; 1: all shares are equally likely.

    Raises:
        ValueError: `alpha` is not above 0; in a fit, a model that makes its own loss, inputs that are not one
            floating-point tensor, or targets that are not tensors.
    """

    def __init__(self, alpha: float = 0.4) -> None:
        super().__init__("MixUp", alpha)


class CutMix(_Mixing):
    """Pastes a rectangle of another image into each, and mixes their losses by area (Yun et al., arXiv:1905.04899).

    Batches are mixed by `torchvision.transforms.v2.CutMix`; the inputs are images (n, channels, height, width). All
    else is as in `MixUp`.

    Args:
        alpha: the share of the image's area that stays is drawn from Beta(alpha, alpha).

    Raises:
        ValueError: as `MixUp`; also inputs that are not images, and targets with a value for each pixel.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__("CutMix", alpha)

    def _only_input(self) -> Tensor:
        x = super()._only_input()
        dense = [y for y in self.learn.yb if isinstance(y, Tensor) and y.ndim > 2 and y.shape[-2:] == x.shape[-2:]]
        if x.ndim != 4 or dense:
            raise ValueError(
                f"CutMix pastes rectangles of images (n, channels, height, width) that have one target each; the "
                f"inputs are {describe(x)}, the targets {describe(self.learn.yb)}: take MixUp"
            )
        return x
