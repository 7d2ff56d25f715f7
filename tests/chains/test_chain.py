"""A chain says what makes no sense in it, and fills in what is left out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lowtide.chains import Chain
from lowtide.errors import LowtideError


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (([], [], [1], []), "at least one stage"),
        (([1, 1], [1], [1, 1, 1], [1, 1]), "backward_seconds of a chain of 2 stages has 2 numbers, not 1"),
        (([1, 1], [1, 1], [1, 1], [1, 1]), "value_bytes of a chain of 2 stages has 3 numbers, not 2"),
        (([1], [1], [1, 1], [1], [0, 0]), "forward_temporary_bytes of a chain of 1 stages has 1 numbers, not 2"),
        (([1, -1], [1, 1], [1, 1, 1], [1, 1]), "forward_seconds\\[1\\] is -1"),
        (([1], [math.nan], [1, 1], [1]), "backward_seconds\\[0\\] is nan"),
        (([1], [1], [1, math.inf], [1]), "value_bytes\\[1\\] is inf"),
        (([1], [1], [1, 1.5], [2]), "value_bytes\\[1\\] is 1.5, not a whole number of bytes"),
        (([1], [1], [1, 1], [1], [0], [0], [1, 1], [2]), "tail_seconds\\[0\\] is 2.0, more than the 1.0"),
        (([1], [1], [1, 4], [3]), "saved_bytes\\[0\\] is 3, less than the stage's output of 4 bytes"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(fields, said):
    with pytest.raises(LowtideError, match=said):
        Chain(*fields)


def test_a_chain_takes_arrays_and_fills_in_what_is_left_out():
    chain = Chain(np.ones(2), np.ones(2), np.array([3, 2, 1]), np.array([4, 1]))
    assert chain.value_bytes == chain.gradient_bytes == (3, 2, 1)
    assert chain.forward_temporary_bytes == (0, 0)
    assert chain == Chain([1, 1], [1, 1], [3, 2, 1], [4, 1])
