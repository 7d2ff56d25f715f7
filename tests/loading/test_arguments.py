"""Texts of the command line become arguments."""

from __future__ import annotations

import pytest

from lowtide.errors import WorkloadError
from lowtide.loading.arguments import bind, guess, parse_pairs
from tests.refusals import refused


def test_pairs_are_read_up_to_the_first_equals_sign() -> None:
    assert parse_pairs(["a=1", "b=x=y", "c="], option="--arg") == {"a": "1", "b": "x=y", "c": ""}
    for wrong in (["a"], ["=1"], ["a b=1"], ["a=1", "a=2"]):
        with refused("--arg"):
            parse_pairs(wrong, option="--arg")


def test_texts_are_read_as_python_writes_them() -> None:
    read = guess({"a": "1", "b": "1e-3", "c": "TRUE", "d": "none", "e": "2,3", "f": "gelu", "g": "-1"})
    assert read == {"a": 1, "b": 1e-3, "c": True, "d": None, "e": (2, 3), "f": "gelu", "g": -1}


def test_annotations_that_cannot_be_resolved_fall_back_to_defaults() -> None:
    def function(size: Unresolvable = 3, name=None, **rest):  # noqa: F821
        pass

    args = {"size": "4", "name": "x", "other": "5"}
    assert bind(function, args, {}, where="f") == {"size": 4, "name": "x", "other": "5"}


def test_none_is_none_where_the_annotation_allows_it() -> None:
    def function(size: int | None = 3, name: str = ""):
        pass

    assert bind(function, {"size": "none", "name": "none"}, {}, where="f") == {"size": None, "name": "none"}


@pytest.mark.parametrize(
    ("key", "text", "expected"), [("width", "wide", "whole number"), ("bias", "perhaps", "true or false")]
)
def test_a_text_of_another_kind_is_refused(key: str, text: str, expected: str) -> None:
    def function(width: int = 4, bias: bool = True):
        pass

    with refused(f"{key}={text}", expected, kind=WorkloadError):
        bind(function, {key: text}, {}, where="f")
    with refused("--arg width", kind=WorkloadError):
        bind(function, {"width": "3"}, {"width": 4}, where="f")
