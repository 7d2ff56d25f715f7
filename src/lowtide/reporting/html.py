"""Reports as one HTML file that works offline: the timeline, who holds the bytes, which values are saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from pathlib import Path
from typing import Any

from lowtide.engines.step import Step
from lowtide.errors import LowtideError, MissingExtra
from lowtide.planning.plan import Plan
from lowtide.planning.prediction import Prediction
from lowtide.profiling.profile import Comparison, Profile
from lowtide.profiling.sweep import Sweep
from lowtide.reporting.charts import inline
from lowtide.reporting.embed import embed
from lowtide.reporting.palette import COLORS, RECOMPUTED, RUNS, STACK, heat, ink
from lowtide.reporting.tables import (
    format_shape,
    grid,
    holders,
    saved_changes,
    short_op,
    short_source,
    workspace_rows,
)
from lowtide.reporting.value_timeline import Overlay, lifetimes_chart, overlay_chart
from lowtide.sizes import format_seconds, format_size
from lowtide.version import __version__

Figure = tuple[str, str, str]  # label, value, detail


@dataclass(frozen=True)
class Page:
    """Input of a template. A new kind of subject is a function registered with ``page``, and a template."""

    template: str
    title: str
    tags: tuple[str, ...]  # hardware, versions, source of the figures
    figures: tuple[Figure, ...]  # at the top of the page
    context: dict[str, Any]
    profiles: tuple[Profile, ...] = ()  # the script draws their timelines and tables


def report(subject: object, path: str | Path) -> Path:
    """Write a profile, a comparison, a sweep, a plan or a step as one self-contained HTML file; return its path.

    A ``Prediction``, from ``lowtide.planning.predict_plan``, shows both timelines and the graph engine's program.
    A step is traced once for its report. Missing folders are created.
    """
    path = check_name(Path(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(page(subject)), encoding="utf-8")
    return path


def check_name(path: Path) -> Path:
    """Return the path if its name ends as a page's does."""
    if path.suffix.lower() not in {".html", ".htm"}:
        raise LowtideError(
            f"Cannot write a report as {path.name!r}",
            hint="End the name in .html or .htm; figures, from save_figure, are .png, .svg or .json.",
        )
    return path


@singledispatch
def page(subject: object) -> Page:
    """Build the page of a subject, by its type."""
    raise LowtideError(
        f"There is no report for a {type(subject).__name__}",
        hint="Pass what lowtide.profile, profile.compare, lowtide.sweep, lowtide.plan or lowtide.apply returned.",
    )


def render(content: Page) -> str:
    """Render a page: the template, with the style, the script and the data inside."""
    environment = _environment()

    def source(name: str) -> str:
        return environment.loader.get_source(environment, name)[0]

    return environment.get_template(content.template).render(
        page=content,
        style=source("report.css"),
        script=source("report.js"),
        data=embed(list(content.profiles)),
        version=__version__,
        colors=COLORS,
        **content.context,
    )


@page.register
def _profile_page(profile: Profile) -> Page:
    graph, held = profile.graph, holders(profile, 8)
    most = max((h.bytes for h in held), default=0)
    seconds: tuple[Figure, ...] = ()
    if profile.seconds_source != "none":
        seconds = (("Time of all ops", format_seconds(profile.seconds), profile.seconds_source),)
    return Page(
        template="profile.html",
        title=profile.name or "Training step",
        tags=_tags(profile),
        figures=(
            ("Allocated peak", format_size(profile.peak_bytes), "a memory budget limits this"),
            ("Storage peak", format_size(profile.storage_peak_bytes), "tensors alone, exact to the byte"),
            ("Static", format_size(profile.static_bytes), "allocated between steps"),
            ("Saved for backward", format_size(profile.saved_bytes), "activations"),
            *seconds,
        ),
        context={
            "profile": profile,
            "peak": graph.ops[profile.peak_op] if graph.ops else None,
            "slices": _slices(profile.by_category),
            "holders": [(h.path, h.bytes, _slices(h.sizes, whole=most)) for h in held],
            "workspaces": workspace_rows(profile, 20),
            "outside": _outside(profile),
        },
        profiles=(profile,),
    )


