"""Planned steps as charts: which large values live when, and several steps over each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.profiling.profile import Profile
from lowtide.reporting.charts import (
    HEIGHT,
    Row,
    altair_module,
    category_color,
    chart_of,
    finished,
    op_axis,
    phase_marks,
    steps_of,
    styled,
    unit_of,
)
from lowtide.reporting.palette import AGAIN, COLORS, RUNS, STACK
from lowtide.sizes import format_size
from lowtide.tracing.graph import STATIC, Storage

if TYPE_CHECKING:
    import altair as alt

WIDE = 900
VALUES = 40
MADE_AGAIN = "made again"


@dataclass(frozen=True)
class Overlay:
    """Several traces of one step, the plain one first, each with its budget; and a table of what was found."""

    title: str
    profiles: tuple[Profile, ...]
    budgets: tuple[int | None, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()  # one for each profile
    lines: tuple[str, ...] = ()  # said below the table


def lives_chart(profile: Profile, limit: int = VALUES) -> alt.VConcatChart:
    """From when to when the large values of a step live, below the bytes that they add up to.

    A row is a value, a bar one of its lives: a value that is let go and made again has several.
    """
    alt = altair_module()
    graph = profile.graph
    values = large_values(profile, limit)
    names = [f"{label}, {format_size(lives[0].bytes)}" for label, lives in values]
    rows: list[Row] = [
        {"value": name, "op": life.birth, "end": life.death, "category": _kind(profile, life)}
        for name, (_, lives) in zip(names, values, strict=True)
        for life in lives
    ]
    kinds = [*(c for c in STACK if any(row["category"] == c for row in rows)), MADE_AGAIN]
    colors = alt.Scale(domain=kinds, range=[AGAIN if kind == MADE_AGAIN else COLORS[kind] for kind in kinds])
    axis = op_axis(alt, len(graph.ops))
    bars = chart_of(alt, rows).mark_bar(height=8, cornerRadius=1)
    bars = bars.encode(
        x=axis,
        x2="end:Q",
        y=alt.Y("value:N", sort=names, title=None, axis=alt.Axis(labelLimit=300, labelFontSize=10, grid=True)),
        color=alt.Color("category:N", title="values", scale=colors),
    )
    lives = alt.layer(bars, *phase_marks(alt, profile)).properties(width=WIDE, height=12 * max(len(values), 4))
    title = alt.TitleParams(
        "What lives when",
        subtitle=f"{len(values)} values that hold most bytes for longest, of {profile.name or 'the step'}",
    )
    both = alt.vconcat(_curve(alt, profile).properties(title=title), lives).resolve_scale(color="independent")
    return finished(both)


def overlay_chart(overlay: Overlay) -> alt.LayerChart:
    """The allocated bytes of several steps on one axis, each with its budget as a dashed line."""
    alt = altair_module()
    profiles, budgets = overlay.profiles, overlay.budgets
    unit, scale = unit_of(max(profile.peak_bytes for profile in profiles))
    names = [profile.name for profile in profiles]
    rows: list[Row] = []
    limits: list[Row] = []
    for profile, budget in zip(profiles, budgets, strict=True):
        live = profile.timeline.allocated
        rows += [{"op": x, "size": int(live[op]) / scale, "run": profile.name} for x, op in steps_of(live)]
        if budget is not None:
            text = f"budget {format_size(budget)}"
            limits.append({"size": budget / scale, "run": profile.name, "label": text})
    colors = alt.Scale(domain=names, range=list(RUNS[: len(names)]))
    color = alt.Color("run:N", title=None, scale=colors, sort=names)
    x = op_axis(alt, max(len(profile.graph.ops) for profile in profiles))
    y = alt.Y("size:Q", title=f"allocated ({unit})")
    lines = chart_of(alt, rows).mark_line(interpolate="step-after", strokeWidth=1.6).encode(x=x, y=y, color=color)
    rules = chart_of(alt, limits).mark_rule(strokeDash=[5, 4]).encode(y="size:Q", color=color)
    labels = chart_of(alt, limits).mark_text(align="right", dx=-4, dy=-6, fontWeight=600)
    labels = labels.encode(x=alt.value(WIDE), y="size:Q", text="label:N", color=color)
    title = alt.TitleParams(
        "One step, several budgets", subtitle=f"{profiles[0].hardware}, allocated bytes over the ops of a step"
    )
    return styled(alt.layer(lines, rules, labels), title, width=WIDE, height=HEIGHT + 60)


def large_values(profile: Profile, limit: int) -> list[tuple[str, list[Storage]]]:
    """The values that hold most bytes for longest, in the order in which they are made, with each of their lives."""
    count = len(profile.graph.ops)
    lives: dict[str, list[Storage]] = {}
    for storage in profile.graph.on_device:
        if storage.category not in STATIC and (storage.birth, storage.death) != (0, count):
            lives.setdefault(storage.label, []).append(storage)
    held = {label: sum(s.bytes * (s.death - s.birth) for s in found) for label, found in lives.items()}
    chosen = sorted(lives, key=lambda label: held[label], reverse=True)[:limit]
    return sorted(((label, lives[label]) for label in chosen), key=lambda value: value[1][0].birth)


def _kind(profile: Profile, life: Storage) -> str:
    return MADE_AGAIN if profile.graph.ops[life.birth].recompute else life.category


def _curve(alt: Any, profile: Profile) -> Any:
    unit, scale = unit_of(profile.peak_bytes)
    timeline = profile.timeline
    present = [c for c in STACK if timeline.by_category[c].any()]
    rows: list[Row] = [
        {"op": x, "category": c, "order": i, "size": int(timeline.by_category[c][op]) / scale}
        for i, c in enumerate(present)
        for x, op in steps_of(timeline.allocated)
    ]
    area = chart_of(alt, rows).mark_area(interpolate="step-after", opacity=1)
    area = area.encode(
        x=op_axis(alt, len(timeline.allocated)).title(None),
        y=alt.Y("size:Q", title=f"allocated ({unit})", stack="zero"),
        color=category_color(alt, present).title("bytes"),
        order=alt.Order("order:Q"),
    )
    return alt.layer(area, *phase_marks(alt, profile)).properties(width=WIDE, height=150)
