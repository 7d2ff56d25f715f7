"""At equal peaks, is a compiled plan as fast as `torch.compile` with checkpoints by hand? Needs a GPU.

    PYTHONPATH=src:. python -m benchmarks.bench_compiled [--only NAME] [--results DIR]

Peaks are bytes above what stays between steps (parameters, buffers, optimizer state), by torch's own counter. Seconds
are of whole steps as launched from Python: zero_grad, loss, backward, optimizer. Peers compile loss and model as one
function. They save everything, the results of matrix products and attention (selective checkpointing), or the inputs of
checkpointed blocks. Plans are made by ``lowtide.plan(..., engine="graph", compile=True)``, and verified before they are
timed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.bench_budgets import _blocks as block_lists
from benchmarks.harness import RESULTS, Row, arguments, record, skip
from benchmarks.quiet import quiet, quiet_tuning
from benchmarks.steps import plain_step, timed_steps
from lowtide import Workload, apply, plan, verify, zoo
from lowtide.errors import BudgetError
from lowtide.planning.baseline import baseline_profile
from lowtide.profiling import Profile
from lowtide.tracing.capture.loss import sharing_captures
from lowtide.workload import autocast

GIB = 2**30
CASES: dict[str, tuple[dict[str, Any], Sequence[float]]] = {
    "GPT-2 medium, 50304 words, batch 16 x 1024, bf16, dropout": (
        {"name": "gpt2-medium", "batch": 16, "seq": 1024, "vocab": 50304},
        (12.8, 10.0, 8.0, 6.0, 3.3, 2.5),
    ),
    "ResNeXt-101, batch 64, bf16 NHWC": (
        {"name": "resnext101", "batch": 64, "channels_last": True},
        (5.1, 4.2, 1.7),
    ),
}
_HEAVY = ("mm", "addmm", "bmm", "convolution", "attention")


def main(*, only: str = "", results: Path = RESULTS) -> None:
    if not torch.cuda.is_available():
        skip("it measures a GPU's memory and time")
    failed: list[str] = []
    for case, (options, budgets) in CASES.items():
        if only in case:
            failed += measure_case(case, _workload(options), budgets, results)
            gc.collect()
    if failed:
        raise SystemExit("\n".join(failed))


def _workload(options: dict[str, Any]) -> Workload:
    options = dict(options)
    vocab = options.pop("vocab", None)
    extra = {} if vocab is None else {"vocab": vocab}
    work = zoo.workload(device="cuda", autocast=torch.bfloat16, **options, **extra)
    optimizer = work.optimizer
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer = torch.optim.AdamW(work.model.parameters(), fused=True)
    return Workload(work.model, work.loss, work.batch, optimizer, work.autocast, work.name)


def measure_case(case: str, work: Workload, budgets: Sequence[float], results: Path) -> list[str]:
    def note(name: str, rows: Sequence[Row]) -> None:
        record("compiled", rows, device="cuda", results=results)

    measure(case, "PyTorch eager", work, note)
    whole = measure(case, "torch.compile", compiled(work), note)
    for name, policy in {"selective": _saves_heavy, "every block": None}.items():
        with checkpointed(work.model, policy):
            measure(case, f"torch.compile, {name} checkpointed", compiled(work), note, whole)
        torch._dynamo.reset()
    start = time.perf_counter()
    with quiet():
        profile = baseline_profile(work, fake=False, device=None)
    note("lowtide", [Row.of(case, "lowtide", "profiling", [time.perf_counter() - start], "s")])
    failed: list[str] = []
    for gib in budgets:
        with sharing_captures(work):  # as ``lowtide.fit`` does
            failed += _measure_budget(case, work, profile, gib, note, whole)
    return failed


def _measure_budget(
    case: str,
    work: Workload,
    profile: Profile,
    gib: float,
    note: Callable[[str, Sequence[Row]], None],
    whole: Measured,
) -> list[str]:
    name, failed = f"lowtide, {gib} GiB", list[str]()
    start = time.perf_counter()
    try:
        with quiet_tuning():
            chosen = plan(work, profile.static_bytes + int(gib * GIB), profile=profile, engine="graph", compile=True)
    except BudgetError as error:
        print(f"{case}, {name}: {error}", flush=True)
        return []
    planning = time.perf_counter() - start
    checked = verify(work, chosen)
    if not checked.results_agree:
        failed.append(f"{case}, {name}: {checked}")
    with apply(chosen, work) as step:
        rows = [Row.of(case, name, "peak, predicted", [chosen.peak_bytes - profile.static_bytes], "B")]
        rows += [Row.of(case, name, "planning", [planning], "s")]
        note(name, rows)
        peak = measure(case, name, step.work, note, whole)[1]
    if peak > gib * GIB:
        failed.append(f"{case}, {name}: {peak / GIB:.2f} GiB")
    return failed


Measured = tuple[float, int]  # seconds and bytes


def measure(
    case: str, name: str, work: Workload, note: Callable[[str, Sequence[Row]], None], whole: Measured | None = None
) -> Measured:
    """Median seconds of a step and its peak above what stays, recorded; and the ratio to ``whole``."""
    start = time.perf_counter()
    for _ in range(3):
        plain_step(work)
    torch.cuda.synchronize()
    building = time.perf_counter() - start
    assert work.optimizer is not None
    work.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    static = torch.cuda.memory_allocated()
    with quiet():
        times, peak = timed_steps(work)
    peak -= static
    work.optimizer.zero_grad(set_to_none=True)
    rows = [
        Row.of(case, name, "step", times, "s"),
        Row.of(case, name, "peak above static", [peak], "B"),
        Row.of(case, name, "first three steps", [building], "s"),
    ]
    if whole is not None:
        rows.append(Row.of(case, name, "times torch.compile", [each / whole[0] for each in times], "x"))
    note(name, rows)
    return rows[0].value, peak


def compiled(work: Workload) -> Workload:
    """The step with loss and model as one compiled function."""
    torch._dynamo.reset()
    run = torch.compile(lambda batch: work.loss(work.model, batch), dynamic=False)

    def loss(model: nn.Module, batch: Any) -> Any:
        with autocast("cuda", work.autocast):
            return run(batch)

    return Workload(work.model, loss, work.batch, work.optimizer, None, work.name)


def _saves_heavy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    heavy = any(part in str(op) for part in _HEAVY)
    return CheckpointPolicy.MUST_SAVE if heavy else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def checkpointed(model: nn.Module, policy: Callable[..., CheckpointPolicy] | None) -> Generator[None]:
    contexts = {} if policy is None else {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    with ExitStack() as stack:
        for _, _, blocks in block_lists(model):
            for block in blocks:
                run = partial(checkpoint, block.forward, use_reentrant=False, **contexts)
                stack.enter_context(mock.patch.object(block, "forward", run))
        yield


if __name__ == "__main__":
    main(**arguments(__doc__, "only", "results"))
