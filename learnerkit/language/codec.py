"""Texts as token ids, by a tokenizer of Hugging Face."""

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from learnerkit.state import State
from learnerkit.text import first_few

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_AT_ONCE = 1000
"""The number of texts that are encoded at a time: enough for all threads, and few enough for the memory."""

_PAD = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")
_END = ("</s>", "<|endoftext|>", "[END]", "[SEP]")


class TextCodec:
    """Turns texts into token ids and back.

    Args:
        tokenizer: of the library tokenizers, or one of transformers that is made of such a one.
        max_len: tokens, with those that the tokenizer adds, after which a text is cut; `None`: it is not.
        pad, end: ids of the padding, and of the end of a text in a language model's data; by default the tokenizer's.
            If it has no padding, the id is 0, as padding is masked.

    Raises:
        ImportError: tokenizers is not installed.
        TypeError: a tokenizer of another kind.
        ValueError: `max_len` that leaves no room for the text.
    """

    def __init__(
        self, tokenizer: Any, max_len: int | None = 512, pad: int | None = None, end: int | None = None
    ) -> None:
        kind = _tokenizers().Tokenizer
        inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not isinstance(inner, kind):
            raise TypeError(
                f"got a tokenizer {type(tokenizer).__name__}; it must be a tokenizers.Tokenizer, or one of "
                "transformers that has a backend_tokenizer (AutoTokenizer.from_pretrained(...) gives one)"
            )
        self._tokenizer: Tokenizer = kind.from_str(inner.to_str())  # a copy, as its settings are changed
        self._lock = Lock()  # for as long as a thread needs its settings
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.num_special_tokens_to_add(False)
        if max_len is not None and max_len <= added:
            raise ValueError(
                f"got max_len={max_len}; the tokenizer adds {added} tokens, and one is the least of a text"
            )
        self.max_len = max_len
        find = self._tokenizer.token_to_id
        pads = (pad, getattr(tokenizer, "pad_token_id", None), (inner.padding or {}).get("pad_id"), *map(find, _PAD), 0)
        ends = (
            end,
            getattr(tokenizer, "eos_token_id", None),
            getattr(tokenizer, "sep_token_id", None),
            *map(find, _END),
        )
        self.pad: int = next(i for i in pads if i is not None)
        self.end: int | None = next((i for i in ends if i is not None), None)

    @property
    def vocab_size(self) -> int:
        """The number of ids of tokens: one more than the largest."""
        return max(self._tokenizer.get_vocab().values()) + 1

    def encode(self, texts: Sequence[str], whole: bool = False) -> tuple[Tensor, Tensor]:
        """Return the token ids of all texts one after the other (int32), and how many each text has.

        Args:
            texts: the texts.
            whole: neither cut texts nor add tokens.
        """
        return self._encode(texts, whole, lambda ids: ids or [self.pad])  # A batch needs a token of each.

    def encode_stream(self, texts: Sequence[str]) -> Tensor:
        """Return the token ids (int32) of all texts, each whole and followed by `end`, without other additions."""
        end = [] if self.end is None else [self.end]
        return self._encode(texts, True, lambda ids: ids + end)[0]

    def _encode(self, texts: Sequence[str], whole: bool, finish: Any) -> tuple[Tensor, Tensor]:
        parts, lengths = [np.empty(0, np.int32)], list[int]()
        for start in range(0, len(texts), _AT_ONCE):
            some = checked_texts(texts[start : start + _AT_ONCE])
            try:
                with self._lock:
                    self._cut_at(None if whole else self.max_len)
                    encodings = self._tokenizer.encode_batch_fast(some, add_special_tokens=not whole)
            except TypeError:
                _refuse_halves(some, start)
                raise
            encoded = [finish(encoding.ids) for encoding in encodings]
            parts.append(np.concatenate([np.array(ids, np.int32) for ids in encoded]))
            lengths += map(len, encoded)
        return torch.from_numpy(np.concatenate(parts)), torch.tensor(lengths)

    def _cut_at(self, max_len: int | None) -> None:
        self._tokenizer.no_truncation()
        if max_len is not None:
            self._tokenizer.enable_truncation(max_len)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids, without the tokens that the tokenizer adds."""
        return self._tokenizer.decode([int(i) for i in ids]).strip()

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `from_json` reads, among them the tokenizer's own JSON as text."""
        with self._lock:
            self._cut_at(None)
            text = self._tokenizer.to_str()
        return {"tokenizer": text, "max_len": self.max_len, "pad": self.pad, "end": self.end}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "TextCodec":
        """Make a codec of what `to_json` has returned."""
        tokenizer = _tokenizers().Tokenizer.from_str(state["tokenizer"])
        return cls(tokenizer, state["max_len"], state["pad"], state["end"])

    def __getstate__(self) -> State:
        return self.to_json()

    def __setstate__(self, state: State) -> None:
        vars(self).update(vars(self.from_json(state)))


def checked_texts(texts: Iterable) -> list[str]:
    """Return the texts as a list; refuse anything else among them."""
    texts = list(texts)
    if others := [i for i, text in enumerate(texts) if not isinstance(text, str)]:
        raise TypeError(
            f"{len(others):,} of {len(texts):,} texts are no str, such as {texts[others[0]]!r}, at the places "
            f"{first_few(others)} (from 0); for missing ones put ''"
        )
    return texts


def _refuse_halves(texts: Sequence[str], first: int) -> None:
    """Refuse a text with half of a pair of surrogates, which has no bytes; `first` is the place of the first text."""
    for i, text in enumerate(texts, first):
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ValueError(
                f"the text at place {i} (from 0) has half a character, {text[e.start]!r}, at its place {e.start}; "
                "text.encode('utf-8', 'replace').decode() puts '?' there"
            ) from None


def train_tokenizer(texts: Iterable[str], vocab_size: int = 8000) -> "Tokenizer":
    """Make a tokenizer for these texts: byte-level byte pair encoding, by the library tokenizers.

    Frequent words are one token, rare ones several; every text can be encoded, and decoded again (Sennrich et al.,
    https://arxiv.org/abs/1508.07909).

    Args:
        texts: to learn from; of more than 20 million characters every n-th text is taken.
        vocab_size: tokens at most; 256 bytes are among them, and '[PAD]' and '[END]'.

    Raises:
        ImportError: tokenizers is not installed.
    """
    _tokenizers()
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    texts = list(texts)
    texts = texts[:: 1 + sum(map(len, texts)) // _ENOUGH]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["[PAD]", "[END]"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


_ENOUGH = 20_000_000


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as e:
        raise ImportError("texts need the library tokenizers: pip install 'learnerkit[text]'") from e
    return tokenizers
