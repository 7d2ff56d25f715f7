"""A chain refuses wrong arrays, and fills in arrays that are left out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lowtide.chains import Chain
from lowtide.errors import LowtideError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("arrays", "wrong"),
    [
        (([], [], [1], []), "stage"),
        (([1, 1], [1], [1, 1, 1], [1, 1]), "backward_seconds"),
        (([1, 1], [], [1, 1, 1], [1, 1]), "backward_seconds"),
        (([1, 1], [1, 1], [1, 1], [1, 1]), "value_bytes"),
        (([1], [1], [1, 1], [1], [0, 0]), "forward_temporary_bytes"),
        (([1, -1], [1, 1], [1, 1, 1], [1, 1]), "forward_seconds[1]"),
        (([1], [math.nan], [1, 1], [1]), "backward_seconds[0]"),
        (([1], [1], [1, math.inf], [1]), "value_bytes[1]"),
        (([1], [1], [1, 1.5], [2]), "value_bytes[1]"),
        (([1], [1], [1, 1], [1], [0], [0], [1, 1], [2]), "tail_seconds[0]"),
        (([1], [1], [1, 4], [3]), "saved_bytes[0]"),
    ],
)
def test_a_chain_with_wrong_arrays_is_refused(arrays, wrong):
    with refused(wrong, kind=LowtideError):
        Chain(*arrays)


def test_a_chain_takes_numpy_arrays_and_fills_in_those_left_out():
    chain = Chain(np.ones(2), np.ones(2), np.array([3, 2, 1]), np.array([4, 1]))
    assert chain.value_bytes == chain.gradient_bytes == (3, 2, 1)
    assert chain.forward_temporary_bytes == (0, 0)
    assert chain == Chain([1, 1], [1, 1], [3, 2, 1], [4, 1])
