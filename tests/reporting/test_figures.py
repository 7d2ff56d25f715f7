import json
import sys

import pytest
import torch

from lowtide import Workload, profile
from lowtide.errors import LowtideError, MissingExtra
from lowtide.reporting.figures import (
    heatmap_chart,
    module_chart,
    pie_chart,
    save_figure,
    timeline_chart,
)
from lowtide.reporting.palette import COLORS, OVER

MIB = 2**20


def rows(chart):
    """The data of the first layer; altair keeps it beside the layers, under a name."""
    specification = json.loads(chart.to_json())
    data = specification["layer"][0].get("data") or specification["data"]
    return json.loads(specification["datasets"][data["name"]])


def test_timeline_reaches_the_peak(profile):
    stacked: dict[int, float] = {}
    for row in rows(timeline_chart(profile)):
        stacked[row["op"]] = stacked.get(row["op"], 0) + row["size"]
    assert max(stacked.values()) * MIB == profile.peak_bytes
    assert max(stacked) == len(profile.graph.ops)


def test_a_long_timeline_is_thinned_and_keeps_its_peak(make_profile):
    profile = make_profile(blocks=400)
    drawn = rows(timeline_chart(profile))
    assert len({row["op"] for row in drawn}) <= 601
    assert profile.peak_op in {row["op"] for row in drawn}


def test_pie_adds_up_to_the_peak(profile):
    assert sum(row["size"] for row in rows(pie_chart(profile))) == profile.peak_bytes


def test_module_chart_shows_the_largest_first(profile):
    drawn = rows(module_chart(profile, limit=4))
    assert {row["module"] for row in drawn} == {f"{i}.relu" for i in range(4)}


def test_heatmap_outlines_cells_above_the_limit(sweep):
    drawn = rows(heatmap_chart(sweep))
    assert [row["label"] for row in drawn if row["stroke"] == OVER] == ["6.00"]


def test_figures_share_the_palette(profile):
    text = timeline_chart(profile).to_json()
    assert COLORS["activation"] in text


def test_figures_are_saved_by_their_suffix(tmp_path, profile, sweep):
    charts = {
        "timeline": timeline_chart(profile),
        "pie": pie_chart(profile),
        "modules": module_chart(profile),
        "heatmap": heatmap_chart(sweep),
    }
    for name, chart in charts.items():
        assert save_figure(chart, tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "<svg" in save_figure(charts["pie"], tmp_path / "pie.svg").read_text()[:200]
    assert "layer" in json.loads(save_figure(charts["pie"], tmp_path / "pie.json").read_text())


def test_an_unknown_suffix_is_refused(tmp_path, profile):
    with pytest.raises(LowtideError, match=r"\.png, \.svg or \.json"):
        save_figure(pie_chart(profile), tmp_path / "pie.bmp")


@pytest.mark.parametrize("missing", ["altair", "vl_convert"])
def test_a_missing_package_names_the_extra(monkeypatch, tmp_path, profile, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtra, match=r"lowtide\[report\]"):
        save_figure(pie_chart(profile), tmp_path / "pie.png")


def test_the_optimizer_has_its_own_scale_on_a_timeline():
    weights = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(weights.parameters(), foreach=False)
    found = profile(Workload(weights, lambda model, x: model(x).sum(), torch.ones(2, 8), optimizer))
    start, count = found.timeline.phase_starts["optimizer"], len(found.graph.ops)
    assert count - start > 0.5 * count
    scale = timeline_chart(found).to_dict()["layer"][0]["encoding"]["x"]["scale"]
    assert scale["domain"] == [0, start, count]
    assert scale["range"][1] >= 0.8 * scale["range"][2]


def test_a_timeline_without_an_optimizer_has_one_scale():
    found = profile(Workload(torch.nn.Linear(8, 8), lambda model, x: model(x).sum(), torch.ones(2, 8)))
    assert timeline_chart(found).to_dict()["layer"][0]["encoding"]["x"]["scale"]["domain"] == [0, len(found.graph.ops)]
