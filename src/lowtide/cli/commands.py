"""The commands of ``lowtide``: each loads a step, calls one verb of the library, and shows the result."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer
from rich.console import Console

from lowtide.cli.options import (
    Allow,
    AsJson,
    Budget,
    Compile,
    Device,
    Engine,
    Fake,
    Forbid,
    Here,
    Html,
    Outcome,
    Target,
    TargetOptions,
    app,
    command,
    working,
)
from lowtide.errors import PlanError, WorkloadError
from lowtide.loading.arguments import parse_pairs
from lowtide.sizes import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from lowtide.planning import Prediction
    from lowtide.profiling import Profile, Sweep
    from lowtide.workload import Workload

__all__ = ["app"]


@command
def profile(
    target: Target,
    fake: Fake = False,
    device: Device = None,
    html: Html = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write every figure there, as PNG and SVG.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=N,N,...", help="Predict a grid, as batch=8,16,32. One or two axes."),
    ] = None,
    limit: Annotated[
        str | None, typer.Option(help="The limit that --sweep marks and --max-batch fits, such as 16GB.")
    ] = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits.")] = False,
    as_json: AsJson = False,
    **settings: Unpack[TargetOptions],
) -> Outcome:
    """Show where the memory of a training step goes: on a GPU, on a CPU, or without running anything."""
    from lowtide import profiling
    from lowtide.reporting import figures as charts
    from lowtide.reporting import terminal
    from lowtide.reporting.html import check_name

    if html is not None:
        check_name(html)  # before a trace, which may be long
    limit_bytes = None if limit is None else parse_size(limit)
    if max_batch and (limit_bytes is None or sweep or html or figures):
        raise WorkloadError(
            "--max-batch finds one number",
            hint="Write --max-batch --limit 16GB, without --sweep, --html and --figures.",
        )
    if limit_bytes is not None and not (sweep or max_batch):
        raise WorkloadError("--limit has nothing to mark", hint="Add --sweep batch=8,16 or --max-batch.")
    fake = fake or bool(sweep) or max_batch
    make = _loader(target, settings, device=device, fake=fake)
    if max_batch and limit_bytes is not None:
        with working("Looking for the largest batch"):
            largest = profiling.max_batch(make, limit_bytes, device=device)
        if not as_json:
            typer.echo(f"The largest batch that fits {limit} is {largest}.")
        return Outcome({"max_batch": largest, "limit_bytes": limit_bytes})
    if sweep:
        axes = {axis: _numbers(axis, text) for axis, text in parse_pairs(sweep, option="--sweep").items()}
        with terminal.progress("Predicting", math.prod(map(len, axes.values()))) as advance:
            grid = profiling.sweep(
                make, device=device, limit=limit_bytes, progress=lambda done, total: advance(), **axes
            )
        if not as_json:
            terminal.show_sweep(grid)
        _write(grid, html, figures, {"heatmap": charts.heatmap_chart, "activations": charts.activations_chart})
        return Outcome(grid.to_json())
    with working("Predicting a step" if fake else "Tracing a step"):
        profiled = profiling.profile(make(), fake=fake, device=device)
    if not as_json:
        terminal.show(profiled)
    drawn = {"timeline": charts.timeline_chart, "pie": charts.pie_chart, "modules": charts.module_chart}
    _write(profiled, html, figures, drawn)
    return Outcome(profiled.to_json())


@command
def plan(
    target: Target,
    budget: Budget,
    allow: Allow = None,
    forbid: Forbid = None,
    engine: Engine = "auto",
    compile: Compile = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan there, as JSON.")] = None,
    program: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan's program there as text, if it has one."),
    ] = None,
    html: Html = None,
    fake: Fake = False,
    device: Device = None,
    as_json: AsJson = False,
    **settings: Unpack[TargetOptions],
) -> Outcome:
    """Find the fastest step that fits a budget, and say what it changes and why."""
    from lowtide import engines, planning
    from lowtide.planning.baseline import baseline_profile
    from lowtide.planning.engine import AUTO, engines_named
    from lowtide.reporting.html import check_name

    engines_named(engine)  # before a trace, which may be long
    if html is not None:
        check_name(html)
    work = _loader(target, settings, device=device, fake=fake)()
    with working("Profiling the plain step"):
        before = baseline_profile(work, fake=fake, device=device)
    with working("Planning"):
        chosen = engines.plan(
            work, budget, allow=allow or (), forbid=forbid or (), profile=before, fake=fake, device=device,
            engine=engine, compile="auto" if compile is None else compile,
        )  # fmt: skip
    if not as_json:
        typer.echo(chosen.explain())
    if out is not None:
        _parent(out).write_text(json.dumps(chosen.to_json(), indent=2) + "\n", encoding="utf-8")
        typer.echo(f"wrote {out}")
    if program is None and html is None:
        return Outcome(chosen.to_json())
    if program is not None and chosen.program is None:
        captures = next(each.name for each in engines_named(AUTO) if each.captures)
        reason = "The plain step fits" if chosen.is_plain else f"The {chosen.engine} engine runs no program"
        hint = "Name a smaller budget." if chosen.is_plain else f"Add --engine {captures}."
        raise PlanError(f"{reason}, so there is no program to write to {program}", hint=hint)
    with working("Predicting the planned step"):
        prediction = planning.predict_plan(work, chosen, before)
    if program is not None:
        _parent(program).write_text(f"{prediction.program}\n", encoding="utf-8")
        typer.echo(f"wrote {program}")
    _write(prediction, html)
    return Outcome(chosen.to_json())


@command
def train(
    target: Target,
    budget: Budget,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 10,
    allow: Allow = None,
    forbid: Forbid = None,
    engine: Engine = "auto",
    compile: Compile = None,
    device: Here = None,
    as_json: AsJson = False,
    **settings: Unpack[TargetOptions],
) -> Outcome:
    """Plan a step for a budget, check it against the plain one, and train with it on the workload's batch."""
    from lowtide import engines
    from lowtide.profiling.profile import json_ready
    from lowtide.reporting import terminal

    work = _loader(target, settings, device=_here(device))()
    if work.optimizer is None:
        raise WorkloadError(
            f"{target} has no optimizer, so nothing would be trained", hint="Return Workload(..., optimizer)."
        )
    with working("Planning the step, and checking it against the plain one"):
        step = engines.fit(
            work.model, work.loss, work.batch, work.optimizer,
            budget=budget, autocast=work.autocast, allow=allow or (), forbid=forbid or (), engine=engine,
            compile="auto" if compile is None else compile,
        )  # fmt: skip
    if not as_json:
        typer.echo(step.plan.explain())
    losses: list[float] = []
    times: list[float] = []
    with terminal.progress("Training", steps) as advance:
        for _ in range(steps):
            start = time.perf_counter()
            losses.append(float(step(work.batch)))
            times.append(time.perf_counter() - start)
            advance()
    first, *others = times  # the graph engine captures in the first step
    seconds = fmean(others or times)
    on_gpu = step.measured.peak_bytes if step.measured else None
    peak = step.profile().peak_bytes if on_gpu is None else on_gpu
    promised = step.plan.budget_bytes
    if not as_json:
        took = f"{format_seconds(seconds)} a step, {format_seconds(first)} the first"
        typer.echo(f"{steps} steps, {took}: loss {losses[0]:.6g} to {losses[-1]:.6g}")
        typer.echo(f"measured peak {format_size(peak)} of {format_size(promised)}")
    data = {
        "losses": json_ready(losses),
        "seconds_per_step": seconds,
        "first_step_seconds": first,
        "peak_bytes": peak,
        "plan": step.plan.to_json(),
    }
    return Outcome(data, code=int(peak > promised))


