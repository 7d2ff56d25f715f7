"""Arithmetic of facts: how sums, products and quotients depend on the samples, checked on numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowtide.techniques.microbatch.facts import (
    FIXED,
    Fact,
    Sizes,
    UnfollowedError,
    added,
    broadcast,
    divided,
    multiplied,
    reshaped,
)

ROWS, TOTAL, MEAN = Fact("rows"), Fact("total"), Fact("total", -1)
COUNT, COUNTED = Fact("total", keys=frozenset({"t"})), Fact("counted", keys=frozenset({"t"}))


def followed(rule: Callable[..., Fact], *args: Any) -> Fact | None:
    """The fact that follows, or None."""
    try:
        return rule(*args)
    except UnfollowedError:
        return None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (TOTAL, TOTAL, TOTAL),
        (MEAN, MEAN, MEAN),
        (TOTAL, MEAN, None),  # neither a sum nor a mean
        (MEAN, FIXED, MEAN),  # a constant is its own mean
        (TOTAL, FIXED, None),  # and not its own sum
        (COUNTED, FIXED, COUNTED),
        (COUNTED, TOTAL, None),
        (ROWS, TOTAL, None),
    ],
)
def test_a_sum_of_two_values_is_followed_where_both_are_reduced_alike(a: Fact, b: Fact, expected: Fact | None) -> None:
    assert followed(added, a, b) == followed(added, b, a) == expected


@pytest.mark.parametrize(
    ("a", "b", "product", "quotient"),
    [
        (TOTAL, Fact("fixed", 1), Fact("total", 1), MEAN),
        (TOTAL, FIXED, TOTAL, TOTAL),
        (TOTAL, TOTAL, None, None),
        (TOTAL, COUNT, None, COUNTED),
        (COUNTED, FIXED, COUNTED, COUNTED),
        (COUNTED, Fact("fixed", 1), None, None),
    ],
)
def test_products_and_quotients_carry_powers_of_the_samples(
    a: Fact, b: Fact, product: Fact | None, quotient: Fact | None
) -> None:
    assert followed(multiplied, a, b) == product
    assert followed(divided, a, b) == quotient


@pytest.mark.parametrize(
    ("before", "after", "dim", "outer"),
    [((6, 4), (24,), 0, 1), ((6, 4), (6, 2, 2), 0, 1), ((6, 4), (1, 6, 4), 1, 1), ((6, 4), (2, 12), None, 1)],
)
def test_a_view_keeps_the_samples_where_one_dimension_holds_them_all(
    before: tuple[int, ...], after: tuple[int, ...], dim: int | None, outer: int
) -> None:
    fact = followed(reshaped, ROWS, before, after, 6)
    assert fact == (None if dim is None else Fact("rows", dim=dim, outer=outer))
    if fact is not None:  # numbers of samples, through torch's own view
        numbers = torch.arange(6)[:, None].expand(before).reshape(after).movedim(fact.dim, 0).reshape(6, -1)
        assert all(len(row.unique()) == 1 for row in numbers)


def test_samples_meet_themselves_alone_or_nothing_is_known() -> None:
    assert broadcast([ROWS, FIXED], [(6, 4), (4,)]) == ROWS
    assert followed(broadcast, [ROWS, Fact("rows", dim=1)], [(6, 1), (1, 6)]) is None


def test_a_dimension_of_samples_grows_with_their_number_and_no_other_does() -> None:
    sizes = Sizes(10, 5)
    assert sizes.scaled((3, 20), (3, 10)) == 1
    assert sizes.scaled((3, 4), (3, 4)) is None
    for whole, part in (((10, 10), (5, 5)), ((11, 4), (6, 4)), ((10,), (5, 1))):
        with pytest.raises(UnfollowedError):
            sizes.scaled(whole, part)
    with pytest.raises(UnfollowedError):
        sizes.power(9, 4)
