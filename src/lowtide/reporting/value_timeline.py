"""Planned steps as charts: which large values live when, and several steps over each other."""

from __future__ import annotations

import re
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
from lowtide.tracing.graph import STATIC, Category, Storage

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
    """From when to when the large values of forward and backward live, below the bytes that all add up to.

    A row is a value, a bar one of its lives: a value that is let go and made again has several.
    """
    alt = altair_module()
    end = _end(profile)
    values = large_values(profile, limit)
    names = [_named(lives[0]) for lives in values]
    rows: list[Row] = [
        {"value": name, "op": life.birth, "end": min(life.death, end), "category": _kind(profile, life)}
        for name, lives in zip(names, values, strict=True)
        for life in lives
    ]
    present: list[Category] = [c for c in STACK if any(row["category"] == c for row in rows)]
    colors = alt.Scale(domain=[*present, MADE_AGAIN], range=[*(COLORS[c] for c in present), AGAIN])
    axis = op_axis(alt, end)
    bars = chart_of(alt, rows).mark_bar(height=8, cornerRadius=1)
    bars = bars.encode(
        x=axis,
        x2="end:Q",
        y=alt.Y("value:N", sort=names, title=None, axis=alt.Axis(labelLimit=300, labelFontSize=10, grid=True)),
        color=alt.Color("category:N", title="values", scale=colors),
    )
    lives = alt.layer(bars, *phase_marks(alt, profile, end)).properties(width=WIDE, height=12 * max(len(values), 4))
    title = alt.TitleParams(
        "What lives when",
        subtitle=f"{len(values)} values that hold most bytes for longest, of {profile.name or 'the step'}",
    )
    both = alt.vconcat(_curve(alt, profile).properties(title=title), lives).resolve_scale(color="independent")
    return finished(both)


def overlay_chart(overlay: Overlay) -> alt.LayerChart:
    """The allocated bytes of several steps on one axis, each with its budget as a dashed line.

    The optimizer's ops are left out where no step has its peak there.
    """
    alt = altair_module()
    profiles, budgets = overlay.profiles, overlay.budgets
    unit, scale = unit_of(max(profile.peak_bytes for profile in profiles))
    names = [profile.name for profile in profiles]
    end = max(len(profile.graph.ops) for profile in profiles)
    if all(profile.peak_op < _end(profile) for profile in profiles):
        end = min(end, max(map(_end, profiles)) + end // 50)
    rows: list[Row] = []
    limits: list[Row] = []
    for profile, budget in zip(profiles, budgets, strict=True):
        live = profile.timeline.allocated[:end]
        rows += [{"op": x, "size": int(live[op]) / scale, "run": profile.name} for x, op in steps_of(live)]
        if budget is not None:
            text = f"budget {format_size(budget)}"
            limits.append({"size": budget / scale, "run": profile.name, "label": text})
    colors = alt.Scale(domain=names, range=list(RUNS[: len(names)]))
    color = alt.Color("run:N", title=None, scale=colors, sort=names)
    x = op_axis(alt, end)
    y = alt.Y("size:Q", title=f"allocated ({unit})")
    lines = chart_of(alt, rows).mark_line(interpolate="step-after", strokeWidth=1.6).encode(x=x, y=y, color=color)
    rules = chart_of(alt, limits).mark_rule(strokeDash=[5, 4]).encode(y="size:Q", color=color)
    labels = chart_of(alt, limits).mark_text(align="right", dx=-4, dy=-6, fontWeight=600)
    labels = labels.encode(x=alt.value(WIDE), y="size:Q", text="label:N", color=color)
    title = alt.TitleParams(
        "One step, several budgets", subtitle=f"{profiles[0].hardware}, allocated bytes over the ops of a step"
    )
    return styled(alt.layer(lines, rules, labels), title, width=WIDE, height=HEIGHT + 60)


def large_values(profile: Profile, limit: int) -> list[list[Storage]]:
    """The lives of each value that holds most bytes for longest before the optimizer, in the order of their birth."""
    end = _end(profile)
    lives: dict[tuple[str, str, int], list[Storage]] = {}
    for storage in profile.graph.on_device:
        if storage.category not in STATIC and storage.category != "workspace" and storage.birth < end:
            lives.setdefault((storage.label, storage.module, storage.bytes), []).append(storage)
    held = {key: sum(s.bytes * (min(s.death, end) - s.birth) for s in found) for key, found in lives.items()}
    chosen = sorted(lives, key=lambda key: held[key], reverse=True)[:limit]
    return sorted((lives[key] for key in chosen), key=lambda found: found[0].birth)


def _end(profile: Profile) -> int:
    """Where the optimizer starts: what it makes and lets go is no matter of a program."""
    return profile.timeline.phase_starts.get("optimizer", len(profile.graph.ops))


def _named(value: Storage) -> str:
    where = f"{value.module} " if value.module else ""
    return f"{where}{_readable(value.label)}, {format_size(value.bytes)}"


def _readable(label: str) -> str:
    """A captured op's name without what only tells its overloads apart, and its shape if it has one.

    >>> _readable("_native_batch_norm_legit_functional_2 []"), _readable("relu [8, 4]")
    ('batch_norm_2', 'relu 8×4')
    """
    name, _, shape = label.partition(" ")
    name = re.sub(r"^_?(native_)?|_legit_functional|_with_bias", "", name)
    return f"{name} {shape[1:-1].replace(', ', '×')}".strip()


def _kind(profile: Profile, life: Storage) -> str:
    return MADE_AGAIN if profile.graph.ops[life.birth].recompute else life.category


def _curve(alt: Any, profile: Profile) -> Any:
    unit, scale = unit_of(profile.peak_bytes)
    timeline, end = profile.timeline, _end(profile)
    present: list[Category] = [c for c in STACK if timeline.by_category[c][:end].any()]
    rows: list[Row] = [
        {"op": x, "category": c, "order": i, "size": int(timeline.by_category[c][op]) / scale}
        for i, c in enumerate(present)
        for x, op in steps_of(timeline.allocated[:end])
    ]
    area = chart_of(alt, rows).mark_area(interpolate="step-after", opacity=1)
    area = area.encode(
        x=op_axis(alt, end).title(None),
        y=alt.Y("size:Q", title=f"allocated ({unit})", stack="zero"),
        color=category_color(alt, present).title("bytes"),
        order=alt.Order("order:Q"),
    )
    return alt.layer(area, *phase_marks(alt, profile, end)).properties(width=WIDE, height=150)
