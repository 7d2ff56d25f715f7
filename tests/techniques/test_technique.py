from __future__ import annotations

import copy
import json

import pytest
from torch import nn

from lowtide.errors import LowtideError
from lowtide.techniques import Fidelity, Forward, Option, Price, Technique, Undo, replace_forward, techniques


def test_fidelity_is_ordered_from_strict_to_loose() -> None:
    order = ["bitwise", "roundoff", "unbiased", "approximate", "changed"]
    assert [f.value for f in sorted(Fidelity, reverse=True)] == order[::-1]
    assert Fidelity.ROUNDOFF <= "roundoff" < Fidelity.CHANGED
    assert json.dumps(Fidelity.BITWISE) == '"bitwise"'


def test_options_with_the_same_content_are_the_same() -> None:
    one = Option("sqrt", ("layers",), (("segments", 2), ("trees", ((0, 1), (2,)))))
    assert one == Option("sqrt", ("layers",), (("segments", 2), ("trees", ((0, 1), (2,)))))
    assert len({one, copy.deepcopy(one)}) == 1
    assert str(one) == "sqrt on layers (segments 2)"
    assert str(Option("batchnorm", ("a", "b", "c", "d"))) == "batchnorm on a, b, c, d"
    assert str(Option("batchnorm", tuple("abcdefg"))) == "batchnorm on a, b, c, 4 more"


def test_a_price_adds_the_seconds_of_its_resources() -> None:
    assert Price(Fidelity.BITWISE, compute_seconds=1.0, h2d_seconds=0.5, d2h_seconds=0.25).seconds == 1.75


def test_undo_takes_back_in_reverse_order_and_only_once() -> None:
    done: list[int] = []
    undo = Undo(lambda: done.append(1), lambda: done.append(2))
    undo.add(lambda: done.append(3))
    undo()
    undo()
    assert done == [3, 2, 1]


def test_undo_takes_back_the_rest_when_one_action_fails() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    undo = Undo(lambda: done.append(1), fail, lambda: done.append(3))
    with pytest.raises(ValueError, match="no"):
        undo()
    assert done == [3, 1]


def test_a_failed_apply_takes_back_what_it_had_done() -> None:
    done: list[int] = []

    def apply(fail: bool) -> Undo:
        with Undo() as undo:
            undo.add(lambda: done.append(1))
            if fail:
                raise ValueError("half way")
            return undo.keep()

    with pytest.raises(ValueError, match="half way"):
        apply(fail=True)
    assert done == [1]
    undo = apply(fail=False)
    assert done == [1]
    undo()
    assert done == [1, 1]


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
    with pytest.raises(LowtideError, match="reverse order"):
        first()
    second()
    assert "forward" in module.__dict__


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
    with replace_forward(Doubled(module)), pytest.raises(LowtideError, match=r"blocks\.3"):
        replace_forward(Doubled(module), path="blocks.3")


def test_every_built_in_technique_has_the_shape() -> None:
    assert all(isinstance(technique, Technique) for technique in techniques().values())
