"""WordPiece (Schuster and Nakajima, 2012) as BERT's uncased models read text, from a ``vocab.txt``."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lowtide.errors import LowtideError

LONGEST_WORD = 100  # characters; a longer one is unknown


class WordPiece:
    """Text to ids, and pairs of texts to padded batches.

    >>> words = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "low", "##tide", "tide", "!"])
    >>> [words.vocab[i] for i in words.encode("Lowtide tide, high!")]
    ['low', '##tide', 'tide', '[UNK]', '[UNK]', '!']
    """

    def __init__(self, vocab: Iterable[str]) -> None:
        self.vocab = list(vocab)
        self._ids = {token: index for index, token in enumerate(self.vocab)}
        for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]"):
            if token not in self._ids:
                raise LowtideError(f"The vocabulary has no {token}", hint="Is it BERT's vocab.txt, a token per line?")
        self.pad, self.unknown, self.start, self.end = (self._ids[t] for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WordPiece:
        """From a file with a token on each line."""
        return cls(Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n"))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without markers."""
        return [piece for word in _words(text) for piece in self._pieces(word)]

    def pairs(self, first: Sequence[str], second: Sequence[str], *, longest: int = 128) -> list[tuple[list[int], int]]:
        """Each pair as the ids of ``[CLS] first [SEP] second [SEP]``, and how many of them are the first's.

        A pair over ``longest`` loses tokens from the end of the longer sentence, one at a time.
        """
        encoded: list[tuple[list[int], int]] = []
        for texts in zip(first, second, strict=True):
            one, two = map(self.encode, texts)
            while len(one) + len(two) + 3 > longest:
                (one if len(one) > len(two) else two).pop()
            encoded.append(([self.start, *one, self.end, *two, self.end], len(one) + 2))
        return encoded

    def batch(self, encoded: Sequence[tuple[list[int], int]], *, multiple: int = 8) -> tuple[Tensor, Tensor]:
        """Encoded pairs as ids and segments (batch, tokens), padded to a multiple of some tokens."""
        length = -(-max(len(ids) for ids, _ in encoded) // multiple) * multiple
        ids = torch.full((len(encoded), length), self.pad)
        segments = torch.zeros_like(ids)
        for row, (tokens, split) in enumerate(encoded):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            segments[row, split : len(tokens)] = 1
        return ids, segments

    def _pieces(self, word: str) -> list[int]:
        """Split a word into its longest known first piece, then the longest next one, to its end."""
        pieces: list[int] = []
        start = 0
        while start < len(word) <= LONGEST_WORD:
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self._ids), None)
            if end is None:
                return [self.unknown]
            pieces.append(self._ids[prefix + word[start:end]])
            start = end
        return pieces or [self.unknown]


def _words(text: str) -> list[str]:
    """Lower the case, drop accents and control characters, split at spaces and around punctuation and CJK."""
    plain = unicodedata.normalize("NFD", "".join(_clean(c) for c in text).lower())
    return "".join(_spaced(c) for c in plain if unicodedata.category(c) != "Mn").split()


def _clean(c: str) -> str:
    if c in "\t\n\r" or unicodedata.category(c) == "Zs":
        return " "
    return "" if c in "\0\ufffd" or unicodedata.category(c).startswith("C") else c


def _spaced(c: str) -> str:
    code = ord(c)
    ascii_mark = code < 128 and c.isprintable() and not c.isalnum() and c != " "
    if ascii_mark or unicodedata.category(c).startswith("P") or any(low <= code <= high for low, high in _CJK):
        return f" {c} "
    return c


_CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
