"""Does a plan keep its budget, and is it faster than checkpointing by hand? Ten budgets each. Needs a GPU.

    PYTHONPATH=src:. python -m benchmarks.bench_budgets [--only NAME] [--part 1/4] [--results DIR] [--draw]

Peaks are all bytes that torch's allocator gives out during a step, parameters and optimizer state included. A step is
zero_grad, loss, backward, optimizer. Checkpointing by hand is ``torch.utils.checkpoint`` over every block, over √n
segments of blocks, and ``checkpoint_sequential``. Plans are of the graph engine, op by op; like checkpoints by hand,
they leave the optimizer and its state alone. Three of the ten budgets are the peaks of checkpointing by hand. The
others lie evenly between the smallest peak and the plain step's.

Each way is timed in turns with the plain step, since the host's speed drifts: ratios are of the same rounds. A step
without random numbers, planned as a program alone, is also replayed as one CUDA graph. That gives the time of its
kernels without the host, and the memory that the graph would hold for good.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.drawing import color_by, say_drawn
from benchmarks.gpu_time import timed
from benchmarks.harness import RESULTS, ROOT, Row, arguments, read, record, skip
from benchmarks.quiet import quiet, quiet_tuning
from benchmarks.steps import peak_of, plain_step, seconds_of
from lowtide import Workload, apply, plan, zoo
from lowtide.errors import BudgetError
from lowtide.planning import Plan
from lowtide.planning.baseline import baseline_profile
from lowtide.profiling import Profile
from lowtide.reporting.charts import FONT, alt, chart_of
from lowtide.reporting.figures import save_figure
from lowtide.tracing.capture.loss import sharing_captures

BF16 = {"autocast": torch.bfloat16}
CASES: dict[str, dict[str, Any]] = {
    "GPT-2 medium, batch 16 x 1024, bf16, dropout": {"name": "gpt2-medium", "batch": 16, "seq": 1024, **BF16},
    "ResNeXt-101, batch 64, bf16 NHWC": {"name": "resnext101", "batch": 64, "channels_last": True, **BF16},
}
BUDGETS = 10
AROUND = ("optimizer_in_backward", "optimizer_state", "stored_gradients")  # options around the loss, forbidden here
COLORS = {
    "lowtide.plan, graph engine": "#2a78d6",
    "PyTorch eager": "#52514e",
    "checkpoint, every block": "#eb6834",
    "checkpoint, √n segments": "#1baf7a",
    "checkpoint_sequential, √n": "#eda100",
}
SINCE = "2026-11-19"  # when plans began to rewrite ops: the page and the drawing leave older rows out
DRAWING = ROOT / "docs" / "images" / "budgets.svg"


def main(
    *, only: str = "", part: str = "1/1", device: str = "cuda", draw: bool = False, results: Path = RESULTS
) -> None:
    if draw:
        say_drawn(lambda: draw_steps(results / "budgets.csv", DRAWING))
        return
    if device == "cuda" and not torch.cuda.is_available():
        skip("it measures a GPU's memory and time")
    failed: list[str] = []
    for case, options in CASES.items():
        if only in case:
            failed += measure_case(case, zoo.workload(device=device, **options), results, part)
            gc.collect()
    if failed:
        raise SystemExit("\n".join(failed))


def measure_case(case: str, work: Workload, results: Path, part: str = "1/1") -> list[str]:
    first, step = map(int, part.split("/"))

    def note(name: str, peak: int, times: Sequence[tuple[float, float]], *more: Row) -> None:
        own, ratios = [way for way, _ in times], [way / plain for way, plain in times]
        rows = [Row.of(case, name, "peak", [peak], "B"), Row.of(case, name, "step", own, "s")]
        rows += [Row.of(case, name, "step ratio", ratios, "x"), *more]
        record("budgets", rows, device=work.device.type, results=results)

    failed: list[str] = []
    plain_peak = peak_of(work)
    if first == 1:
        note("PyTorch eager", plain_peak, times_in_turn(work, work), *graphed(case, "PyTorch eager", work))
    peaks: list[int] = []
    for name, by_hand in CHECKPOINTS.items():
        with by_hand(work.model):
            peaks.append(peak_of(work))
        if first == 1:
            note(name, peaks[-1], times_in_turn(work, work, lambda by_hand=by_hand: by_hand(work.model)))
    with quiet():
        profile = baseline_profile(work, fake=False, device=None)
    with sharing_captures(work):  # as ``lowtide.fit`` does
        try:
            planned(work, 1, profile)
        except BudgetError as error:
            smallest = error.smallest_bytes
            assert smallest is not None
        else:
            raise AssertionError("a step in one byte")
        budgets = list(enumerate(budgets_between(smallest, profile.peak_bytes - 1, peaks), 1))
        for number, budget in budgets[first - 1 :: step]:
            start = time.perf_counter()
            with quiet_tuning():
                chosen = planned(work, budget, profile)
            planning = time.perf_counter() - start
            name = f"lowtide, budget {number} of {BUDGETS}"
            again = chosen.program.ops_again if chosen.program else 0
            rows = [
                Row.of(case, name, "budget", [budget], "B"),
                Row.of(case, name, "peak, predicted", [chosen.peak_bytes], "B"),
                Row.of(case, name, "step, predicted", [chosen.seconds], "s"),
                Row.of(case, name, "ratio, predicted", [chosen.seconds / chosen.baseline.seconds], "x"),
                Row.of(case, name, "ops again", [again], ""),
                Row.of(case, name, "planning", [planning], "s"),
            ]
            with apply(chosen, work) as step:
                peak = peak_of(step.work)
                times = times_in_turn(step.work, work)
                note(name, peak, times, *rows, *(() if chosen.choices else graphed(case, name, step.work)))
            if peak > budget:
                failed.append(f"{case}, {name}: {peak} bytes of {budget}")
    return failed


def planned(work: Workload, budget: int, profile: Profile) -> Plan:
    return plan(work, budget, profile=profile, engine="graph", compile=False, forbid=AROUND)


def budgets_between(smallest: int, largest: int, peers: Sequence[int]) -> list[int]:
    """The peers' own that can be kept, and others evenly."""
    same = [peak for peak in peers if smallest < peak < largest]
    even = BUDGETS - len(same)
    return sorted([*same, *(smallest + (largest - smallest) * share // (even - 1) for share in range(even))])


def draw_steps(rows: Path, path: Path) -> Path:
    """Seconds as a multiple of the plain step's, over the measured peak: plans as a line, by hand as points."""
    drawn = (row for row in read(rows) if row["date"] >= SINCE)
    latest = {(row["case"], row["subject"], row["metric"]): float(row["value"]) for row in drawn}
    points = [
        {
            "case": case,
            "how": "lowtide.plan, graph engine" if subject.startswith("lowtide") else subject,
            "peak": value / 2**30,
            "ratio": latest[case, subject, "step ratio"],
        }
        for (case, subject, metric), value in latest.items()
        if metric == "peak"
    ]

    def panel(case: str) -> Any:
        own = [point for point in points if point["case"] == case]
        shared = {
            "x": alt.X("peak:Q", title="measured peak, GiB", scale=alt.Scale(zero=False, padding=20)),
            "y": alt.Y("ratio:Q", title="step, times the plain one's", scale=alt.Scale(zero=False, padding=20)),
            "color": color_by("how", COLORS, columns=3, columnPadding=48),
        }
        line = chart_of([p for p in own if p["how"].startswith("lowtide")]).mark_line(point=True, strokeWidth=2)
        marks = chart_of([p for p in own if not p["how"].startswith("lowtide")]).mark_point(size=90, filled=True)
        layers = alt.layer(line.encode(**shared), marks.encode(**shared))
        return layers.properties(width=400, height=300, title=alt.TitleParams(case, anchor="start", fontSize=12))

    chart = alt.hconcat(*map(panel, dict.fromkeys(point["case"] for point in points)), background="white", padding=16)
    return save_figure(chart.configure(font=FONT).configure_view(stroke=None), path)


def times_in_turn(
    way: Workload, plain: Workload, under: Callable[[], Any] = nullcontext, rounds: int = 3
) -> list[tuple[float, float]]:
    """Seconds of a step one way, which may need a context, and of the plain one right after."""
    pairs: list[tuple[float, float]] = []
    with quiet():
        for _ in range(rounds + 1):
            with under():
                seconds = seconds_of(way)
            pairs.append((seconds, seconds_of(plain)))
    return pairs[1:]


def graphed(case: str, name: str, work: Workload) -> list[Row]:
    """Rows of the step as one CUDA graph; none where it draws random numbers, which a capture does not follow."""
    draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in work.model.modules())
    if draws or work.device.type == "cpu":
        return []
    assert work.optimizer is not None
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            plain_step(work)
    aside.synchronize()
    work.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = work.compute_loss()
        loss.backward()
        work.optimizer.step()
    pool = torch.cuda.memory_reserved() - before
    with quiet():
        times = timed(graph.replay, calls=3, rounds=9)
    del loss, graph
    work.optimizer.zero_grad(set_to_none=True)
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream, and they would count in the next peak
    return [Row.of(case, name, "CUDA graph", times, "s"), Row.of(case, name, "its pool", [pool], "B")]


# -- checkpointing by hand -----------------------------------------------------------------------------


def _blocks(model: nn.Module) -> list[tuple[nn.Module, str, list[nn.Module]]]:
    """The chains of blocks: their owner, name and modules."""
    return [
        (owner, name, list(child))
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, (nn.ModuleList, nn.Sequential))
        and len(child) > 2
        and len({type(block) for block in child}) == 1
        and any(True for _ in child[0].children())
    ]


@contextmanager
def every_block(model: nn.Module) -> Generator[None]:
    with ExitStack() as stack:
        for _, _, blocks in _blocks(model):
            for block in blocks:
                stack.enter_context(mock.patch.object(block, "forward", _checkpointed(block.forward)))
        yield


def _checkpointed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor) -> Tensor:
        return checkpoint(forward, x, use_reentrant=False)

    return run


