"""Profiles, comparisons and sweeps as charts, saved as PNG or SVG without a browser or a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import LowtideError, MissingExtra
from lowtide.profiling.profile import Comparison, Profile
from lowtide.reporting.palette import AFTER, BEFORE, COLORS, OVER, STACK, heat, ink
from lowtide.reporting.tables import buckets, grid, holders, phase_runs, short_op
from lowtide.sizes import format_size
from lowtide.tracing.graph import Category

if TYPE_CHECKING:
    import altair as alt

    from lowtide.profiling.sweep import Cell, Sweep

WIDTH, HEIGHT = 760, 320
POINTS = 600  # columns of a timeline: more than that is thinner than a pixel
MODULES = 15
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"

Row = dict[str, Any]


def timeline_chart(profile: Profile) -> alt.LayerChart:
    """Bytes over the step, stacked by category, with the phases and the peak marked."""
    alt = _altair()
    unit, scale = _unit(profile.peak_bytes)
    timeline = profile.timeline
    present: list[Category] = [c for c in STACK if timeline.by_category[c].any()]
    rows: list[Row] = [
        {"op": x, "category": c, "order": i, "size": int(timeline.by_category[c][op]) / scale}
        for i, c in enumerate(present)
        for x, op in _steps(timeline.allocated)
    ]
    area = _chart(alt, rows).mark_area(interpolate="step-after", opacity=1)
    area = area.encode(
        x=_op_axis(alt, len(timeline.allocated)),
        y=alt.Y("size:Q", title=f"allocated ({unit})", stack="zero"),
        color=_category_color(alt, present),
        order=alt.Order("order:Q"),
    )
    where = profile.graph.ops[profile.peak_op] if profile.graph.ops else None
    detail = f" in {where.phase}: {short_op(where.name)} {where.module}" if where else ""
    title = alt.TitleParams(
        profile.name or "step", subtitle=f"{profile.hardware}, peak {format_size(profile.peak_bytes)}{detail}"
    )
    return _styled(alt.layer(area, *_phase_marks(alt, profile), _peak_mark(alt, profile, scale)), title)


def pie_chart(profile: Profile) -> alt.LayerChart:
    """The memory at the peak by category."""
    alt = _altair()
    rows: list[Row] = [
        {
            "category": c,
            "order": i,
            "size": size,
            "label": f"{format_size(size)}, {size / profile.peak_bytes:.0%}",
            "shown": size >= 0.03 * profile.peak_bytes,  # a sliver has no room for a label
        }
        for i, c in enumerate(STACK)
        if (size := profile.by_category.get(c, 0))
    ]
    base = _chart(alt, rows).encode(
        theta=alt.Theta("size:Q", stack=True),
        order=alt.Order("order:Q"),
        color=_category_color(alt, [row["category"] for row in rows]),
    )
    pie = base.mark_arc(innerRadius=75, outerRadius=130, stroke="white", strokeWidth=1.5)
    labels = base.mark_text(radius=172, fontSize=11, fill="#333").encode(
        text=alt.condition("datum.shown", alt.Text("label:N"), alt.value(""))
    )
    middle = _chart(alt, [{"text": format_size(profile.peak_bytes)}])
    total = middle.mark_text(fontSize=20, fontWeight=600).encode(text="text:N")
    caption = middle.mark_text(fontSize=11, fill="#666", dy=18).encode(text=alt.value("allocated peak"))
    title = alt.TitleParams("Memory at the peak", subtitle=f"{profile.name or 'step'} on {profile.hardware}")
    return _styled(alt.layer(pie, labels, total, caption), title, width=400, height=400)


def module_chart(profile: Profile, limit: int = MODULES) -> alt.LayerChart:
    """The modules that hold most at the peak, each with its own share by category."""
    alt = _altair()
    held = holders(profile, limit)
    unit, scale = _unit(held[0].bytes if held else 0)
    rows: list[Row] = [
        {"module": row.path or "(model)", "category": c, "order": i, "size": row.sizes[c] / scale}
        for row in held
        for i, c in enumerate(STACK)
        if c in row.sizes
    ]
    bars = _chart(alt, rows).mark_bar()
    bars = bars.encode(
        x=alt.X("size:Q", title=f"held at the peak ({unit})", stack="zero"),
        y=alt.Y(
            "module:N",
            sort=[row.path or "(model)" for row in held],
            title=None,
            axis=alt.Axis(labelLimit=320),
        ),
        color=_category_color(alt, [c for c in STACK if any(c in row.sizes for row in held)]),
        order=alt.Order("order:Q"),
    )
    title = alt.TitleParams("Modules at the peak", subtitle=f"{profile.name or 'step'} on {profile.hardware}")
    return _styled(alt.layer(bars), title, height=max(60, 22 * len(held)))


def comparison_chart(comparison: Comparison) -> alt.LayerChart:
    """The allocated bytes before and after on one axis: the share of the step's ops against bytes."""
    alt = _altair()
    before, after = comparison.before, comparison.after
    names = _distinct(before.name or "before", after.name or "after")
    unit, scale = _unit(max(before.peak_bytes, after.peak_bytes))
    rows: list[Row] = []
    peaks: list[Row] = []
    for name, profile in zip(names, (before, after), strict=True):
        live = profile.timeline.allocated
        rows += [{"step": x / len(live), "size": int(live[op]) / scale, "run": name} for x, op in _steps(live)]
        label = f"{name}: {format_size(profile.peak_bytes)}"
        peaks.append({"size": profile.peak_bytes / scale, "run": name, "label": label})
    color = alt.Color("run:N", title=None, scale=alt.Scale(domain=list(names), range=[BEFORE, AFTER]))
    y = alt.Y("size:Q", title=f"allocated ({unit})")
    x = alt.X("step:Q", title="share of the step's ops", axis=alt.Axis(format="%"))
    areas = _chart(alt, rows).mark_area(interpolate="step-after", fillOpacity=0.25, line={"strokeWidth": 1.5})
    areas = areas.encode(x=x, y=y.stack(None), color=color)
    rules = _chart(alt, peaks).mark_rule(strokeDash=[4, 3]).encode(y="size:Q", color=color)
    labels = _chart(alt, peaks).mark_text(align="right", dx=-4, dy=-7, fontWeight=600)
    labels = labels.encode(x=alt.value(WIDTH), y="size:Q", text="label:N", color=color)
    change = comparison.saved_bytes / max(before.peak_bytes, 1)
    subtitle = f"{after.hardware}, peak {abs(change):.0%} {'lower' if change >= 0 else 'higher'}"
    return _styled(alt.layer(areas, rules, labels), alt.TitleParams("Before and after", subtitle=subtitle))


