import json

import pytest

from lowtide.reporting.figures import save_figure
from lowtide.reporting.inline import inline
from lowtide.reporting.palette import AGAIN, RUNS
from lowtide.reporting.value_timeline import Overlay, large_values, lives_chart, overlay_chart

MIB = 2**20


def rows(chart, part):
    """The data of a chart's first layer; altair keeps it beside the layers, under a name."""
    specification = json.loads(chart.to_json())
    layer = part(specification)["layer"][0]
    data = layer.get("data") or part(specification)["data"]
    return json.loads(specification["datasets"][data["name"]])


def test_values_that_are_made_again_have_a_second_life_in_another_colour(planned):
    bars = rows(lives_chart(planned), lambda s: s["vconcat"][1])
    again = [bar for bar in bars if bar["category"] == "made again"]
    assert len(again) == 3  # every ReLU but the last
    backward = planned.timeline.phase_starts["backward"]
    assert all(bar["op"] >= backward for bar in again)
    assert AGAIN in lives_chart(planned).to_json()


def test_a_step_that_makes_nothing_again_has_no_such_bar(profile):
    bars = rows(lives_chart(profile), lambda s: s["vconcat"][1])
    assert {bar["category"] for bar in bars} == {"activation", "temporary", "gradient"}


def test_bars_end_where_the_optimizer_starts_and_the_curve_reaches_the_peak(planned):
    end = planned.timeline.phase_starts["optimizer"]
    assert max(bar["end"] for bar in rows(lives_chart(planned), lambda s: s["vconcat"][1])) == end
    stacked: dict[int, float] = {}
    for row in rows(lives_chart(planned), lambda s: s["vconcat"][0]):
        stacked[row["op"]] = stacked.get(row["op"], 0) + row["size"]
    assert max(stacked.values()) * MIB == planned.peak_bytes


def test_the_values_that_hold_most_are_shown_and_nothing_that_stays(make_profile):
    found = large_values(make_profile(blocks=30), 5)
    assert len(found) == 5
    assert [lives[0].module for lives in found] == [f"{i}.relu" for i in range(5)]


@pytest.fixture
def overlay(profile, planned):
    return Overlay("both", (profile, planned), (None, 400 * MIB), ("", "peak"), (("chain", "1"), ("planned", "2")))


def test_steps_are_drawn_over_each_other_with_their_budgets(overlay):
    chart = overlay_chart(overlay)
    drawn = rows(chart, lambda s: s)
    assert {row["run"] for row in drawn} == {"chain", "planned"}
    peaks = {name: max(row["size"] for row in drawn if row["run"] == name) for name in ("chain", "planned")}
    assert [peaks[p.name] * MIB for p in overlay.profiles] == [p.peak_bytes for p in overlay.profiles]
    specification = json.loads(chart.to_json())
    limits = json.loads(specification["datasets"][specification["layer"][1]["data"]["name"]])
    assert [(row["run"], row["size"]) for row in limits] == [("planned", 400)]
    assert specification["layer"][1]["mark"]["strokeDash"]


def test_a_chart_in_a_page_takes_its_colours_from_the_page(overlay, tmp_path):
    drawn = inline(overlay_chart(overlay))
    assert 'stroke="var(--grid)"' in drawn
    assert RUNS[1] in drawn
    assert "white" not in drawn
    assert "http" not in drawn
    assert save_figure(lives_chart(overlay.profiles[1]), tmp_path / "lives.png").read_bytes().startswith(b"\x89PNG")
