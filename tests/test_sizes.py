"""Sizes and durations are read and printed as people write them."""

import math

import pytest

from lowtide.errors import LowtideError
from lowtide.sizes import format_seconds, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GiB", 6 * 2**30),
        ("6gb", 6 * 10**9),
        (" 1.5 MiB ", 3 * 2**19),
        (".5KB", 500),
        ("2e3", 2000),
        (1024, 1024),
        (1.9, 1),
        ("0", 0),
    ],
)
def test_a_size_is_read_in_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "6 pounds", "-1", "6GiB more", -1, True, None, math.nan, math.inf, 2**63, "9e18TB"]
)
def test_no_size_is_an_error(text):
    with pytest.raises(LowtideError):
        parse_size(text)


@pytest.mark.parametrize("size", [0, 1, 1023, 2**10, 10**9, 2**40, -(2**30)])
def test_a_printed_size_reads_back_within_its_digits(size):
    text = format_size(size)
    assert parse_size(text.removeprefix("-")) == pytest.approx(abs(size), rel=5e-3)
    assert text.startswith("-") == (size < 0)


def test_a_duration_has_three_digits_and_its_unit():
    seconds = (0, 123.4, 0.25, 0.0456, -0.002, 7.89e-6)
    assert [format_seconds(s) for s in seconds] == ["0 s", "123 s", "250 ms", "45.6 ms", "-2.00 ms", "7.89 µs"]
