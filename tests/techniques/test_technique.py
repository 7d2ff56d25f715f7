from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from lowtide import zoo
from lowtide.errors import PlanError
from lowtide.techniques import Config, Fidelity, Interval, Option, Price, Technique, techniques
from tests.refusals import refused


def test_fidelity_is_ordered_from_strict_to_loose() -> None:
    order = ["bitwise", "roundoff", "unbiased", "approximate", "changed"]
    assert [f.value for f in sorted(Fidelity, reverse=True)] == order[::-1]
    assert Fidelity.ROUNDOFF <= "roundoff" < Fidelity.CHANGED
    assert json.dumps(Fidelity.BITWISE) == '"bitwise"'


@dataclass(frozen=True)
class Widths(Config):
    """A config with a field of each kind."""

    rows: int
    ratio: float = 0.5
    state: str = "8bit"
    bits: tuple[int, ...] = ()
    all: bool = False

    def __post_init__(self) -> None:
        self.require("rows", int, least=1)
        self.require("ratio", float, above=0)
        self.require_one_of("state", ("8bit", "4bit"))
        self.require("bits", tuple)
        self.require("all", bool)

    def check_site(self, site: tuple[str, ...]) -> None:
        if self.bits and len(self.bits) != len(site):
            self.refuse("bits", "is not one for each site")


def test_options_with_the_same_content_are_the_same() -> None:
    option = Option("any", ("layers",), Widths(2, bits=(4,)))
    assert option == Option("any", ("layers",), Widths(2, bits=(4,)))
    assert option != Option("any", ("layers",), Widths(3, bits=(4,)))
    assert len({option, copy.deepcopy(option)}) == 1
    assert option.config_as(Widths).rows == 2


def test_an_option_prints_its_places_and_its_settings() -> None:
    assert str(Option("any", ("layers",), Widths(2, bits=(4,)))) == "any on layers (rows 2, ratio 0.5, state 8bit)"
    assert str(Option("any", ("",), Widths(2, all=True))) == "any on the model (rows 2, ratio 0.5, state 8bit, all)"
    assert str(Option("any", ("a", "b", "c", "d"))) == "any on a, b, c, d"
    assert str(Option("any", tuple("abcdefg"))) == "any on a, b, c, 4 more"


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 0), ("rows", 3.0), ("rows", True), ("ratio", 1), ("ratio", 0.0), ("state", "2bit"), ("all", 1)],
)
def test_a_field_of_another_type_or_range_is_refused_where_it_is_made(name: str, value: object) -> None:
    with pytest.raises(PlanError) as refusal:
        Widths(**{"rows": 1, name: value})
    assert f"{name}={value!r}" in str(refusal.value)


def test_a_config_that_does_not_fit_its_option_is_refused() -> None:
    with pytest.raises(PlanError) as refusal:
        Option("any", ("a",), Widths(1, bits=(2, 4)))
    assert "bits" in str(refusal.value)
    with pytest.raises(PlanError) as refusal:
        Option("any", ("a",)).config_as(Widths)
    assert "Widths" in str(refusal.value)
    with refused("any", "rows", "Config", kind=PlanError):
        Option("any", ("a",), (("rows", 1),))


def test_a_config_is_read_back_from_json() -> None:
    config = Widths(2, bits=(4, 8), all=True)
    assert Widths.from_json(json.loads(json.dumps(asdict(config)))) == config
    assert Widths.from_json({"rows": 2}) == Widths(2)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({}, "rows"),
        ({"rows": 1, "width": 2}, "width"),
        ({"rows": "1"}, "rows='1'"),
        ({"rows": 2**64}, "rows"),
        ({"rows": 1, "ratio": math.inf}, "ratio"),
        ({"rows": 1, "bits": [{}]}, "bits"),
        ([["rows", 1]], "Widths"),
        (None, "Widths"),
    ],
)
def test_a_malformed_config_is_refused_with_the_field(data: Any, names: str) -> None:
    with pytest.raises(PlanError) as refusal:
        Widths.from_json(data)
    assert names in str(refusal.value)


@pytest.mark.parametrize("name", [name for name, each in techniques().items() if each.kind == "step"])
@pytest.mark.parametrize("sites", [[], [("layers",)], [("",), ("",)]], ids=["none", "a layer", "twice"])
def test_a_technique_of_the_step_acts_once_and_on_all_of_it(name, sites) -> None:
    technique, work = techniques()[name], zoo.small("lenet")
    with pytest.raises(PlanError) as refusal:
        technique.apply(work, [Option(name, site) for site in sites])
    assert '("",)' in str(refusal.value)


def test_a_price_adds_the_seconds_of_its_resources_and_leaves_out_empty_intervals() -> None:
    lasting, empty = Interval(8, 2, 4, "lasting"), Interval(8, 4, 4, "empty")
    price = Price(Fidelity.BITWISE, (empty,), (lasting, empty), compute_seconds=1.0, h2d_seconds=0.5, d2h_seconds=0.25)
    assert price.seconds == 1.75
    assert (price.added, price.removed) == ((), (lasting,))


def test_every_built_in_technique_has_the_shape() -> None:
    assert all(isinstance(technique, Technique) for technique in techniques().values())
