"""Planned steps as charts: when large values are live, and several steps over each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lowtide.profiling.profile import Profile
from lowtide.reporting.charts import (
    HEIGHT,
    Row,
    alt,
    chart_of,
    finished,
    op_axis,
    phase_marks,
    stacked_area,
    steps_of,
    styled,
    unit_of,
)
from lowtide.reporting.palette import COLORS, RECOMPUTED, RUNS, STACK
from lowtide.sizes import format_size
from lowtide.tracing.call_sites import short_name
from lowtide.tracing.graph import STATIC, Category, Storage

WIDE = 900
VALUES = 40


@dataclass(frozen=True)
class Overlay:
    """Several traces of one step, the plain one first, each with its budget; and a table of results."""

    title: str
    profiles: tuple[Profile, ...]
    budgets: tuple[int | None, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()  # one for each profile
    lines: tuple[str, ...] = ()  # below the table


def lifetimes_chart(profile: Profile, limit: int = VALUES) -> Any:
    """Draw the lifetimes of the large values of forward and backward, below the curve of all bytes.

    A row is a value, a bar one of its lifetimes: a value that is freed and recomputed has several.
    """
    end = _end(profile)
    values = large_values(profile, limit)
    names = [_name(lifetimes[0]) for lifetimes in values]
    rows: list[Row] = [
        {"value": name, "op": storage.birth, "end": min(storage.death, end), "category": _kind(profile, storage)}
        for name, lifetimes in zip(names, values, strict=True)
        for storage in lifetimes
    ]
    present: list[Category] = [c for c in STACK if any(row["category"] == c for row in rows)]
    colors = alt.Scale(domain=[*present, "recomputed"], range=[*(COLORS[c] for c in present), RECOMPUTED])
    axis = op_axis(end)
    bars = chart_of(rows).mark_bar(height=8, cornerRadius=1)
    bars = bars.encode(
        x=axis,
        x2="end:Q",
        y=alt.Y("value:N", sort=names, title=None, axis=alt.Axis(labelLimit=300, labelFontSize=10, grid=True)),
        color=alt.Color("category:N", title="values", scale=colors),
    )
    title = alt.TitleParams(
        "Lifetimes of values",
        subtitle=f"{len(values)} values that hold most bytes for longest, of {profile.name or 'the step'}",
    )
    marks = phase_marks(profile, end)
    curve = alt.layer(stacked_area(profile, axis.title(None), end, legend="bytes"), *marks)
    above = curve.properties(width=WIDE, height=150, title=title)
    below = alt.layer(bars, *marks).properties(width=WIDE, height=12 * max(len(values), 4))
    return finished(alt.vconcat(above, below).resolve_scale(color="independent"))


def overlay_chart(overlay: Overlay) -> Any:
    """Draw the allocated bytes of several steps on one axis, each with its budget as a dashed line.

    The optimizer's ops are left out where no step has its peak there.
    """
    profiles = overlay.profiles
    unit, scale = unit_of(max(profile.peak_bytes for profile in profiles))
    names = [profile.name for profile in profiles]
    end = max(len(profile.graph.ops) for profile in profiles)
    if all(profile.peak_op < _end(profile) for profile in profiles):
        end = min(end, max(map(_end, profiles)) + end // 50)
    rows: list[Row] = []
    limits: list[Row] = []
    for profile, budget in zip(profiles, overlay.budgets, strict=True):
        live = profile.timeline.allocated[:end]
        rows += [{"op": x, "size": int(live[op]) / scale, "run": profile.name} for x, op in steps_of(live)]
        if budget is not None:
            limits.append({"size": budget / scale, "run": profile.name, "label": f"budget {format_size(budget)}"})
    colors = alt.Scale(domain=names, range=list(RUNS[: len(names)]))
    color = alt.Color("run:N", title=None, scale=colors, sort=names)
    y = alt.Y("size:Q", title=f"allocated ({unit})")
    lines = chart_of(rows).mark_line(interpolate="step-after", strokeWidth=1.6).encode(x=op_axis(end), y=y, color=color)
    rules = chart_of(limits).mark_rule(strokeDash=[5, 4]).encode(y="size:Q", color=color)
    labels = chart_of(limits).mark_text(align="right", dx=-4, dy=-6, fontWeight=600)
    labels = labels.encode(x=alt.value(WIDE), y="size:Q", text="label:N", color=color)
    title = alt.TitleParams(
        "One step, several budgets", subtitle=f"{profiles[0].hardware}, allocated bytes over the ops of a step"
    )
    return styled(alt.layer(lines, rules, labels), title, width=WIDE, height=HEIGHT + 60)


def large_values(profile: Profile, limit: int) -> list[list[Storage]]:
    """The lifetimes of each value that holds most bytes for longest before the optimizer, by first birth."""
    end = _end(profile)
    lifetimes: dict[tuple[str, str, int], list[Storage]] = {}
    for storage in profile.graph.on_device:
        if storage.category not in STATIC and storage.category != "workspace" and storage.birth < end:
            lifetimes.setdefault((storage.label, storage.module, storage.bytes), []).append(storage)

    def byte_ops(storages: list[Storage]) -> int:
        return sum(s.bytes * (min(s.death, end) - s.birth) for s in storages)

    largest = sorted(lifetimes.values(), key=byte_ops, reverse=True)[:limit]
    return sorted(largest, key=lambda storages: storages[0].birth)


def _end(profile: Profile) -> int:
    """The op at which the optimizer starts: programs exclude it."""
    return profile.timeline.phase_starts.get("optimizer", len(profile.graph.ops))


def _name(value: Storage) -> str:
    where = f"{value.module} " if value.module else ""
    return f"{where}{_readable(value)}, {format_size(value.bytes)}"


def _readable(value: Storage) -> str:
    """The op without the parts of its name that only tell overloads apart, and the shape. A gradient has its label."""
    if value.category == "gradient" or not value.made_by:
        return value.label
    op = re.sub(r"^_?(native_)?|_legit_functional|_with_bias", "", short_name(value.made_by))
    return f"{op} {'×'.join(map(str, value.shape))}".strip()


def _kind(profile: Profile, storage: Storage) -> str:
    return "recomputed" if profile.graph.ops[storage.birth].recompute else storage.category
