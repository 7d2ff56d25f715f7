"""How small do programs of graphs without cut vertices get, and what do they cost at 85% and 60% of the plain peak?

Each solver, every block checkpointed by hand, and lower bounds in the captured order. Peaks are storages of the whole
step, in percent of the plain step's. Seconds are those of ops that run again, in percent of the step's, by the roofline
of an H200: nothing is timed. The growth rows are the processor seconds of the graph solver alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.utils.checkpoint import checkpoint

from benchmarks.harness import Row, arguments, record, results_of
from benchmarks.shapes import SHAPES, Shape, layers, work_of
from lowtide import Workload, zoo
from lowtide.planning.programs.program import simulate
from lowtide.planning.programs.program_profile import node_seconds
from lowtide.planning.solvers.frontier import frontier
from lowtide.planning.solvers.runs import RunTimeline
from lowtide.planning.solvers.solver import SOLVERS, Problem, Solution
from lowtide.profiling import Profile, profile
from lowtide.profiling.devices import find_device
from lowtide.profiling.roofline import op_seconds
from lowtide.tracing.capture.loss import capture_joint

NAME = "graph_solver"
DEVICE = "h200"
SHARES = (0.85, 0.6)


def cases(*, quick: bool) -> Iterator[tuple[str, Workload]]:
    """Steps whose activations outweigh their parameters."""
    for name in SHAPES:
        yield name, work_of(name, depth=3 if quick else 6, width=32, rows=480 if quick else 4800)
    if not quick:
        yield "UNet", zoo.workload("unet", batch=4)
        yield "DenseNet-121", zoo.workload("densenet121", batch=4)


def rows_of(case: str, work: Workload) -> Iterator[Row]:
    """The smallest peak and the seconds at two budgets, for each way."""
    plain = profile(work, fake=True)
    joint = capture_joint(work)
    problem = Problem(joint, node_seconds(joint, DEVICE))
    static = plain.storage_peak_bytes - RunTimeline(problem.kernels.ops, {}).peak_bytes
    step = sum(problem.kernels.ops.seconds)
    for name in SOLVERS:
        start = time.process_time()
        solutions = SOLVERS[name].solve(problem)
        yield _row(case, f"{name} solver", "planning", time.process_time() - start, "s")
        yield from _points(case, f"{name} solver", solutions, plain.storage_peak_bytes, static, step)
    if isinstance(work.model, Shape):
        work.model.run = lambda block, *values: checkpoint(block, *values, use_reentrant=False)
        by_hand = profile(work, fake=True)
        size = 100 * by_hand.storage_peak_bytes / plain.storage_peak_bytes
        yield _row(case, "every block checkpointed by hand", "smallest peak", size, "%")
        for share in SHARES:
            if size <= 100 * share:
                yield _row(
                    case, "every block checkpointed by hand", _at(share), 100 * _seconds_again(by_hand) / step, "%"
                )
    smallest = problem.bounds.peak_bytes + static
    yield _row(case, "lower bound", "smallest peak", 100 * smallest / plain.storage_peak_bytes, "%")
    for share in SHARES:
        seconds = problem.bounds.seconds(int(share * plain.storage_peak_bytes) - static)
        yield _row(case, "lower bound", _at(share), 100 * seconds / step, "%")


def _points(
    case: str, subject: str, solutions: Sequence[Solution], plain_bytes: int, static: int, step: float
) -> Iterator[Row]:
    peaks = [(simulate(solution.program).peak_bytes + static, solution.seconds) for solution in solutions]
    yield _row(case, subject, "smallest peak", 100 * min(peaks)[0] / plain_bytes, "%")
    for share in SHARES:
        fitting = [seconds for peak, seconds in peaks if peak <= share * plain_bytes]
        if fitting:
            yield _row(case, subject, _at(share), 100 * min(fitting) / step, "%")


def _seconds_again(profiled: Profile) -> float:
    device = find_device(DEVICE)
    return sum(op_seconds(op, device) for op in profiled.graph.ops if op.recompute)


def _at(share: float) -> str:
    return f"longer at {share:.0%}"


def _row(case: str, subject: str, metric: str, value: float, unit: str) -> Row:
    return Row(case, subject, metric, value, value, value, unit)


def growth() -> Iterator[Row]:
    """Processor seconds for graphs of 100 to 10,000 ops."""
    for size in (100, 1_000, 2_500, 10_000):
        ops = layers(size)
        start = time.process_time()
        frontier(ops)
        yield _row(f"{size} ops", "graph solver", "planning", time.process_time() - start, "s")


def main(quick: bool = False, only: str = "", results: Path | None = None) -> None:
    """Record the rows of all cases whose name holds ``only``."""
    rows = [row for case, work in cases(quick=quick) if only in case for row in rows_of(case, work)]
    rows += growth() if not quick and not only else ()
    record(NAME, rows, results=results_of(results, quick=quick))


if __name__ == "__main__":
    main(**arguments(__doc__, "quick", "only", "results", results={"default": None}))
