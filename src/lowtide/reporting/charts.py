"""What all figures share: their size, fonts, axes and marks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import MissingExtra
from lowtide.profiling.profile import Profile
from lowtide.reporting.palette import COLORS
from lowtide.reporting.tables import buckets, phase_runs
from lowtide.tracing.graph import Category

WIDTH, HEIGHT = 760, 320
OPTIMIZER_SHARE = 0.15  # of a timeline's width, at most
POINTS = 600  # columns of a timeline: more than that is thinner than a pixel
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"

Row = dict[str, Any]


def altair_module() -> Any:
    """Altair, or how to install it."""
    try:
        import altair
    except ImportError:
        raise MissingExtra("altair", extra="report") from None
    return altair


def chart_of(alt: Any, rows: list[Row]) -> Any:
    """A chart over these rows."""
    # As text: altair would check and copy every number of a list, again and again.
    return alt.Chart(alt.InlineData(values=json.dumps(rows), format=alt.JsonDataFormat(type="json")))


def styled(chart: Any, title: Any, *, width: int = WIDTH, height: int = HEIGHT) -> Any:
    """A chart with the title, the fonts and the colours of all figures."""
    return finished(chart.properties(width=width, height=height, title=title))


def finished(chart: Any) -> Any:
    """A chart, or several above each other, with the fonts and the colours of all figures."""
    chart = chart.properties(background="white", padding=16)
    chart = chart.configure(font=FONT).configure_view(stroke=None)
    chart = chart.configure_axis(
        gridColor="#e6e8eb", domainColor="#9aa0a6", tickColor="#9aa0a6", labelColor="#444", titleColor="#444",
        titleFontWeight=500,
    )  # fmt: skip
    chart = chart.configure_title(anchor="start", fontSize=15, subtitleColor="#666", subtitleFontSize=12, offset=14)
    return chart.configure_legend(labelColor="#333", titleColor="#666", symbolType="square")


def category_color(alt: Any, present: list[Category]) -> Any:
    """The colours of the categories that are there."""
    scale = alt.Scale(domain=present, range=[COLORS[c] for c in present])
    return alt.Color("category:N", title=None, scale=scale)


def steps_of(live: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Where each step of a curve starts and the op that it shows, then where the last one ends."""
    ops = buckets(live, min(POINTS, len(live)))
    return [(op, op) for op in ops] + [(len(live), ops[-1])] if ops else []


def op_axis(alt: Any, count: int, optimizer_start: int | None = None) -> Any:
    """An axis over the ops of a step, with the optimizer's many small ops in a share of the width at most."""
    scale = alt.Scale(domain=[0, count], nice=False)
    title = "op"
    if optimizer_start and count - optimizer_start > OPTIMIZER_SHARE * count:
        middle = (1 - OPTIMIZER_SHARE) * WIDTH
        scale = alt.Scale(domain=[0, optimizer_start, count], range=[0, middle, WIDTH], nice=False)
        title = "op (the optimizer has a scale of its own)"
    return alt.X("op:Q", title=title, scale=scale, axis=alt.Axis(grid=False, tickCount=10))


def phase_marks(alt: Any, profile: Profile, end: int | None = None) -> list[Any]:
    """Where each phase starts, of those before op ``end``."""
    count = len(profile.graph.ops) if end is None else end
    runs = [run for run in phase_runs(profile.graph) if run.start < count]
    stepping = sum(run.end - run.start for run in runs if run.phase == "optimizer")
    shown = min(count, (count - stepping) / (1 - OPTIMIZER_SHARE)) or count  # what the width would hold at one scale
    rows: list[Row] = [
        # a phase too short for its name is marked by its line alone
        {"op": run.start, "phase": run.phase if (run.end - run.start) * WIDTH > 56 * shown else ""}
        for run in runs
    ]
    base = chart_of(alt, rows).encode(x="op:Q")
    rules = base.mark_rule(strokeDash=[2, 3], color="#5f6368")
    names = base.mark_text(align="left", dx=4, dy=-6, fontSize=11, color="#5f6368")
    return [rules, names.encode(text="phase:N", y=alt.value(0))]


def peak_mark(alt: Any, profile: Profile, scale: int) -> Any:
    """A triangle at the peak."""
    point = chart_of(alt, [{"op": profile.peak_op + 0.5, "size": profile.peak_bytes / scale}])
    return point.mark_point(shape="triangle-down", filled=True, size=70, color="#202124", yOffset=-7).encode(
        x="op:Q", y="size:Q"
    )


def unit_of(size: int) -> tuple[str, int]:
    """The unit in which a size is shown, and its bytes."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return unit, scale
    return "bytes", 1