@page.register
def _comparison_page(comparison: Comparison) -> Page:
    before, after = comparison.before, comparison.after
    share = comparison.saved_bytes / max(before.peak_bytes, 1)
    word = "lower" if share >= 0 else "higher"
    names = [before.name or "before", after.name or "after"]
    seconds: tuple[Figure, ...] = ()
    if "none" not in (before.seconds_source, after.seconds_source) and before.seconds:
        change = after.seconds / before.seconds - 1
        cost = f"{format_seconds(before.seconds)} → {format_seconds(after.seconds)}"
        seconds = (("Time of all ops", f"{change:+.0%}", cost),)
    return Page(
        template="comparison.html",
        title=names[0] if names[0] == names[1] else f"{names[0]} → {names[1]}",
        tags=_tags(after),
        figures=(
            (f"Peak {word} by", f"{abs(share):.0%}", format_size(abs(comparison.saved_bytes))),
            ("Peak before", format_size(before.peak_bytes), "allocated"),
            ("Peak after", format_size(after.peak_bytes), "allocated"),
            ("Saved for backward", format_size(after.saved_bytes), f"was {format_size(before.saved_bytes)}"),
            *seconds,
        ),
        context={
            "comparison": comparison,
            "rows": [row for row in comparison.rows() if row[1] or row[2]],
            "changes": saved_changes(comparison),
            "top": max(before.peak_bytes, after.peak_bytes),
        },
        profiles=(before, after),
    )


@page.register
def _sweep_page(sweep: Sweep) -> Page:
    layout = grid(sweep)
    peaks = [cell.peak_bytes for cell in sweep.cells]
    figures: list[Figure] = [
        ("Smallest peak", f"{layout.label(min(peaks, default=0))} {layout.unit}", "allocated"),
        ("Largest peak", f"{layout.label(max(peaks, default=0))} {layout.unit}", "allocated"),
    ]
    if sweep.limit_bytes is not None:
        fits = sum(not layout.over(peak) for peak in peaks)
        figures.append(("Limit", f"{layout.label(sweep.limit_bytes)} {layout.unit}", "of allocated bytes"))
        figures.append(("Within the limit", f"{fits} of {len(peaks)}", "points of the sweep"))
    return Page(
        template="sweep.html",
        title=sweep.name or "Sweep",
        tags=(sweep.hardware, "allocated peak over " + " and ".join(sweep.axes)),
        figures=tuple(figures),
        context={
            "sweep": sweep,
            "layout": layout,
            "top": max([*peaks, sweep.limit_bytes or 0, 1]),
            "present": [c for c in STACK if any(cell.by_category.get(c) for cell in sweep.cells)],
            "slices_of": _slices,
        },
    )


@page.register
def _plan_page(plan: Plan) -> Page:
    plain = plan.baseline
    return Page(
        template="plan.html",
        title=f"A step in {format_size(plan.budget_bytes)}",
        tags=(plan.device, f"{plan.engine} engine", str(plan.fidelity), f"seconds {plan.seconds_source}"),
        figures=(
            ("Budget", format_size(plan.budget_bytes), "the largest peak allowed"),
            ("Planned peak", format_size(plan.peak_bytes), f"plain {format_size(plain.peak_bytes)}"),
            ("Planned time", format_seconds(plan.seconds), f"plain {format_seconds(plain.seconds)}"),
        ),
        context={"plan": plan},
    )


