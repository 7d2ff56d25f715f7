from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowtide.zoo.wordpiece import WordPiece
from tests.refusals import refused

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "creme", "a", "b", "##b", "'", "$", "京", "ab"]


def tokens(text: str) -> list[str]:
    words = WordPiece(VOCAB)
    return [VOCAB[index] for index in words.encode(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unaffable", ["un", "##aff", "##able"]),  # BERT's own example
        ("abb", ["ab", "##b"]),  # the longest piece first
        ("unaffabl", ["[UNK]"]),  # a word with an unknown end is unknown as a whole
        ("CRÈME", ["creme"]),
        ("a'b$", ["a", "'", "b", "$"]),
        ("a京b", ["a", "京", "b"]),
        ("a\tb\n\u00a0a", ["a", "b", "a"]),
        ("a\u200bb\ufffd", ["ab"]),  # a zero-width space is a control character, and no space
        ("", []),
        ("a" + "b" * 99, ["ab", *["##b"] * 98]),
        ("a" + "b" * 100, ["[UNK]"]),
    ],
)
def test_text_is_cut_as_by_bert(text: str, expected: list[str]):
    assert tokens(text) == expected


def test_pairs_have_markers_and_the_longer_sentence_is_cut():
    words = WordPiece(VOCAB)
    a, b = VOCAB.index("a"), VOCAB.index("b")
    assert words.pairs(["a"], ["b b"]) == [([2, a, 3, b, b, 3], 3)]
    assert words.pairs(["a a a a"], ["b b"], longest=7) == [([2, a, a, 3, b, b, 3], 4)]
    assert words.pairs(["a"], ["b b b b"], longest=6) == [([2, a, 3, b, b, 3], 3)]


def test_a_batch_is_padded_and_marks_the_second_sentence():
    words = WordPiece(VOCAB)
    ids, segments = words.batch(words.pairs(["a", ""], ["b b", ""]), multiple=4)
    assert torch.equal(ids, torch.tensor([[2, 8, 3, 9, 9, 3, 0, 0], [2, 3, 3, 0, 0, 0, 0, 0]]))
    assert torch.equal(segments, torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]))


def test_a_vocabulary_is_read_from_a_file_and_must_have_the_markers(tmp_path: Path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
    assert WordPiece.load(path).vocab == VOCAB
    with refused("[SEP]"):
        WordPiece(["[PAD]", "[UNK]", "[CLS]"])
