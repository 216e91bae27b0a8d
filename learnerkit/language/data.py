"""Texts with their classes, or texts for a language model, made ready for training."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from learnerkit.data.lengths import LengthBatches
from learnerkit.data.loaders import ONLY_INPUTS, DataLoaders
from learnerkit.data.parts import check_columns, held_out, sizes_of
from learnerkit.data.weights import sample_weights
from learnerkit.export.reading import NoData
from learnerkit.language.batches import IGNORED, EncodedTexts, Padded, TokenBlocks
from learnerkit.language.codec import TextCodec, checked_texts, train_tokenizer
from learnerkit.stores.paths import files_within, local_folder
from learnerkit.text import first_few
from learnerkit.utils import check_keywords

if TYPE_CHECKING:
    from pandas import DataFrame


def _folder_name(file: Path) -> str:
    return file.parent.name


class TextData:
    """Texts as token ids: each with its class, or all together for a language model, which predicts the next token.

    `from_texts`, `from_df` and `from_folder` make one. Everything is encoded once, then; each of several processes
    does so, and comes to the same.

    Args:
        codec: turns texts into token ids and back.
        classes: what the labels 0, 1, ... stand for; `None` for a language model.
        train_ds, valid_ds: `EncodedTexts`; for a language model the ids of all texts one after the other.
    """

    def __init__(
        self, codec: TextCodec, classes: Sequence[Any] | None = None, train_ds: Any = None, valid_ds: Any = None
    ) -> None:
        self.codec, self.classes = codec, None if classes is None else list(classes)
        self.train_ds, self.valid_ds = train_ds, valid_ds

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str],
        labels: Iterable[Any] | None = None,
        valid: Any = 0.2,
        tokenizer: Any = None,
        *,
        max_len: int = 512,
        vocab_size: int = 8000,
        seed: int = 42,
    ) -> "TextData":
        """Encode texts.

        Args:
            texts: the texts.
            labels: the class of each: text, whole numbers or truth values; `None`: for a language model.
            valid: what is validated on: a share of the texts, drawn at random, of each class as many (of a single text
                for a language model its end); a mask; a list of their numbers; or `None` for nothing.
            tokenizer: any of Hugging Face, such as `AutoTokenizer.from_pretrained(...)` of transformers, or a
                `tokenizers.Tokenizer`; by default one is trained on the texts of the training part.
            max_len: tokens after which a text that has a class is cut.
            vocab_size: tokens of a tokenizer that is trained here.
            seed: of the draw.

        Raises:
            ImportError: the library tokenizers is not installed.
            TypeError: a text that is no str, or a tokenizer of another kind.
            ValueError: labels that do not fit the texts, a single class, one that is in the validation part alone, or
                another `valid`.
        """
        texts = [texts] if isinstance(texts, str) else checked_texts(texts)
        if labels is None and len(texts) == 1 and isinstance(valid, float) and 0 < valid < 1:
            cut = round(len(texts[0]) * (1 - valid))
            texts, valid = [texts[0][:cut], texts[0][cut:]], [1]
        numbers, classes = (np.zeros(len(texts), np.int64), None) if labels is None else _numbered(labels, len(texts))
        mask = held_out(valid, numbers, seed)
        if classes is not None:
            _check_classes(classes, set(numbers[~mask].tolist()))
        if tokenizer is None:
            tokenizer = train_tokenizer(compress(texts, ~mask), vocab_size)
        data = cls(TextCodec(tokenizer, max_len), classes)
        data.train_ds, data.valid_ds = (
            data._encoded(list(compress(texts, part)), numbers[part]) if part.any() else None for part in (~mask, mask)
        )
        return data

    @classmethod
    def from_df(cls, df: "DataFrame", text: str = "text", label: str | None = "label", **kwargs: Any) -> "TextData":
        """Encode a column of a frame.

        Args:
            df: the frame; its index does not matter.
            text: the column with the texts.
            label: the column with the classes; `None`: for a language model.
            kwargs: those of `from_texts`.

        Raises:
            ValueError: a column that is not there.
        """
        check_columns(df, [text, *([] if label is None else [label])])
        return cls.from_texts(df[text], None if label is None else df[label], **kwargs)

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        valid: Any = 0.2,
        classes: Sequence[str] | None = None,
        *,
        label: Callable[[Path], Any] | None = _folder_name,
        **kwargs: Any,
    ) -> "TextData":
        """Encode the .txt files (UTF-8) in a folder and those within it, without hidden ones; links are followed.

        Args:
            path: the folder; of a URL a copy is made, in `~/.cache/learnerkit`.
            valid: as in `from_texts`; or the name of a folder in `path` whose files are all validated on.
            classes: the names of the folders to read; by default all with such files.
            label: a function of a file's path that returns its class, by default the name of its folder; `None`: for a
                language model.
            kwargs: those of `from_texts`.

        Raises:
            ValueError: no files, files beside the folders of classes, or one that is not UTF-8.
        """
        root = local_folder(path)
        texts = map(Path, files_within(root, ".txt"))
        files = sorted(file for file in texts if classes is None or file.parent.name in classes)
        if not files:
            among = "" if classes is None else f" among {first_few(classes)}"
            raise ValueError(f"there are no .txt files in folders of {root}{among}")
        around = {folder for each in {file.parent for file in files} for folder in each.parents}
        stray = [file for file in files if file.parent in around]
        if stray and label is _folder_name:
            names = sorted({file.parent.name for file in files if file.parent not in around})
            raise ValueError(
                f"{len(stray):,} files lie beside folders of classes, such as {stray[0]}; take them away, or say which "
                f"folders to read: classes=[{first_few(map(repr, names))}]"
            )
        if isinstance(valid, str):
            folders = [file.relative_to(root).parts[0] for file in files]
            if valid not in folders:
                raise ValueError(
                    f"got valid={valid!r}; there are no .txt files to read in {root / valid}, but in: "
                    f"{first_few(dict.fromkeys(folders))}"
                )
            valid = np.array(folders) == valid
        labels = None if label is None else list(map(label, files))
        return cls.from_texts(map(_read, files), labels, valid, **kwargs)

    def __repr__(self) -> str:
        sizes = sizes_of(self, "tokens" if self.classes is None else "texts")
        classes = [] if self.classes is None else [f"{len(self.classes)} classes: {first_few(self.classes)}"]
        return f"{type(self).__name__}({', '.join([*sizes, f'{self.vocab_size:,} different tokens', *classes])})"

    @property
    def vocab_size(self) -> int:
        """The number of ids of tokens, for the model's first layer."""
        return self.codec.vocab_size

    def _encoded(self, texts: list[str], numbers: np.ndarray) -> EncodedTexts | Tensor:
        if self.classes is None:
            return self.codec.encode_stream(texts)
        return EncodedTexts(*self.codec.encode(texts), torch.from_numpy(numbers))

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode new texts; those for a language model whole and without additions, as the texts that it learned."""
        return EncodedTexts(*self.codec.encode(texts, whole=self.classes is None))

    def decode(self, sample: Mapping[str, Tensor]) -> str:
        """Return the text of a sample, a row of a batch."""
        ids = sample["input_ids"]
        return self.codec.decode((ids[sample["attention_mask"].bool()] if "attention_mask" in sample else ids).tolist())

    def dataloaders(
        self,
        tokens: int = 4096,
        seq_len: int = 128,
        *,
        weights: str | Mapping[Any, float] | Sequence[float] | Tensor | None = None,
        device: torch.device | str | int | None = None,
        **kwargs: Any,
    ) -> "TextDataLoaders":
        """Make loaders, whose batches are mappings as models of transformers take them.

        Texts with classes come sorted by length, so that little is padding: `input_ids` and `attention_mask` (n, t),
        `labels` (n,). For a language model the texts are cut into contiguous blocks: `input_ids` and `labels`
        (n, seq_len + 1) are alike for models that make their own loss, as those of transformers do; for a `loss_func`,
        labels are the next tokens: `input_ids` and `labels` (n, seq_len). The last block is padded, with labels of
        -100, which torch's losses ignore. What comes from `from_json` has no texts; its loaders have no batches, and
        predict for new texts.

        Args:
            tokens: in a batch at most, with padding.
            seq_len: predictions in a block of a language model.
            weights: by which texts with classes are drawn in training, as in `DataLoaders.from_datasets`.
            device: as for `DataLoaders`.
            kwargs: for `torch.utils.data.DataLoader`, but not how it makes batches of texts with classes.

        Raises:
            TypeError: a keyword that is unknown, or says how batches are made.
            ValueError: `weights` for a language model, or such as do not fit the texts.
        """
        own = ["tokens", "seq_len", "weights", "device"]
        check_keywords("TextData.dataloaders", kwargs, [*own, *signature(DataLoader).parameters])
        made = {"collate_fn"} | (set() if self.classes is None else _OF_LENGTHS)
        if refused := sorted(made & {*kwargs}):
            raise TypeError(
                f"TextData.dataloaders() got {refused[0]}=, and makes the batches of texts itself, by their lengths: "
                "tokens= says how large they are, weights= which texts are drawn"
            )
        if weights is not None and self.classes is None:
            raise ValueError("got weights= for a language model, whose texts are one stream of tokens without classes")
        if self.train_ds is None:
            return self.as_loaders(NoData(), NoData(), device=device, tokens=tokens)
        train, valid = (
            None if ds is None else self._loader(ds, tokens, seq_len, is_train, weights if is_train else None, **kwargs)
            for ds, is_train in ((self.train_ds, True), (self.valid_ds, False))
        )
        dls = self.as_loaders(train, valid, device=device, tokens=tokens)
        dls._pins = "pin_memory" not in kwargs
        return dls

    def as_loaders(
        self, train: Any, valid: Any = None, *, device: torch.device | str | int | None = None, tokens: int = 4096
    ) -> "TextDataLoaders":
        """Make `TextDataLoaders` of existing loaders."""
        dls = TextDataLoaders(train, valid, device=device, classes=self.classes, decode=self.decode)
        dls.data = self
        dls.tokens = tokens
        dls.preprocessing = json.loads(self.to_json())
        return dls

    def _loader(
        self, ds: Any, tokens: int, seq_len: int, training: bool, weights: Any, **kwargs: Any
    ) -> DataLoader:  # fmt: skip
        if isinstance(ds, Tensor):
            kwargs = {"batch_size": max(1, tokens // max(1, seq_len)), "shuffle": training} | kwargs
            dataset: Dataset = TokenBlocks(ds, seq_len)
        else:
            drawn = None if weights is None else sample_weights(weights, ds, self.classes)
            dataset, kwargs["batch_sampler"] = ds, LengthBatches(ds.lengths, tokens, shuffle=training, weights=drawn)
        return DataLoader(dataset, collate_fn=self.collate, **kwargs)

    @property
    def collate(self) -> Padded:
        """The function that makes a batch of samples."""
        return Padded(self.codec.pad, masked=self.classes is not None)

    # Files

    def to_json(self) -> str:
        """Return the tokenizer and the classes as JSON, which `from_json` reads."""
        return json.dumps({"codec": self.codec.to_json(), "classes": self.classes})

    @classmethod
    def from_json(cls, text: str) -> "TextData":
        """Read what `to_json` wrote: the same data without the texts."""
        facts = json.loads(text)
        return cls(TextCodec.from_json(facts["codec"]), facts["classes"])


_OF_LENGTHS = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
"""The arguments of torch's loader that a batch sampler takes the place of."""


