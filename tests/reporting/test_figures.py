import json
import sys

import pytest

from lowtide.errors import MissingExtra
from lowtide.reporting.figures import heatmap_chart, module_chart, pie_chart, save_figure, timeline_chart
from lowtide.reporting.palette import OVER
from tests.refusals import refused
from tests.reporting.pages import heights, rows

MIB = 2**20


def test_a_timeline_reaches_the_peak_and_marks_it(profile):
    chart = timeline_chart(profile)
    assert max(heights(rows(chart)).values()) * MIB == profile.peak_bytes
    assert rows(chart, layer=3) == [{"op": profile.peak_op + 0.5, "size": profile.peak_bytes / MIB}]


def test_pie_adds_up_to_the_peak(profile):
    assert sum(row["size"] for row in rows(pie_chart(profile))) == profile.peak_bytes


def test_module_chart_shows_the_largest(profile):
    assert {row["module"] for row in rows(module_chart(profile, limit=4))} == {f"{i}.relu" for i in range(4)}


def test_heatmap_outlines_cells_above_the_limit(sweep):
    assert [row["label"] for row in rows(heatmap_chart(sweep)) if row["stroke"] == OVER] == ["6.00"]


def test_figures_are_saved_by_their_suffix(tmp_path, profile, sweep):
    assert save_figure(timeline_chart(profile), tmp_path / "t.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "<svg" in save_figure(heatmap_chart(sweep), tmp_path / "heatmap.svg").read_text()[:200]
    assert "layer" in json.loads(save_figure(module_chart(profile), tmp_path / "modules.json").read_text())
    with refused("pie.bmp", ".png"):
        save_figure(pie_chart(profile), tmp_path / "pie.bmp")


@pytest.mark.parametrize("missing", ["altair", "vl_convert"])
def test_a_missing_package_names_the_extra(monkeypatch, tmp_path, profile, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with refused("lowtide[report]", kind=MissingExtra):
        save_figure(pie_chart(profile), tmp_path / "pie.png")