@page.register
def _prediction_page(prediction: Prediction) -> Page:
    plan, before, after = prediction.plan, prediction.before, prediction.after
    compared = page(prediction.comparison)
    seconds: tuple[Figure, ...] = ()
    if plan.seconds_source != "none":
        # The plan's seconds: those of the ops were measured in one step and modelled for the other.
        cost = f"{format_seconds(plan.baseline.seconds)} plain; {plan.seconds_source}"
        seconds = (("Planned time", format_seconds(plan.seconds), cost),)
    return replace(
        compared,
        template="prediction.html",
        title=f"{before.name or 'A step'} in {format_size(plan.budget_bytes)}",
        tags=(*_tags(before), f"{plan.engine} engine", str(plan.fidelity)),
        figures=(
            ("Budget", format_size(plan.budget_bytes), "the largest peak allowed"),
            ("Planned peak", format_size(after.peak_bytes), f"plain {format_size(before.peak_bytes)}"),
            ("Saved for backward", format_size(after.saved_bytes), f"plain {format_size(before.saved_bytes)}"),
            *seconds,
        ),
        context={
            **compared.context,
            "plan": plan,
            "stages": prediction.stages,
            "recomputed": RECOMPUTED,
            "lifetimes": inline(lifetimes_chart(after)) if prediction.program is not None else "",
        },
    )


@page.register
def _overlay_page(overlay: Overlay) -> Page:
    first, *rest = overlay.profiles
    return Page(
        template="overlay.html",
        title=overlay.title,
        tags=_tags(first),
        figures=(
            ("Plain peak", format_size(first.peak_bytes), "allocated"),
            *(
                (profile.name, format_size(profile.peak_bytes), _share(profile, first, budget))
                for profile, budget in zip(rest, overlay.budgets[1:], strict=True)
            ),
        ),
        context={
            "overlay": overlay,
            "chart": inline(overlay_chart(overlay)),
            "runs": RUNS,
            "top": max(profile.peak_bytes for profile in overlay.profiles),
        },
        profiles=overlay.profiles,
    )


@page.register
def _step_page(step: Step) -> Page:
    shown = page(step.profile())
    budget = f"planned for {format_size(step.plan.budget_bytes)}"
    return replace(shown, tags=(*shown.tags, budget))


def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("jinja2", extra="report") from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lowtide.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": format_size,
        "seconds": format_seconds,
        "shape": format_shape,
        "op": short_op,
        "source": short_source,
        "heat": heat,
        "ink": ink,
    }
    return environment


def _tags(profile: Profile) -> tuple[str, ...]:
    how = "predicted without running" if profile.graph.fake else "measured"
    versions = (f"{name} {version}" for name, version in profile.versions.items())
    return (profile.hardware, how, *versions)


def _share(profile: Profile, plain: Profile, budget: int | None) -> str:
    share = f"{profile.peak_bytes / max(plain.peak_bytes, 1):.0%} of the plain peak"
    return share if budget is None else f"{share}, budget {format_size(budget)}"


@dataclass(frozen=True)
class BarSlice:
    """A part of a whole in percent, for bars and the pie."""

    name: str
    color: str
    bytes: int
    start: float
    share: float


def _slices(sizes: Mapping[Any, int], whole: int = 0) -> list[BarSlice]:
    return _side_by_side([(c, COLORS[c], sizes[c]) for c in STACK if sizes.get(c)], whole)


def _side_by_side(parts: Sequence[tuple[str, str, int]], whole: int) -> list[BarSlice]:
    """Turn names, colours and sizes into slices of a whole, one after the other."""
    percent = 100 / max(whole, sum(size for *_, size in parts), 1)
    slices: list[BarSlice] = []
    start = 0
    for name, color, size in parts:
        slices.append(BarSlice(name, color, size, start * percent, size * percent))
        start += size
    return slices


def _outside(profile: Profile) -> list[BarSlice]:
    """Parts of the GPU's memory, from the allocated peak outwards; empty where it could not be read."""
    outside = profile.outside
    if outside is None or not outside.device_bytes:
        return []
    others = profile.other_bytes
    cached = max(0, outside.reserved_bytes - profile.peak_bytes - others)
    parts = [
        ("allocated by PyTorch at the peak", COLORS["parameter"], profile.peak_bytes),
        *([("other tensors of this process", COLORS["input"], others)] if others else ()),
        ("reserved by PyTorch, not allocated", COLORS["optimizer state"], cached),
        ("CUDA context and libraries", COLORS["gradient"], outside.context_bytes),
        ("other processes", COLORS["buffer"], outside.other_bytes),
    ]
    return _side_by_side(parts, outside.device_bytes)