@command
def verify(
    target: Target,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as lowtide plan --out writes it.")],
    device: Here = None,
    as_json: AsJson = False,
    **settings: Unpack[TargetOptions],
) -> Outcome:
    """Run the plain and the planned step from the same state, and say whether all is as promised."""
    from lowtide import engines
    from lowtide.planning import Plan

    hint = f"Write one: lowtide plan {target} --budget 60% --out {plan}."
    if not plan.is_file():
        raise PlanError(f"There is no file {plan}", hint=hint)
    try:
        chosen = Plan.from_json(plan.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise PlanError(f"{plan} is not a plan: {error}", hint=hint) from error
    work = _loader(target, settings, device=_here(device))()
    with working("Running both steps"):
        verification = engines.verify(work, chosen)
    if not as_json:
        typer.echo(str(verification))
    return Outcome(verification.to_json(), code=int(not verification.ok))


@command
def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Benchmarks to run; without a name, list them.")] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Run every one.")] = False,
    as_json: AsJson = False,
) -> Outcome:
    """List the benchmarks of a source checkout, or run some; rows go to benchmarks/results/."""
    from lowtide.cli.checkout import benchmarks, choose

    known = benchmarks()
    chosen = known if all_of_them else choose(known, names or [])
    if not chosen:
        if not as_json:
            width = max((len(benchmark.name) for benchmark in known), default=0)
            for benchmark in known:
                typer.echo(f"{benchmark.name:<{width}}  {benchmark.question}")
        return Outcome([{"name": b.name, "question": b.question} for b in known])
    rows: dict[str, list[dict[str, str]]] = {}
    failed: list[str] = []
    for benchmark in chosen:
        if not as_json:
            typer.echo(f"{benchmark.name}: {benchmark.question}")
        before = len(benchmark.rows())
        if benchmark.run(quiet=as_json):
            failed.append(benchmark.name)
        rows[benchmark.name] = benchmark.rows()[before:]
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
    return Outcome({"rows": rows, "failed": failed}, code=int(bool(failed)))


