"""Parts that figures share: size, fonts, axes, marks; and how a chart becomes SVG inside a page."""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import MissingExtra
from lowtide.profiling.profile import Profile
from lowtide.reporting.palette import COLORS, STACK
from lowtide.reporting.tables import buckets, phase_runs
from lowtide.tracing.graph import Category

WIDTH, HEIGHT = 760, 320
OPTIMIZER_SHARE = 0.15  # of a timeline's width, at most
POINTS = 600  # columns of a timeline; more are thinner than a pixel
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
# Colours of the figures, and the variables of the page's style that replace them.
_THEME = {
    "black": "--text", "#000": "--text", "#000000": "--text", "#202124": "--text", "#333": "--text",
    "#444": "--muted", "#5f6368": "--muted", "#666": "--muted", "#9aa0a6": "--line", "#e6e8eb": "--grid",
}  # fmt: skip

Row = dict[str, Any]


class _LazyPackage:
    """A package of the extra ``report``, imported when it is first used."""

    def __init__(self, module: str, package: str) -> None:
        self._module, self._package = module, package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspection of this object imports nothing
            raise AttributeError(name)
        try:
            return getattr(import_module(self._module), name)
        except ImportError:
            raise MissingExtra(self._package, extra="report") from None


alt: Any = _LazyPackage("altair", "altair")
vl_convert: Any = _LazyPackage("vl_convert", "vl-convert-python")


def chart_of(rows: list[Row]) -> Any:
    # As text: altair would check and copy every number of a list, again and again.
    return alt.Chart(alt.InlineData(values=json.dumps(rows), format=alt.JsonDataFormat(type="json")))


def styled(chart: Any, title: Any, *, width: int = WIDTH, height: int = HEIGHT) -> Any:
    """Give a chart a title, and the fonts and colours of all figures."""
    return finished(chart.properties(width=width, height=height, title=title))


def finished(chart: Any) -> Any:
    """Give one chart, or several stacked ones, the fonts and colours of all figures."""
    chart = chart.properties(background="white", padding=16)
    chart = chart.configure(font=FONT).configure_view(stroke=None)
    chart = chart.configure_axis(
        gridColor="#e6e8eb", domainColor="#9aa0a6", tickColor="#9aa0a6", labelColor="#444", titleColor="#444",
        titleFontWeight=500,
    )  # fmt: skip
    chart = chart.configure_title(anchor="start", fontSize=15, subtitleColor="#666", subtitleFontSize=12, offset=14)
    return chart.configure_legend(labelColor="#333", titleColor="#666", symbolType="square")


def category_color(present: list[Category], title: str | None = None) -> Any:
    """Colour by category, with a legend of the categories that occur."""
    scale = alt.Scale(domain=present, range=[COLORS[c] for c in present])
    return alt.Color("category:N", title=title, scale=scale)


def stacked_area(profile: Profile, x: Any, end: int | None = None, *, legend: str | None = None) -> Any:
    """Draw the bytes before op ``end``, stacked by category."""
    unit, scale = unit_of(profile.peak_bytes)
    timeline = profile.timeline
    present: list[Category] = [c for c in STACK if timeline.by_category[c][:end].any()]
    rows: list[Row] = [
        {"op": place, "category": c, "order": i, "size": int(timeline.by_category[c][op]) / scale}
        for i, c in enumerate(present)
        for place, op in steps_of(timeline.allocated[:end])
    ]
    return (
        chart_of(rows)
        .mark_area(interpolate="step-after", opacity=1)
        .encode(
            x=x,
            y=alt.Y("size:Q", title=f"allocated ({unit})", stack="zero"),
            color=category_color(present, legend),
            order=alt.Order("order:Q"),
        )
    )


def steps_of(live: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Starts of the steps of a curve, each with the op that it shows, then the end of the last one."""
    ops = buckets(live, min(POINTS, len(live)))
    return [(op, op) for op in ops] + [(len(live), ops[-1])] if ops else []


def op_axis(count: int, optimizer_start: int | None = None) -> Any:
    """Build an axis over the ops of a step. The optimizer's many small ops get a limited share of the width."""
    scale = alt.Scale(domain=[0, count], nice=False)
    title = "op"
    if optimizer_start and count - optimizer_start > OPTIMIZER_SHARE * count:
        middle = (1 - OPTIMIZER_SHARE) * WIDTH
        scale = alt.Scale(domain=[0, optimizer_start, count], range=[0, middle, WIDTH], nice=False)
        title = "op (the optimizer has a scale of its own)"
    return alt.X("op:Q", title=title, scale=scale, axis=alt.Axis(grid=False, tickCount=10))


def phase_marks(profile: Profile, end: int | None = None) -> list[Any]:
    """Mark the start of each phase before op ``end``."""
    count = len(profile.graph.ops) if end is None else end
    runs = [run for run in phase_runs(profile.graph) if run.start < count]
    stepping = sum(run.end - run.start for run in runs if run.phase == "optimizer")
    shown = min(count, (count - stepping) / (1 - OPTIMIZER_SHARE)) or count  # ops that fit the width at one scale
    rows: list[Row] = [
        # a phase too short for its name is marked by its line alone
        {"op": run.start, "phase": run.phase if (run.end - run.start) * WIDTH > 56 * shown else ""}
        for run in runs
    ]
    base = chart_of(rows).encode(x="op:Q")
    rules = base.mark_rule(strokeDash=[2, 3], color="#5f6368")
    names = base.mark_text(align="left", dx=4, dy=-6, fontSize=11, color="#5f6368")
    return [rules, names.encode(text="phase:N", y=alt.value(0))]


def unit_of(size: int) -> tuple[str, int]:
    """The unit in which a size is shown, and its bytes."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return unit, scale
    return "bytes", 1


def inline(chart: Any) -> str:
    """Render a chart as SVG for a page. It takes the page's width and colours, light or dark.

    >>> svg = inline(alt.Chart(alt.InlineData(values=[{"x": 1}])).mark_point().encode(x="x:Q"))
    >>> svg.startswith("<svg class"), "white" in svg
    (True, False)
    """
    svg = vl_convert.vegalite_to_svg(chart.properties(background="transparent").to_json())
    svg = re.sub(r'(fill|stroke)="(#[0-9a-f]{3,6}|black)"', _themed, svg[svg.index("<svg") :])
    return re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg class="figure" viewBox="\1">', svg, count=1)


def _themed(match: re.Match[str]) -> str:
    attribute, color = match.groups()
    return f'{attribute}="var({_THEME[color]})"' if color in _THEME else match[0]