class TextDataLoaders(DataLoaders):
    """Loaders of texts, with their `data`, and the most `tokens` that a batch has."""

    data: TextData
    tokens: int
    inputs = {"input_ids": ("tokens",), "attention_mask": ("tokens",)}
    aligned = True

    def split(self, batch: Any, arguments: Sequence[str] | None = None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split a batch as `DataLoaders` do; the targets of a language model are the next tokens of its predictions."""
        if self.data.classes is not None or "labels" not in batch:
            return super().split(batch, arguments)
        ids, following = batch["input_ids"], batch["labels"][..., 1:]  # It may be a batch or a sample.
        if arguments is not None:  # the model itself compares predictions with the labels that come next
            return (batch,), (F.pad(following, (0, 1), value=IGNORED),)
        return ({"input_ids": ids[..., :-1]},), (following,)

    @property
    def target_names(self) -> Sequence[Any] | Callable[[Tensor], str] | None:
        """The classes; for a language model a function that turns the next tokens into text."""
        return self.classes if self.data.classes is not None else lambda ids: self.data.codec.decode(ids[ids >= 0])

    def test_dl(self, items: Iterable[str], bs: int | None = None, **loader_kwargs: Any) -> DataLoader[Any]:
        """A loader of texts without labels, in their order, for `learn.get_preds(dl=...)`.

        Args:
            items: the texts.
            bs: samples in a batch, instead of the budget of tokens.
            loader_kwargs: for `torch.utils.data.DataLoader`.

        Raises:
            TypeError: something else than texts.
            ValueError: no texts.
        """
        if isinstance(items, str | Mapping) or hasattr(items, "columns"):
            raise TypeError(
                f"got a {type(items).__name__}; test_dl takes a list of texts, or a column of a frame such as "
                "df['text'] (learn.predict takes one text)"
            )
        texts = list(items)
        if not texts:
            raise ValueError("there is nothing to predict: got no texts")
        ds = self.data.encode(texts)
        if bs is None:
            bs = loader_kwargs.pop("batch_size", None)
        if bs is not None:
            return DataLoader(ds, bs, collate_fn=self.data.collate, **loader_kwargs)
        batches = LengthBatches(ds.lengths, self.tokens).in_order()
        return DataLoader(ds, batch_sampler=batches, collate_fn=self.data.collate, **loader_kwargs)

    def input_batch(self, *items: Any) -> tuple[Any, Any]:
        """Return a batch of some texts, as `test_dl` gives it, and what stands for its loader."""
        texts = self.data.encode(items)
        return self.data.collate([texts[i] for i in range(len(items))]), ONLY_INPUTS


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{file} is not UTF-8 ({e}); convert it, or read the files yourself, for from_texts") from e


def _numbered(labels: Iterable, n: int) -> tuple[np.ndarray, list]:
    """Return the number of each label's class, and the classes, sorted."""
    labels = list(labels)
    try:
        array = np.asarray(labels)
    except ValueError:  # They are lists of several lengths.
        array = np.array(labels, object)
    kinds = {"U": str, "O": str | int | np.generic}.get(array.dtype.kind, object)
    mixed = [label for label in labels if not isinstance(label, kinds)]
    if array.shape != (n,) or array.dtype.kind not in "iubU" or mixed:
        among = f", {mixed[0]!r} among them," if mixed else ""
        raise ValueError(
            f"got labels of type {array.dtype} and shape {array.shape}{among} for {n:,} texts; there is one for each, "
            "and all are text, whole numbers or truth values"
        )
    classes, numbers = np.unique(array, return_inverse=True)
    return numbers.astype(np.int64), classes.tolist()


def _check_classes(classes: list, trained: set[int]) -> None:
    if len(classes) < 2:
        raise ValueError(f"all texts have the class {classes[0]!r}; there is nothing to learn")
    if unknown := [name for i, name in enumerate(classes) if i not in trained]:
        raise ValueError(
            f"validated on, but not trained on: the classes {first_few(map(str, unknown))}; choose another valid="
        )