def heatmap_chart(sweep: Sweep) -> alt.LayerChart:
    """The allocated peak at every point of a sweep; cells above the limit are outlined in red."""
    return _heatmap(sweep, "Allocated peak", attrgetter("peak_bytes"))


def activations_chart(sweep: Sweep) -> alt.LayerChart:
    """The same of the activations alone: what is kept for the backward pass."""
    return _heatmap(sweep, "Activations", attrgetter("saved_bytes"))


def _heatmap(sweep: Sweep, what: str, size: Callable[[Cell], int]) -> alt.LayerChart:
    alt = _altair()
    layout = grid(sweep, size)
    rows: list[Row] = []
    for y, cells in zip(layout.rows, layout.cells, strict=True):
        for x, cell in zip(layout.columns, cells, strict=True):
            if cell is not None:
                over, share = layout.over(size(cell)), layout.share(size(cell))
                look = ("#ffffff", OVER, OVER) if over else (heat(share), heat(share), ink(share))
                rows.append(
                    {"x": x, "y": y, "label": layout.label(size(cell)), "over": over}
                    | dict(zip(("fill", "stroke", "ink"), look, strict=True))
                )
    gaps = alt.Scale(paddingInner=0.06)
    base = _chart(alt, rows).encode(
        x=alt.X(
            "x:O",
            title=layout.column_axis,
            sort=list(layout.columns),
            axis=_bare_axis(alt, labelAngle=0),
            scale=gaps,
        ),
        y=alt.Y("y:O", title=layout.row_axis or None, sort=list(layout.rows), axis=_bare_axis(alt), scale=gaps)
        if layout.row_axis
        else alt.Y("y:O", axis=None),
    )
    boxes = base.mark_rect(strokeWidth=2, cornerRadius=3).encode(
        fill=alt.Fill("fill:N", scale=None, legend=None),
        stroke=alt.Stroke("stroke:N", scale=None, legend=None),
    )
    labels = base.mark_text(fontSize=13, fontWeight=600).encode(
        text="label:N", color=alt.Color("ink:N", scale=None, legend=None)
    )
    subtitle = f"{sweep.hardware}, in {layout.unit}"
    if sweep.limit_bytes is not None:
        subtitle += f"; red is above {layout.label(sweep.limit_bytes)} {layout.unit}"
    title = alt.TitleParams(f"{what} of {sweep.name or 'the step'}", subtitle=subtitle)
    width, height = max(220, 72 * len(layout.columns)), 44 * len(layout.rows)
    return _styled(alt.layer(boxes, labels), title, width=width, height=height)


