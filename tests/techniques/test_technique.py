from __future__ import annotations

import copy
import json

import pytest
from torch import nn

from lowtide import zoo
from lowtide.errors import LowtideError, PlanError
from lowtide.techniques import Fidelity, Forward, Option, Price, Technique, replace_forward, techniques


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


def test_knobs_of_another_type_or_range_are_refused() -> None:
    option = Option(
        "any", ("a", "b"), (("rows", 3), ("ratio", 0.5), ("state", "8bit"), ("bits", (2, 4)), ("all", True))
    )
    assert option.read("rows", 0, least=1) == 3
    assert option.read("ratio", 1.0) == 0.5
    assert option.read("absent", 7) == 7
    assert option.one_of("state", ("4bit", "8bit")) == "8bit"
    assert option.by_site("bits") == {"a": 2, "b": 4}
    for refused in (
        lambda: option.read("rows", 0, least=4),
        lambda: option.read("rows", 0.0),
        lambda: option.read("all", 0),
        lambda: option.read("absent", 0, least=1),
        lambda: option.one_of("state", ("4bit",)),
        lambda: option.by_site("rows"),
        lambda: Option("any", ("a",), option.knobs).by_site("bits"),
    ):
        with pytest.raises(PlanError):
            refused()


@pytest.mark.parametrize("name", [name for name, each in techniques().items() if each.kind == "step"])
@pytest.mark.parametrize("sites", [[], [("layers",)], [("",), ("",)]], ids=["none", "a layer", "twice"])
def test_a_technique_of_the_step_acts_once_and_on_all_of_it(name, sites) -> None:
    technique, work = techniques()[name], zoo.small("lenet")
    with pytest.raises(PlanError, match="once"):
        technique.apply(work, [Option(name, site) for site in sites])


def test_a_price_adds_the_seconds_of_its_resources() -> None:
    assert Price(Fidelity.BITWISE, compute_seconds=1.0, h2d_seconds=0.5, d2h_seconds=0.25).seconds == 1.75


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
