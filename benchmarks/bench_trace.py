"""What does a real trace cost? At most 1.3 plain steps on a CPU, and torch.profiler's peak within 1%."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, Row, arguments, compare, record
from benchmarks.steps import plain_step
from lowtide import Workload, profile, zoo
from lowtide.tracing import trace

LIMIT_RATIO = 1.3
LIMIT_ERROR = 0.01


def main(name: str = "resnet50", batch: int = 4, repeats: int = 5, results: Path = RESULTS) -> None:
    work = zoo.workload(name, batch=batch)
    case = f"{name}, batch {batch}"
    plain_step(work)
    ours, theirs = profile(work).peak_bytes, profiler_peak(work)
    error = ours / theirs - 1

    def check() -> None:
        if abs(error) > LIMIT_ERROR:
            raise SystemExit(f"the peak is {ours} bytes traced and {theirs} by torch.profiler: {error:+.2%}")

    contenders = {
        "plain step": lambda: plain_step(work),
        "lowtide, traced step": lambda: trace(work),
        "torch.profiler, memory": lambda: profiler_peak(work),
    }
    rows = compare(case, contenders, check=check, repeats=repeats, warmup=1)
    rows.append(Row.of(case, "lowtide, traced step", "allocated peak", [ours], "B"))
    rows.append(Row.of(case, "torch.profiler, memory", "allocated peak", [theirs], "B"))
    record("trace", rows, results=results)
    ratio = next(row for row in rows if row.subject.startswith("lowtide") and row.unit == "x")
    if ratio.value > LIMIT_RATIO:
        raise SystemExit(f"a traced step takes {ratio.value:.2f} plain ones, more than {LIMIT_RATIO}")


def profiler_peak(work: Workload) -> int:
    """The peak of a plain step: bytes allocated before it, and the allocations that torch.profiler sees."""
    assert work.optimizer is not None
    work.optimizer.zero_grad(set_to_none=True)
    state = [t for s in work.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    there = [*work.model.parameters(), *work.model.buffers(), *work.tensors(), *state]
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in there}.values())
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        plain_step(work)
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = held
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


if __name__ == "__main__":
    main(**arguments(__doc__, "results"))