@command
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where the report goes.")] = Path("lowtide-demo"),
    as_json: AsJson = False,
) -> Outcome:
    """Train a small ResNet on real digits, plain and under three budgets, with equal losses; under 90 seconds."""
    from lowtide.demo import run

    shown = run(folder, console=Console(stderr=as_json))
    return Outcome(shown.to_json(), code=int(not shown.ok))


def _loader(target: str, settings: TargetOptions, *, device: str | None, fake: bool = False) -> Callable[..., Workload]:
    """Return a function that builds the target: on ``device``, or on the meta device if the step is only predicted."""
    import torch

    from lowtide.loading import make_loader
    from lowtide.profiling.devices import find_device

    if device is not None:
        find_device(device)  # complains of a name that it does not know
    here = device in (None, "cpu") or (device == "cuda" and torch.cuda.is_available())
    args = parse_pairs(settings.pop("arg", None) or [], option="--arg")
    with working(f"Loading {target}"):
        return make_loader(target, args, device=device if here and not fake else "meta", **settings)


def _here(device: str | None) -> str | None:
    """A device that a step can really run on."""
    import torch

    if device not in (None, "cpu", "cuda"):
        raise WorkloadError(
            f"A step cannot run on {device!r} here", hint="Choose cpu or cuda; only plans are predicted."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise WorkloadError("There is no GPU here that torch can use", hint="Leave out --device cuda.")
    return device


def _numbers(axis: str, text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise WorkloadError(f"--sweep {axis}={text} is not a list of numbers", hint=f"Write {axis}=8,16,32.")
    return numbers


def _write(
    subject: Profile | Prediction | Sweep,
    html: Path | None,
    folder: Path | None = None,
    charts: Mapping[str, Callable[[Any], Any]] | None = None,
) -> None:
    """Write the report and the figures that were asked for."""
    from lowtide.reporting import report, save_figure

    if html is not None:
        with working("Writing the report"):
            report(subject, _parent(html))
        typer.echo(f"wrote {html}")
    if folder is not None:
        with working("Drawing"):
            for name, chart in (charts or {}).items():
                for suffix in ("png", "svg"):
                    save_figure(chart(subject), _parent(folder / f"{name}.{suffix}"))
        typer.echo(f"wrote {', '.join(charts or {})} to {folder} as PNG and SVG")


def _parent(path: Path) -> Path:
    """The path, in a folder that exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
