"""Profiles, comparisons and sweeps as charts, saved as PNG or SVG without a browser or a network."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError
from lowtide.profiling.profile import Profile
from lowtide.reporting.charts import (
    Row,
    alt,
    category_color,
    chart_of,
    op_axis,
    phase_marks,
    stacked_area,
    styled,
    unit_of,
    vl_convert,
)
from lowtide.reporting.palette import OVER, STACK, heat, ink
from lowtide.reporting.tables import grid, holders, short_op
from lowtide.sizes import format_size

if TYPE_CHECKING:
    from lowtide.profiling.sweep import Sweep, SweepPoint

MODULES = 15


def timeline_chart(profile: Profile) -> Any:
    """Draw the bytes over the step, stacked by category, with the phases and the peak marked."""
    timeline = profile.timeline
    x = op_axis(len(timeline.allocated), timeline.phase_starts.get("optimizer"))
    size = profile.peak_bytes / unit_of(profile.peak_bytes)[1]
    peak = chart_of([{"op": profile.peak_op + 0.5, "size": size}]).encode(x="op:Q", y="size:Q")
    peak = peak.mark_point(shape="triangle-down", filled=True, size=70, color="#202124", yOffset=-7)
    op = profile.graph.ops[profile.peak_op] if profile.graph.ops else None
    where = f" in {op.phase}: {short_op(op.name)} {op.module}" if op else ""
    title = alt.TitleParams(
        profile.name or "step", subtitle=f"{profile.hardware}, peak {format_size(profile.peak_bytes)}{where}"
    )
    return styled(alt.layer(stacked_area(profile, x), *phase_marks(profile), peak), title)


def pie_chart(profile: Profile) -> Any:
    """Draw the memory at the peak by category."""
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
    base = chart_of(rows).encode(
        theta=alt.Theta("size:Q", stack=True),
        order=alt.Order("order:Q"),
        color=category_color([row["category"] for row in rows]),
    )
    pie = base.mark_arc(innerRadius=75, outerRadius=130, stroke="white", strokeWidth=1.5)
    labels = base.mark_text(radius=172, fontSize=11, fill="#333").encode(
        text=alt.condition("datum.shown", alt.Text("label:N"), alt.value(""))
    )
    middle = chart_of([{"text": format_size(profile.peak_bytes)}])
    total = middle.mark_text(fontSize=20, fontWeight=600).encode(text="text:N")
    caption = middle.mark_text(fontSize=11, fill="#666", dy=18).encode(text=alt.value("allocated peak"))
    title = _title("Memory at the peak", profile)
    return styled(alt.layer(pie, labels, total, caption), title, width=400, height=400)


def module_chart(profile: Profile, limit: int = MODULES) -> Any:
    """Draw the modules that hold most at the peak, each with its own share by category."""
    held = holders(profile, limit)
    unit, scale = unit_of(held[0].bytes if held else 0)
    names = [row.path or "(model)" for row in held]
    rows: list[Row] = [
        {"module": name, "category": c, "order": i, "size": row.sizes[c] / scale}
        for name, row in zip(names, held, strict=True)
        for i, c in enumerate(STACK)
        if c in row.sizes
    ]
    bars = chart_of(rows).mark_bar()
    bars = bars.encode(
        x=alt.X("size:Q", title=f"held at the peak ({unit})", stack="zero"),
        y=alt.Y("module:N", sort=names, title=None, axis=alt.Axis(labelLimit=320)),
        color=category_color([c for c in STACK if any(c in row.sizes for row in held)]),
        order=alt.Order("order:Q"),
    )
    return styled(alt.layer(bars), _title("Modules at the peak", profile), height=max(60, 22 * len(held)))


def heatmap_chart(sweep: Sweep) -> Any:
    """Draw the allocated peak at every point of a sweep. Cells above the limit are outlined in red."""
    return _heatmap(sweep, "Allocated peak", attrgetter("peak_bytes"))


def activations_chart(sweep: Sweep) -> Any:
    """Draw the bytes of activations saved for the backward pass, at every point of a sweep."""
    return _heatmap(sweep, "Activations", attrgetter("saved_bytes"))


def _heatmap(sweep: Sweep, subject: str, size: Callable[[SweepPoint], int]) -> Any:
    layout = grid(sweep, size)
    rows: list[Row] = []
    for y, cells in zip(layout.rows, layout.cells, strict=True):
        for x, cell in zip(layout.columns, cells, strict=True):
            if cell is not None:
                share = layout.share(size(cell))
                over = layout.over(size(cell))
                fill, stroke, text = ("#ffffff", OVER, OVER) if over else (heat(share), heat(share), ink(share))
                label = layout.label(size(cell))
                rows.append({"x": x, "y": y, "label": label, "fill": fill, "stroke": stroke, "ink": text})
    gaps = alt.Scale(paddingInner=0.06)
    axis = alt.Axis(domain=False, ticks=False, labelFontSize=12, labelPadding=8, labelAngle=0)
    x = alt.X("x:O", title=layout.column_axis, sort=list(layout.columns), axis=axis, scale=gaps)
    y = alt.Y("y:O", title=layout.row_axis, sort=list(layout.rows), axis=axis, scale=gaps)
    base = chart_of(rows).encode(x=x, y=y if layout.row_axis else alt.Y("y:O", axis=None))
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
    title = alt.TitleParams(f"{subject} of {sweep.name or 'the step'}", subtitle=subtitle)
    width, height = max(220, 72 * len(layout.columns)), 44 * len(layout.rows)
    return styled(alt.layer(boxes, labels), title, width=width, height=height)


def save_figure(chart: Any, path: str | Path) -> Path:
    """Write a chart as ``.png`` (two pixels a point), ``.svg`` or ``.json`` (Vega-Lite); return the path."""
    path = Path(path)
    specification = chart.to_json()
    match path.suffix.lower():
        case ".json":
            path.write_text(specification)
        case ".png":
            path.write_bytes(vl_convert.vegalite_to_png(specification, scale=2))
        case ".svg":
            path.write_text(vl_convert.vegalite_to_svg(specification))
        case _:
            raise LowtideError(f"Cannot write a figure as {path.name!r}", hint="End the name in .png, .svg or .json.")
    return path


def _title(text: str, profile: Profile) -> Any:
    return alt.TitleParams(text, subtitle=f"{profile.name or 'step'} on {profile.hardware}")
