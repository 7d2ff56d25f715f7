from dataclasses import replace

from lowtide.reporting.palette import RECOMPUTED
from lowtide.reporting.value_timeline import Overlay, _readable, large_values, lifetimes_chart, overlay_chart
from lowtide.tracing.graph import Storage
from tests.reporting.pages import heights, rows

MIB = 2**20


def test_recomputed_values_have_a_second_lifetime_in_another_colour(profile, planned):
    chart = lifetimes_chart(planned)
    again = [bar for bar in rows(chart, row=1) if bar["category"] == "recomputed"]
    assert len(again) == 3  # every ReLU but the last
    assert all(bar["op"] >= planned.timeline.phase_starts["backward"] for bar in again)
    assert RECOMPUTED in chart.to_json()
    assert {bar["category"] for bar in rows(lifetimes_chart(profile), row=1)} == {"activation", "temporary", "gradient"}


def test_bars_end_where_the_optimizer_starts_and_the_curve_reaches_the_peak(planned):
    chart = lifetimes_chart(planned)
    assert max(bar["end"] for bar in rows(chart, row=1)) == planned.timeline.phase_starts["optimizer"]
    assert max(heights(rows(chart, row=0)).values()) * MIB == planned.peak_bytes


def test_the_largest_values_are_shown_and_nothing_static(make_profile):
    values = large_values(make_profile(blocks=30), 5)
    assert [lifetimes[0].module for lifetimes in values] == [f"{i}.relu" for i in range(5)]


def test_values_are_named_by_their_ops_and_shapes_and_gradients_by_their_labels():
    relu = Storage(0, 4, "cpu", "float32", "activation", 0, 1, "any text", "", "", (8, 4), "relu")
    norm = replace(relu, made_by="_native_batch_norm_legit_functional_2", shape=())
    gradient = replace(relu, category="gradient", label="weight.grad")
    assert list(map(_readable, (relu, norm, gradient))) == ["relu 8×4", "batch_norm_2", "weight.grad"]


def test_steps_are_drawn_over_each_other_with_their_budgets(profile, planned):
    chart = overlay_chart(Overlay("both", (profile, planned), (None, 400 * MIB)))
    for step in (profile, planned):
        assert max(row["size"] for row in rows(chart) if row["run"] == step.name) * MIB == step.peak_bytes
    assert [(row["run"], row["size"]) for row in rows(chart, layer=1)] == [("planned", 400)]
    assert chart.to_dict()["layer"][1]["mark"]["strokeDash"]