def save_figure(chart: alt.LayerChart, path: str | Path) -> Path:
    """Write a chart as ``.png`` (two pixels a point), ``.svg`` or ``.json`` (Vega-Lite); return the path."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in {".png", ".svg", ".json"}:
        raise LowtideError(f"Cannot write a figure as {path.name!r}", hint="End the name in .png, .svg or .json.")
    specification = chart.to_json()
    if suffix == ".json":
        path.write_text(specification)
        return path
    try:
        import vl_convert
    except ImportError:
        raise MissingExtra("vl-convert-python", extra="report") from None
    if suffix == ".png":
        path.write_bytes(vl_convert.vegalite_to_png(specification, scale=2))
    else:
        path.write_text(vl_convert.vegalite_to_svg(specification))
    return path


def _altair() -> Any:
    try:
        import altair
    except ImportError:
        raise MissingExtra("altair", extra="report") from None
    return altair


def _chart(alt: Any, rows: list[Row]) -> Any:
    # As text: altair would check and copy every number of a list, again and again.
    return alt.Chart(alt.InlineData(values=json.dumps(rows), format=alt.JsonDataFormat(type="json")))


def _styled(chart: Any, title: Any, *, width: int = WIDTH, height: int = HEIGHT) -> Any:
    chart = chart.properties(width=width, height=height, title=title, background="white", padding=16)
    chart = chart.configure(font=FONT).configure_view(stroke=None)
    chart = chart.configure_axis(
        gridColor="#e6e8eb", domainColor="#9aa0a6", tickColor="#9aa0a6", labelColor="#444", titleColor="#444",
        titleFontWeight=500,
    )  # fmt: skip
    chart = chart.configure_title(anchor="start", fontSize=15, subtitleColor="#666", subtitleFontSize=12, offset=14)
    return chart.configure_legend(labelColor="#333", titleColor="#666", symbolType="square")


def _category_color(alt: Any, present: list[Category]) -> Any:
    scale = alt.Scale(domain=present, range=[COLORS[c] for c in present])
    return alt.Color("category:N", title=None, scale=scale)


def _steps(live: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Where each step of a curve starts and the op that it shows, then where the last one ends."""
    ops = buckets(live, min(POINTS, len(live)))
    return [(op, op) for op in ops] + [(len(live), ops[-1])] if ops else []


def _op_axis(alt: Any, count: int) -> Any:
    return alt.X("op:Q", title="op", scale=alt.Scale(domain=[0, count], nice=False), axis=alt.Axis(grid=False))


def _bare_axis(alt: Any, **options: Any) -> Any:
    return alt.Axis(domain=False, ticks=False, labelFontSize=12, labelPadding=8, **options)


def _phase_marks(alt: Any, profile: Profile) -> list[Any]:
    runs = phase_runs(profile.graph)
    count = len(profile.graph.ops)
    rows: list[Row] = [
        # a phase too short for its name is marked by its line alone
        {"op": run.start, "phase": run.phase if (run.end - run.start) * WIDTH > 56 * count else ""}
        for run in runs
    ]
    base = _chart(alt, rows).encode(x="op:Q")
    rules = base.mark_rule(strokeDash=[2, 3], color="#5f6368")
    names = base.mark_text(align="left", dx=4, dy=-6, fontSize=11, color="#5f6368")
    return [rules, names.encode(text="phase:N", y=alt.value(0))]


def _peak_mark(alt: Any, profile: Profile, scale: int) -> Any:
    point = _chart(alt, [{"op": profile.peak_op + 0.5, "size": profile.peak_bytes / scale}])
    return point.mark_point(shape="triangle-down", filled=True, size=70, color="#202124", yOffset=-7).encode(
        x="op:Q", y="size:Q"
    )


def _unit(size: int) -> tuple[str, int]:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return unit, scale
    return "bytes", 1


def _distinct(before: str, after: str) -> tuple[str, str]:
    return (before, after) if before != after else (f"{before} before", f"{after} after")
