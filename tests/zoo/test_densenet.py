from __future__ import annotations

from .counting import build, count


def test_parameters_are_as_many_as_torchvisions():
    assert count(build("densenet121")) == 7_978_856
