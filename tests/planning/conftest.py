"""The profile that tests of planning share."""

import pytest

from lowtide.profiling import Profile, profile

from .steps import chain


@pytest.fixture(scope="package")
def plain() -> Profile:
    return profile(chain(), fake=True)