@contextmanager
def in_segments(model: nn.Module, run: Callable[[list[nn.Module], Tensor], Tensor]) -> Generator[None]:
    """The first block of each chain runs the whole chain; the others pass on."""
    with ExitStack() as stack:
        for _, _, blocks in _blocks(model):
            forwards = [block.forward for block in blocks]

            def first(x: Tensor, forwards: list[Any] = forwards) -> Tensor:
                return run(forwards, x)

            stack.enter_context(mock.patch.object(blocks[0], "forward", first))
            for block in blocks[1:]:
                stack.enter_context(mock.patch.object(block, "forward", lambda x: x))
        yield


def _sqrt_segments(forwards: list[Any], x: Tensor) -> Tensor:
    size = math.ceil(len(forwards) / round(math.sqrt(len(forwards))))
    for start in range(0, len(forwards), size):
        x = checkpoint(_chain, forwards[start : start + size], x, use_reentrant=False)
    return x


def _chain(forwards: list[Any], x: Tensor) -> Tensor:
    for forward in forwards:
        x = forward(x)
    return x


def _checkpoint_sequential(forwards: list[Any], x: Tensor) -> Tensor:
    return checkpoint_sequential(forwards, round(math.sqrt(len(forwards))), x, use_reentrant=False)


CHECKPOINTS: dict[str, Callable[[nn.Module], Any]] = {
    "checkpoint, every block": every_block,
    "checkpoint, √n segments": lambda model: in_segments(model, _sqrt_segments),
    "checkpoint_sequential, √n": lambda model: in_segments(model, _checkpoint_sequential),
}


if __name__ == "__main__":
    part = {"default": "1/1", "help": "1/4: every fourth budget, from the first on, and the peers"}
    main(**arguments(__doc__, "only", "results", "draw", part=part))
