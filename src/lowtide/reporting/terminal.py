"""Profiles and sweeps in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from lowtide.errors import MissingExtra
from lowtide.profiling.profile import Profile
from lowtide.reporting.blocks import block_chart
from lowtide.reporting.outline import outline
from lowtide.reporting.palette import COLORS, OVER, STACK, heat, ink
from lowtide.reporting.tables import (
    format_shape,
    grid,
    saved_rows,
    short_op,
    short_source,
    workspace_rows,
)
from lowtide.sizes import format_seconds, format_size

try:
    from rich import box
    from rich.console import Console, Group, RenderableType
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from rich.text import Text
except ImportError:
    raise MissingExtra("rich", extra="cli") from None

if TYPE_CHECKING:
    from lowtide.profiling.sweep import Sweep

# Replacements for block characters and signs where the output is not UTF-8.
ASCII = str.maketrans("█▇▆▅▄▃▂▁■▼╵…×·→↓–•", "#####...#v|~x.>v-*")
RIGHT = {"bytes", "parameters", "saved", "at peak", "seconds", "calls"}


def show(profile: Profile, console: Console | None = None) -> None:
    """Print where the memory goes: the peaks, who holds them and when, which values are saved for backward."""
    console = console or Console()
    _print(
        console,
        _header(profile),
        "",
        _figures(profile),
        "",
        _category_bar(profile, console),
        "",
        block_chart(profile, console),
        _modules(profile),
        _saved(profile, console),
        _workspaces(profile),
        _outside(profile),
        _notes(profile),
    )


def show_sweep(sweep: Sweep, console: Console | None = None) -> None:
    """Print a sweep's allocated peaks as a table of coloured cells. Peaks above the limit stand out."""
    console = console or Console()
    layout = grid(sweep)
    table = Table(box=None, padding=0, header_style="bold", pad_edge=False)
    table.add_column(Text(f"{layout.row_axis} ↓ {layout.column_axis} →" if layout.row_axis else layout.column_axis))
    for column in layout.columns:
        table.add_column(Text(f" {column} "), justify="right")
    for row, cells in zip(layout.rows, layout.cells, strict=True):
        texts = [Text(f"{row}" if layout.row_axis else "peak", "bold")]
        for cell in cells:
            if cell is None:
                texts.append(Text(" – ", "dim"))
            elif layout.over(cell.peak_bytes):
                texts.append(Text(f" {layout.label(cell.peak_bytes)}! ", f"bold {OVER}"))
            else:
                share = layout.share(cell.peak_bytes)
                texts.append(Text(f" {layout.label(cell.peak_bytes)}  ", f"{ink(share)} on {heat(share)}"))
        table.add_row(*texts)
    title = Text.assemble((sweep.name or "sweep", "bold"), f"  {sweep.hardware}  allocated peak in {layout.unit}")
    limit: Text | None = None
    if sweep.limit_bytes is not None:
        bound = f"the limit of {layout.label(sweep.limit_bytes)} {layout.unit}"
        if any(layout.over(cell.peak_bytes) for cell in sweep.cells):
            limit = Text.assemble(("!", f"bold {OVER}"), f" above {bound}")
        else:
            limit = Text(f"all within {bound}")
    _print(console, title, "", table, limit)


@contextmanager
def progress(description: str, total: int) -> Generator[Callable[..., None]]:
    """Show a progress bar on a terminal, nothing elsewhere. Yields a function to call after each part.

    The function ignores its arguments, so that it can be passed on: ``sweep(..., progress=advance)``.

    >>> with progress("Profiling", total=2) as advance:
    ...     advance()
    """
    console = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda *_: bar.advance(task)


def _print(console: Console, *parts: RenderableType | None) -> None:
    plain = console.options.ascii_only  # not UTF-8: a file or a pipe under another code page
    with console.capture() if plain else nullcontext() as captured:
        for part in parts:
            if part is not None:
                console.print(part, highlight=False)
    if captured is not None:
        console.file.write(captured.get().translate(ASCII).encode("ascii", "replace").decode())


def _header(profile: Profile) -> Text:
    how = "predicted without running" if profile.graph.fake else "measured"
    return Text.assemble((profile.name or "step", "bold"), "  ", profile.hardware, ("  " + how, "dim"), overflow="fold")


def _figures(profile: Profile) -> Table:
    figures = [
        ("allocated peak", format_size(profile.peak_bytes)),
        ("storage peak", format_size(profile.storage_peak_bytes)),
        ("static", format_size(profile.static_bytes)),
        ("saved for backward", format_size(profile.saved_bytes)),
    ]
    if profile.seconds_source != "none":
        figures.append((f"ops ({profile.seconds_source})", format_seconds(profile.seconds)))
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(*(Text(value, "bold cyan" if i == 0 else "bold") for i, (_, value) in enumerate(figures)))
    table.add_row(*(Text(name, "dim") for name, _ in figures))
    return table


