"""How do memory and time of a chain grow with its depth, under each planner? And how long does the best plan take?

Equal stages that save their output alone, backward twice as long as forward: memory in stage outputs, time as a ratio
to keeping everything. Naive, √n, recursive and reversible are the table of Gomez et al. (2017) in numbers. Reversible
is a formula, since it is another network. It holds a stage's output, the input rebuilt from it and their gradients, and
runs each stage forward once more. All else is simulated, and every budget checked. The chart goes to
docs/images/chains.svg where altair is installed; --draw draws the rows so far.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drawing import color_by, say_drawn
from benchmarks.harness import RESULTS, ROOT, Row, arguments, read, record, seconds
from lowtide.chains import Chain, OptimalSchedules, Schedule, keep_all, recursive, simulate, sqrt
from lowtide.reporting.charts import FONT, alt, chart_of
from lowtide.reporting.figures import save_figure

DEPTHS = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
DEEPEST_OPTIMAL = 256  # O(n³): 1024 stages take a minute
STAGES, SLOTS = 200, 500
LIMIT_SECONDS = 5.0

RULES: dict[str, Callable[[Chain], Schedule]] = {
    "keep everything": keep_all,
    "√n segments": sqrt,
    "recursive": recursive,
}
SAME = {"√n": "√n segments", "recursive": "recursive"}  # whose memory the optimum is given too
COLORS = {
    "keep everything": "#8a8f98",
    "optimal in half of all memory": "#cc79a7",
    "√n segments": "#e69f00",
    "optimal in √n's memory": "#d55e00",
    "recursive": "#56b4e9",
    "optimal in recursive's memory": "#0072b2",
    "reversible": "#009e73",
}


def main(repeats: int = 3, draw: bool = False) -> None:
    rows: list[Row] = []
    if not draw:
        rows = [row for depth in DEPTHS for row in growth(depth)]
        rows += speed(repeats)
        record("chains", rows)
    say_drawn(lambda: draw_laws(RESULTS / "chains.csv", ROOT / "docs" / "images" / "chains.svg"))
    if draw:
        return
    slowest = max(row.value for row in rows if row.metric == "time to plan")
    if slowest > LIMIT_SECONDS:
        raise SystemExit(f"{STAGES} stages in {SLOTS} slots take {slowest:.1f} s, more than {LIMIT_SECONDS} s")


def growth(depth: int) -> list[Row]:
    """Memory and time of one depth."""
    chain = Chain.uniform(depth, backward_seconds=2)
    plain = simulate(chain, keep_all(chain)).seconds
    figures: dict[str, tuple[float, float]] = {}
    for subject, rule in RULES.items():
        result = simulate(chain, rule(chain))
        figures[subject] = result.peak_bytes, result.seconds
    if depth <= DEEPEST_OPTIMAL:
        planner = OptimalSchedules(chain, SLOTS)
        budgets = {f"{of}'s": int(figures[rule][0]) for of, rule in SAME.items()}
        if (half := int(figures["keep everything"][0]) // 2) > planner.smallest_bytes:
            budgets["half of all"] = half
        for of, budget in budgets.items():
            result = simulate(chain, planner.schedule(budget))
            if result.peak_bytes > budget or (of[:-2] in SAME and result.seconds > figures[SAME[of[:-2]]][1]):
                raise SystemExit(f"depth {depth}: the optimum in {of} memory is none")
            figures[f"optimal in {of} memory"] = result.peak_bytes, result.seconds
    figures["reversible"] = 4, depth * (2 + 2)
    case = f"{depth} equal stages"
    return [
        row
        for subject, (memory, taken) in figures.items()
        for row in (
            Row.of(case, subject, "memory", [memory], ""),
            Row.of(case, subject, "time ratio", [taken / plain], "x"),
        )
    ]


def speed(repeats: int) -> list[Row]:
    """Planning of a long chain of unequal stages, and what the plans give."""
    chain = unequal(STAGES)
    plain = simulate(chain, keep_all(chain))
    case = f"{STAGES} unequal stages, {SLOTS} slots"
    rows: list[Row] = []
    for share in (0.7, 0.35, 0.1):
        budget = int(share * plain.peak_bytes)
        planned: list[Schedule] = []
        taken = [
            seconds(lambda b=budget, p=planned: p.append(OptimalSchedules(chain, SLOTS).schedule(b)))
            for _ in range(repeats)
        ]
        result = simulate(chain, planned[-1])
        if result.peak_bytes > budget:
            raise SystemExit(f"{case}: {result.peak_bytes} bytes are over the budget of {budget}")
        subject = f"budget {share:.0%} of keeping everything"
        rows.append(Row.of(case, subject, "time to plan", taken, "s"))
        rows.append(Row.of(case, subject, "of the budget used", [100 * result.peak_bytes / budget], "%"))
        rows.append(Row.of(case, subject, "time ratio", [result.seconds / plain.seconds], "x"))
    return rows


def unequal(stages: int) -> Chain:
    """Sizes and seconds of no pattern, so that rounding shows."""
    rng = np.random.default_rng(0)
    values = (rng.random(stages + 1) * 1e8 + 3e7).astype(int)
    saved = (values[1:] * (1 + 10 * rng.random(stages))).astype(int)
    forward = rng.random(stages)
    temporary = (rng.random((2, stages)) * 1e7).astype(int).tolist()
    return Chain(forward.tolist(), (2 * forward).tolist(), values.tolist(), saved.tolist(), *temporary)


def draw_laws(rows: Path, path: Path) -> Path:
    """Memory and time over depth: as the laws are lines, memory and depth in powers of two."""
    latest = {(row["case"], row["subject"], row["metric"]): float(row["value"]) for row in read(rows)}
    points = [
        {"depth": int(case.split()[0]), "planner": subject, "metric": metric, "value": value}
        for (case, subject, metric), value in latest.items()
        if case.endswith(" equal stages")
    ]
    naive = "datum.label == 'keep everything' ? 'keep everything (naive)' : datum.label"
    color = color_by("planner", COLORS, columns=4, columnPadding=48, labelExpr=naive)

    def panel(metric: str, title: str, scale: Any) -> Any:
        own = [point for point in points if point["metric"] == metric]
        lines = chart_of(own).mark_line(point=True, strokeWidth=2)
        return lines.encode(
            x=alt.X(
                "depth:Q", title="stages", scale=alt.Scale(type="log", base=2), axis=alt.Axis(values=DEPTHS, format="d")
            ),
            y=alt.Y("value:Q", title=title, scale=scale),
            color=color,
        ).properties(width=400, height=300)

    memory = panel("memory", "peak, in stage outputs", alt.Scale(type="log", base=2))
    time = panel("time ratio", "time, keeping everything = 1", alt.Scale(zero=False))
    subtitle = "Each saves its output; backward takes twice as long as forward. Simulated; reversible by its formula."
    title = alt.TitleParams("Chains of equal stages", subtitle=subtitle, anchor="start")
    chart = alt.hconcat(memory, time, title=title, background="white", padding=16)
    return save_figure(chart.configure(font=FONT).configure_view(stroke=None), path)


if __name__ == "__main__":
    main(**arguments(__doc__, "draw"))
