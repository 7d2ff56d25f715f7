"""Forwards of single modules: they stack, unstack, and give back what was there."""

from __future__ import annotations

import copy

import pytest
from torch import nn

from lowtide.errors import LowtideError, PlanError
from lowtide.techniques import Forward, replace_forward
from tests.refusals import refused


class Doubled(Forward):
    def __call__(self, x: float) -> float:
        return 2 * self.plain(x)


class Tripled(Forward):
    def __call__(self, x: float) -> float:
        return 3 * self.plain(x)


def test_forwards_stack_and_unstack() -> None:
    module = nn.Identity()
    first = replace_forward(Doubled(module))
    second = replace_forward(Tripled(module))
    assert module(1.0) == 6.0
    with pytest.raises(LowtideError) as refusal:
        first()
    assert "Doubled" in str(refusal.value)
    second()
    twin = copy.deepcopy(module)
    assert twin.forward.module is twin
    del twin.forward
    assert twin(1.0) == 1.0
    assert module(1.0) == 2.0


def test_a_forward_that_somebody_else_put_there_comes_back() -> None:
    def theirs(x: float) -> float:
        return -x

    module = nn.Identity()
    module.forward = theirs
    with replace_forward(Doubled(module)):
        assert module(1.0) == -2.0
    assert module.forward is theirs


def test_the_same_forward_twice_is_refused_with_the_place() -> None:
    module = nn.Identity()
    with replace_forward(Doubled(module)), pytest.raises(LowtideError) as refusal:
        replace_forward(Doubled(module), path="blocks.3")
    assert "blocks.3" in str(refusal.value)


def test_a_forward_instead_of_a_classs_own_is_refused_on_another_class_and_on_top_of_others() -> None:
    module = nn.Identity()
    with refused("Identity", "nn.Linear", kind=PlanError):
        replace_forward(Doubled(module), instead_of=nn.Linear)
    with replace_forward(Tripled(module)), pytest.raises(LowtideError) as refusal:
        replace_forward(Doubled(module), instead_of=nn.Identity)
    assert "Tripled" in str(refusal.value)
    assert "forward" not in vars(module)
