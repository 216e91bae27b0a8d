"""The record that goes with an exported model: what a learner needs to know to predict with it, as JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor

from learnerkit.files import CheckpointError
from learnerkit.losses import ACTIVATIONS, DECODINGS, name_for, rules
from learnerkit.state import Learner
from learnerkit.utils import unwrap

KEY = "learnerkit.export"
"""The name under which a file has the record."""

VERSION = 1


class NotExported:
    """Stands for the loss of an exported model: it decodes predictions, and nothing can be computed with it.

    Args:
        decoding, probabilities: as in `Facts`.
    """

    def __init__(self, decoding: str | None, probabilities: str | None) -> None:
        self.decoding, self.probabilities = decoding, probabilities
        if decoding is not None:
            self.decode = DECODINGS[decoding]
        if probabilities is not None:
            self.activation = ACTIVATIONS[probabilities]

    def __call__(self, *args: Any, reduction: str = "none") -> Tensor:
        raise ValueError("the learner was loaded without a loss: load_learner(..., loss_func=...) gives it one")


@dataclass(frozen=True)
class Facts:
    """The record.

    Args:
        model: the name of the model's class, for messages alone.
        decoding: the name in `losses.DECODINGS` of the rule that decodes predictions; `None`: a file cannot say it.
        probabilities: the name in `losses.ACTIVATIONS` of the rule that makes probabilities of them, or `None`.
        own_loss: the model makes its own loss.
        inputs: the names of the inputs, where batches are mappings.
        classes, n_inp, target_keys, ignore_keys, preprocessing: as in `DataLoaders`.
        version: of this format.
    """

    model: str
    decoding: str | None = None
    probabilities: str | None = None
    own_loss: bool = False
    inputs: list[str] | None = None
    classes: list[Any] | None = None
    n_inp: int | None = None
    target_keys: list[str] | None = None
    ignore_keys: list[str] | None = None
    preprocessing: Mapping[str, Any] | None = None
    version: int = VERSION

    def as_json(self) -> str:
        """Return the record as text.

        Raises:
            TypeError: `preprocessing` has something in it that JSON does not know.
        """
        try:
            return json.dumps(asdict(self))
        except TypeError as e:
            raise TypeError(f"dls.preprocessing is stored as JSON, with which it does not go: {e}") from None


_TYPES = {
    name: tuple(get_origin(kind) or kind for kind in get_args(hint) or [hint])
    for name, hint in get_type_hints(Facts).items()
}


def facts_of(learn: "Learner", inputs: Iterable[str] | None = None) -> Facts:
    """Make the record of a learner; `inputs`: the names of the inputs, where batches are mappings."""
    dls, loss_func = learn.dls, learn.loss_func
    classes = None if dls.classes is None else [_plain(name) for name in dls.classes]
    decodes, activates = _rules(loss_func, classes)
    return Facts(
        model=type(unwrap(learn.model)).__name__, decoding=decodes, probabilities=activates,
        own_loss=loss_func is None, inputs=None if inputs is None else list(inputs), classes=classes, n_inp=dls.n_inp,
        target_keys=list(dls.target_keys), ignore_keys=list(dls.ignore_keys), preprocessing=dls.preprocessing,
    )  # fmt: skip


def _rules(loss_func: Any, classes: Any) -> tuple[str | None, str | None]:
    "Return the names of the rules that decode predictions and that make probabilities of them."
    if isinstance(loss_func, NotExported):
        return loss_func.decoding, loss_func.probabilities
    if loss_func is None:  # the rules of `Learner.predict`
        return ("argmax", "softmax") if classes is not None else (None, None)
    decodes, activates = rules(loss_func)  # No file has code.
    return name_for(loss_func, decodes, DECODINGS), name_for(loss_func, activates, ACTIVATIONS)


def _plain(name: Any) -> Any:
    if isinstance(name, np.generic) or (isinstance(name, Tensor) and name.ndim == 0):
        name = name.item()
    return name if isinstance(name, str | int | float | bool | None) else str(name)


def read_facts(text: str | None, file: Any) -> Facts:
    """Read the record from its text; names in it are compared and shown, and never looked up.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a later version.
    """
    if text is None:
        raise CheckpointError(
            f"{file} has no record of learn.export. Weights alone are read by learn.load, into a learner with its model"
        )
    try:
        values = json.loads(text)
        if values["version"] > VERSION:
            raise CheckpointError(
                f"{file} was exported by a later learnerkit, in version {values['version']} of the format; this one "
                f"reads up to {VERSION}: update it"
            )
        for name in ("ignore_keys", "probabilities"):
            values.setdefault(name, None)  # Older files lack these.
        facts = Facts(**{each.name: values[each.name] for each in fields(Facts)})
        wrong = [name for name, kinds in _TYPES.items() if not isinstance(vars(facts)[name], kinds)]
        names = [*(facts.target_keys or ()), *(facts.ignore_keys or ()), *(facts.inputs or ())]
        known = facts.decoding in (None, *DECODINGS) and facts.probabilities in (None, *ACTIVATIONS)
        if wrong or not known or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{', '.join(wrong) or 'decoding, probabilities, or a name,'} is of another kind")
    except CheckpointError:
        raise
    except Exception as e:
        raise CheckpointError(f"{file}: its record of learn.export is damaged: {type(e).__name__}: {e}") from e
    return facts