def _category_bar(profile: Profile, console: Console) -> RenderableType:
    sizes = [profile.by_category.get(category, 0) for category in STACK]
    ends = np.cumsum([0, *sizes]) * min(console.width, 100) / max(profile.peak_bytes, 1)
    bar = Text(no_wrap=True)
    entries: list[Text] = []
    for i, (category, size) in enumerate(zip(STACK, sizes, strict=True)):
        bar.append("█" * (round(ends[i + 1]) - round(ends[i])), COLORS[category])
        if size:
            share = f" {size / max(profile.peak_bytes, 1):.0%}"
            swatch = ("■ ", COLORS[category])
            entries.append(Text.assemble(swatch, f"{category} ", (format_size(size), "bold"), (share, "dim")))
    legend = Table.grid(padding=(0, 3, 0, 0))
    per_row = max(1, min(console.width, 110) // 36)
    for i in range(0, len(entries), per_row):
        legend.add_row(*entries[i : i + per_row])
    return Group(Text("At the peak", "bold"), bar, legend)


def _table(*columns: str) -> Table:
    """Start a table. Sizes stand on the right, and a row takes one line."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False, pad_edge=False)
    for i, column in enumerate(columns):
        is_size = i > 0 and column in RIGHT
        fixed = is_size or i == 0 or column in {"dtype", "phase"}
        table.add_column(column, justify="right" if is_size else "left", no_wrap=fixed, overflow="ellipsis")
    return table


def _cut(text: str, style: str = "") -> Text:
    """Text that is cut on a narrow terminal, never wrapped, so that the sizes beside it stay."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _titled(title: str, table: Table) -> RenderableType | None:
    """Put a table under its title; None for an empty table."""
    return Group(Text(f"\n{title}", "bold"), table) if table.row_count else None


def _modules(profile: Profile) -> RenderableType | None:
    timed = profile.seconds_source != "none"
    table = _table("path", "type", "parameters", "saved", "at peak", *(["seconds"] if timed else []))
    for row in outline(profile.by_module):
        usage = row.usage
        sizes = (_size(usage.parameter_bytes), _size(usage.saved_bytes), _size(usage.peak_bytes))
        table.add_row(
            Text("  " * row.depth + row.name, "" if row.type else "dim"),
            _cut(row.type, "dim"),
            *sizes,
            *([format_seconds(usage.seconds) if usage.seconds else "·"] if timed else []),
        )
    return _titled("Modules", table)


def _saved(profile: Profile, console: Console, limit: int = 10) -> RenderableType | None:
    rows = [row for row in saved_rows(profile) if row.category == "activation"]
    wide = console.width >= 100
    table = _table("shape", "dtype", "bytes", "computed in", "read by", *(["source"] if wide else []))
    for row in rows[:limit]:
        extra = len(row.needed_by) - 1
        table.add_row(
            Text(format_shape(row.shape)),
            Text(row.dtype, "dim"),
            format_size(row.bytes),
            _cut(" · ".join(filter(None, (row.made_in, short_op(row.made_by))))),
            _cut(short_op(row.needed_by[0]) + (f" +{extra}" if extra else "")),
            *([_cut(short_source(row.source), "dim")] if wide else []),
        )
    count = f"{len(rows)} storages, {format_size(profile.saved_bytes)}"
    return _titled(f"Saved for the backward pass: {count}", table)


def _workspaces(profile: Profile, limit: int = 5) -> RenderableType | None:
    table = _table("op", "bytes", "calls", "phase", "inputs", "first in")
    for row in workspace_rows(profile, limit):
        table.add_row(
            Text(short_op(row.name)),
            format_size(row.bytes),
            str(row.calls),
            Text(row.phase, "dim"),
            _cut(", ".join(map(format_shape, row.shapes))),
            _cut(row.module or "(model)"),
        )
    return _titled(f"Inside kernels: the largest workspaces ({profile.workspace_source})", table)


def _outside(profile: Profile) -> Text | None:
    outside = profile.outside
    if outside is None or not outside.reserved_bytes:
        return None
    total = outside.reserved_bytes + outside.context_bytes
    return Text.assemble(
        ("Outside PyTorch  ", "bold"),
        f"nvidia-smi shows {format_size(total)} for this process: {format_size(outside.reserved_bytes)} "
        f"reserved by the allocator and {format_size(outside.context_bytes)} of CUDA context, "
        f"of {format_size(outside.device_bytes)} on the device."
        + (f" Other tensors hold {format_size(profile.other_bytes)}." if profile.other_bytes else ""),
    )


def _notes(profile: Profile) -> Text | None:
    notes = profile.graph.notes
    return Text("\n".join(f"• {note}" for note in notes), "yellow") if notes else None


def _size(size: int) -> str:
    return format_size(size) if size else "·"
