from __future__ import annotations

import pytest

from .counting import build, count


@pytest.mark.parametrize(("classes", "published"), [(2, 31_037_698), (1, 31_037_633)])
def test_parameters_are_as_many_as_published(classes: int, published: int):
    assert count(build("unet", classes=classes)) == published
