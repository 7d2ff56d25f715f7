"""Profiles, comparisons and sweeps as charts, saved as PNG or SVG without a browser or a network."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError, MissingExtra
from lowtide.profiling.profile import Profile
from lowtide.reporting.charts import (
    Row,
    altair_module,
    category_color,
    chart_of,
    op_axis,
    peak_mark,
    phase_marks,
    steps_of,
    styled,
    unit_of,
)
from lowtide.reporting.palette import OVER, STACK, heat, ink
from lowtide.reporting.tables import grid, holders, short_op
from lowtide.sizes import format_size
from lowtide.tracing.graph import Category

if TYPE_CHECKING:
    import altair as alt

    from lowtide.profiling.sweep import Sweep, SweepPoint

MODULES = 15


def timeline_chart(profile: Profile) -> alt.LayerChart:
    """Bytes over the step, stacked by category, with the phases and the peak marked."""
    alt = altair_module()
    unit, scale = unit_of(profile.peak_bytes)
    timeline = profile.timeline
    present: list[Category] = [c for c in STACK if timeline.by_category[c].any()]
    rows: list[Row] = [
        {"op": x, "category": c, "order": i, "size": int(timeline.by_category[c][op]) / scale}
        for i, c in enumerate(present)
        for x, op in steps_of(timeline.allocated)
    ]
    area = chart_of(alt, rows).mark_area(interpolate="step-after", opacity=1)
    area = area.encode(
        x=op_axis(alt, len(timeline.allocated), timeline.phase_starts.get("optimizer")),
        y=alt.Y("size:Q", title=f"allocated ({unit})", stack="zero"),
        color=category_color(alt, present),
        order=alt.Order("order:Q"),
    )
    where = profile.graph.ops[profile.peak_op] if profile.graph.ops else None
    detail = f" in {where.phase}: {short_op(where.name)} {where.module}" if where else ""
    title = alt.TitleParams(
        profile.name or "step", subtitle=f"{profile.hardware}, peak {format_size(profile.peak_bytes)}{detail}"
    )
    return styled(alt.layer(area, *phase_marks(alt, profile), peak_mark(alt, profile, scale)), title)


def pie_chart(profile: Profile) -> alt.LayerChart:
    """The memory at the peak by category."""
    alt = altair_module()
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
    base = chart_of(alt, rows).encode(
        theta=alt.Theta("size:Q", stack=True),
        order=alt.Order("order:Q"),
        color=category_color(alt, [row["category"] for row in rows]),
    )
    pie = base.mark_arc(innerRadius=75, outerRadius=130, stroke="white", strokeWidth=1.5)
    labels = base.mark_text(radius=172, fontSize=11, fill="#333").encode(
        text=alt.condition("datum.shown", alt.Text("label:N"), alt.value(""))
    )
    middle = chart_of(alt, [{"text": format_size(profile.peak_bytes)}])
    total = middle.mark_text(fontSize=20, fontWeight=600).encode(text="text:N")
    caption = middle.mark_text(fontSize=11, fill="#666", dy=18).encode(text=alt.value("allocated peak"))
    title = alt.TitleParams("Memory at the peak", subtitle=f"{profile.name or 'step'} on {profile.hardware}")
    return styled(alt.layer(pie, labels, total, caption), title, width=400, height=400)


def module_chart(profile: Profile, limit: int = MODULES) -> alt.LayerChart:
    """The modules that hold most at the peak, each with its own share by category."""
    alt = altair_module()
    held = holders(profile, limit)
    unit, scale = unit_of(held[0].bytes if held else 0)
    rows: list[Row] = [
        {"module": row.path or "(model)", "category": c, "order": i, "size": row.sizes[c] / scale}
        for row in held
        for i, c in enumerate(STACK)
        if c in row.sizes
    ]
    bars = chart_of(alt, rows).mark_bar()
    bars = bars.encode(
        x=alt.X("size:Q", title=f"held at the peak ({unit})", stack="zero"),
        y=alt.Y(
            "module:N",
            sort=[row.path or "(model)" for row in held],
            title=None,
            axis=alt.Axis(labelLimit=320),
        ),
        color=category_color(alt, [c for c in STACK if any(c in row.sizes for row in held)]),
        order=alt.Order("order:Q"),
    )
    title = alt.TitleParams("Modules at the peak", subtitle=f"{profile.name or 'step'} on {profile.hardware}")
    return styled(alt.layer(bars), title, height=max(60, 22 * len(held)))


def heatmap_chart(sweep: Sweep) -> alt.LayerChart:
    """The allocated peak at every point of a sweep; cells above the limit are outlined in red."""
    return _heatmap(sweep, "Allocated peak", attrgetter("peak_bytes"))


def activations_chart(sweep: Sweep) -> alt.LayerChart:
    """The same of the activations alone: what is kept for the backward pass."""
    return _heatmap(sweep, "Activations", attrgetter("saved_bytes"))


def _heatmap(sweep: Sweep, what: str, size: Callable[[SweepPoint], int]) -> alt.LayerChart:
    alt = altair_module()
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
    base = chart_of(alt, rows).encode(
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
    return styled(alt.layer(boxes, labels), title, width=width, height=height)


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


def _bare_axis(alt: Any, **options: Any) -> Any:
    return alt.Axis(domain=False, ticks=False, labelFontSize=12, labelPadding=8, **options)
