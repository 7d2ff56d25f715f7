from __future__ import annotations

import pytest

from .counting import build, count


@pytest.mark.parametrize(("tied", "heads"), [(False, 2), (True, 1)])
def test_lstm_is_counted_by_hand(tied: bool, heads: int):
    layer = 4 * 650 * (650 + 650 + 2)
    assert count(build("lstm", tied=tied)) == heads * 10_000 * 650 + 2 * layer + 10_000
