"""The timeline of a step as a stacked chart of block characters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from lowtide.profiling.profile import Profile
from lowtide.reporting.palette import COLORS, PHASE_COLORS, STACK
from lowtide.reporting.tables import buckets, phase_runs, short_op
from lowtide.sizes import format_size
from lowtide.tracing.graph import Category

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

CHART_ROWS = 8
EIGHTHS = " ▁▂▃▄▅▆▇█"


def block_chart(profile: Profile, console: Console) -> RenderableType | None:
    """Draw the timeline. A column shows the highest op of its stretch, so the peak is always drawn."""
    from rich.console import Group
    from rich.text import Text

    graph, timeline = profile.graph, profile.timeline
    if not graph.ops:
        return None
    top = max(profile.peak_bytes, 1)
    labels = [format_size(top), *[""] * (CHART_ROWS - 2), "0 "]
    margin = max(map(len, labels)) + 1
    width = max(20, min(console.width, 110) - margin - 1)
    ops = buckets(timeline.allocated, width)
    colored = console.color_system is not None
    stacks = [_stack([(c, int(timeline.by_category[c][op])) for c in STACK], top, colored) for op in ops]

    lines: list[Text] = []
    for row in range(CHART_ROWS):
        line = Text.assemble((f"{labels[row]:>{margin - 1}} ", "dim"), no_wrap=True)
        bottom = (CHART_ROWS - 1 - row) * 8
        cells = (_cell(stack[bottom : bottom + 8]) for stack in stacks)
        for (character, style), run in groupby(cells):
            line.append(character * sum(1 for _ in run), style)
        lines.append(line)

    where = graph.ops[profile.peak_op]
    peak = f"peak in {where.phase}: {short_op(where.name)} in {where.module or 'the model'}"
    column = margin + max(range(width), key=lambda i: int(timeline.allocated[ops[i]]))
    if column + len(peak) + 2 <= console.width:
        pointer = " " * column + f"▼ {peak}"
    elif column > len(peak):
        pointer = " " * (column - len(peak) - 1) + f"{peak} ▼"
    else:  # room on neither side
        pointer = f"{peak}\n" + " " * column + "▼"

    marks = Text(" " * margin, no_wrap=True)
    for run in phase_runs(graph):
        start, end = (round(i * width / len(graph.ops)) for i in (run.start, run.end))
        marks.append(f"╵{run.phase}"[: end - start].ljust(end - start), PHASE_COLORS[run.phase])
    return Group(Text(pointer, no_wrap=True), *lines, marks)


def _stack(sizes: Iterable[tuple[Category, int]], top: int, colored: bool) -> list[str]:
    """The colour of each eighth of a row from the bottom up; "" above the stack."""
    eighths: list[str] = []
    height = 0
    for category, size in sizes:
        height += size
        level = round(height / top * CHART_ROWS * 8)
        eighths += [COLORS[category] if colored else "default"] * (level - len(eighths))
    return eighths + [""] * (CHART_ROWS * 8 - len(eighths))


def _cell(eighths: list[str]) -> tuple[str, str]:
    """A character has two colours: the lowest as its block, the commonest above that as its background."""
    lowest = eighths[0]
    if not lowest:
        return " ", ""
    block = next((i for i, color in enumerate(eighths) if color != lowest), 8)
    above = [color for color in eighths[block:] if color]
    if len(above) * 2 > 8 - block:
        return EIGHTHS[block], f"{lowest} on {max(set(above), key=above.count)}"
    return EIGHTHS[min(8, block + len(above))], lowest
