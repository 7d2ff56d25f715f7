from __future__ import annotations

from .counting import build, count


def test_lenet_without_batch_norm_is_lenet_5():
    assert count(build("lenet", norm=False)) == 61_706
    assert count(build("lenet")) == 61_706 + 2 * (6 + 16 + 120 + 84)
