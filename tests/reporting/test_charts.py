import pytest

from lowtide.reporting.charts import alt, category_color, chart_of, inline, op_axis, phase_marks, stacked_area, styled
from lowtide.reporting.palette import COLORS
from tests.reporting.pages import heights, rows

MIB = 2**20


def test_an_area_reaches_the_peak_and_stops_before_its_end(profile):
    whole = heights(rows(alt.layer(stacked_area(profile, op_axis(20)))))
    assert max(whole.values()) * MIB == profile.peak_bytes
    assert max(whole) == len(profile.graph.ops)
    assert max(heights(rows(alt.layer(stacked_area(profile, op_axis(8), 8))))) == 8


def test_a_long_area_is_thinned_and_keeps_its_peak(make_profile):
    profile = make_profile(blocks=400)
    drawn = {row["op"] for row in rows(alt.layer(stacked_area(profile, op_axis(2000))))}
    assert len(drawn) <= 601
    assert profile.peak_op in drawn


@pytest.mark.parametrize(
    ("start", "domain"), [(16, [0, 16, 20]), (18, [0, 20]), (None, [0, 20])], ids=["long", "short", "none"]
)
def test_a_long_optimizer_has_its_own_scale(start, domain):
    scale = op_axis(20, start).to_dict()["scale"]
    assert scale["domain"] == domain
    if len(domain) == 3:
        assert scale["range"][1] >= 0.8 * scale["range"][2]


def test_phases_are_marked_where_they_start(profile):
    marks = rows(alt.layer(*phase_marks(profile)))
    assert [(mark["op"], mark["phase"]) for mark in marks] == [(0, "forward"), (8, "backward"), (16, "optimizer")]
    assert [mark["op"] for mark in rows(alt.layer(*phase_marks(profile, 16)))] == [0, 8]


def test_a_chart_in_a_page_takes_its_colours_from_the_page():
    points = chart_of([{"x": 1, "y": 2, "category": "activation"}]).mark_point()
    points = points.encode(x="x:Q", y="y:Q", color=category_color(["activation"]))
    svg = inline(styled(points, "title"))
    assert svg.startswith('<svg class="figure"')
    assert 'stroke="var(--grid)"' in svg
    assert COLORS["activation"] in svg
    assert "white" not in svg
    assert "http" not in svg
