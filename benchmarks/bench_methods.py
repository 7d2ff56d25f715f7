"""What does each method of lowtide save, and at what price? One step at a time, every technique beside the plain step.

    PYTHONPATH=src:. python -m benchmarks.bench_methods [--only NAME] [--results DIR]

The columns follow the table of methods in "Neural Networks Memory Footprint Reduction during Training" (Gusak, 2022).
They are GPUs, approximate or not, communication, the batch per GPU, floating-point operations, and the measured peak
and time. Every registered technique is applied by its own options, with usual settings or else those of the lowest
estimated peak. That is one option, or all options with the same settings in different places. Operations are those of
matrix products, convolutions and attention, counted over the traced step; what a Triton kernel does inside counts as
none.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, Row, arguments, default_device, record
from benchmarks.steps import cuda_peak, plain_step, seconds_of
from lowtide import LowtideError, Workload, apply, plan, profile, zoo
from lowtide.planning.prediction import apply_options, estimate_peak
from lowtide.profiling import Profile
from lowtide.techniques import Applied, Config, Fidelity, Option, Price, Technique, techniques
from lowtide.tracing.graph import Op

NAME = "methods"
PLAIN = "plain step"
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "RoBERTa-base, batch 128 x 128": {"name": "roberta-base", "batch": 128, "seq": 128},
        "GPT-2, batch 16 x 1024, bf16": {"name": "gpt2", "batch": 16, "seq": 1024, "autocast": torch.bfloat16},
        "ResNet-50, batch 64": {"name": "resnet50", "batch": 64},
    },
    "cpu": {
        "RoBERTa, 4 blocks of width 128, batch 8 x 64": {
            "name": "roberta-base", "layers": 4, "width": 128, "heads": 4, "vocab": 512, "batch": 8, "seq": 64,
        },
        "GPT-2, 4 blocks of width 128, batch 8 x 64": {
            "name": "gpt2", "layers": 4, "width": 128, "heads": 4, "vocab": 4096, "batch": 8, "seq": 64,
        },
        "WRN-28-2, batch 8": {"name": "wrn28-2", "batch": 8},
    },
}  # fmt: skip
BUDGET = "75%"
# Settings that people would choose: not the fewest bits or the smallest pieces.
USUAL: dict[str, Callable[[int], dict[str, Any]]] = {
    "fewbit": lambda batch: {"bits": 3},
    "randomized": lambda batch: {"ratio": 0.2},
    "microbatch": lambda batch: {"size": batch // 4},
    "optimizer_state": lambda batch: {"state": "8bit"},
}


@dataclass(frozen=True)
class Method:
    """A way to run the step: how it is applied, and what it promises."""

    subject: str
    run: Callable[[Workload], Applied]
    price: Price | None = None


@dataclass(frozen=True)
class Figures:
    """Bytes, operations and seconds of one step."""

    peak_bytes: int
    static_bytes: int
    flops: int
    seconds: list[float]
    ratios: list[float]  # to the plain step, each from the same moment


def main(*, only: str = "", device: str | None = None, repeats: int = 5, results: Path = RESULTS) -> None:
    device = device or default_device()
    if device == "cpu":
        torch.set_num_threads(1)  # several that wait for each other on a busy machine measure the machine
    for case, settings in CASES[device].items():
        for rows in measure_case(case, settings, device, repeats, only):
            record(NAME, rows, device=device, results=results)


def measure_case(case: str, settings: dict[str, Any], device: str, repeats: int, only: str) -> Iterator[list[Row]]:
    """The rows of the plain step, then of one method after the other."""
    half = {**settings, "batch": settings["batch"] // 2}
    plain = zoo.workload(device=device, **settings)
    for _ in range(3):  # allocates its state and the workspaces of libraries before anything is counted
        plain_step(plain)
    assert plain.optimizer is not None
    plain.optimizer.zero_grad()
    known = [method for method in methods(plain) if only in f"{case}, {method.subject}"]
    base: Figures | None = None
    for method in (Method(PLAIN, Applied), *known) if known else ():
        try:
            whole = figures(method, zoo.workload(device=device, **settings), plain, repeats)
            less = figures(method, zoo.workload(device=device, **half), plain, 0)
        except LowtideError as error:
            print(f"{case}, {method.subject}: left out: {error}", flush=True)
            continue
        base = base or whole
        yield rows_of(case, method, whole, less, base, settings["batch"])


def rows_of(case: str, method: Method, whole: Figures, less: Figures, plain: Figures, batch: int) -> list[Row]:
    subject = method.subject
    # A peak is a line over the batch once it is past the small things: what fits where the plain step does.
    sample = 2 * (whole.peak_bytes - less.peak_bytes) / batch
    larger = 1 + (plain.peak_bytes - whole.peak_bytes) / sample / batch if sample > 0 else float("nan")
    host = method.price.host_bytes if method.price else 0
    rows = [
        Row.of(case, subject, "GPUs", [1], ""),
        Row.of(case, subject, "peak", [whole.peak_bytes], "B"),
        Row.of(case, subject, "of plain's", [100 * whole.peak_bytes / plain.peak_bytes], "%"),
        Row.of(case, subject, "between steps", [whole.static_bytes], "B"),
        Row.of(case, subject, "batch in plain's peak", [larger], "x"),
        Row.of(case, subject, "to the host and back", [host], "B"),
        Row.of(case, subject, "FLOPs", [whole.flops / max(plain.flops, 1)], "x"),
    ]
    if whole.seconds:
        rows += [Row.of(case, subject, "step", whole.seconds, "s"), Row.of(case, subject, "time", whole.ratios, "x")]
    return rows


# -- The methods ---------------------------------------------------------------------------------------


def methods(work: Workload) -> Iterator[Method]:
    """Every registered technique that has an option here, and the planner's own recomputation."""
    baselines = {len(work.batch[0]): profile(work, fake=True)}  # by batch: all techniques look at the same
    (baseline,) = baselines.values()
    for name, technique in techniques().items():
        options = best_options(technique, baseline, _usual(technique, work))
        if options:
            price = technique.price(options[0], baseline)
            fidelity = max(technique.check(option).fidelity for option in options)
            yield Method(f"{_said(name, options)}, {fidelity}", _applying(technique, baselines), price)
        else:
            print(f"{work.name}: {name} has nothing to offer (it needs {technique.needs})")
    yield Method(f"plan in {BUDGET} of the memory, {Fidelity.BITWISE}", _planned)


def best_options(technique: Technique, baseline: Profile, usual: Mapping[str, Any] | None = None) -> list[Option]:
    """Return the options with the lowest estimated peak: one, or all with the same settings in different places.

    If some have the ``usual`` settings, no others count.
    """
    sets: dict[Config | Option, list[Option]] = {}
    offered = technique.options(baseline)
    same = [option for option in offered if all(getattr(option.config, k) == v for k, v in (usual or {}).items())]
    for option in same or offered:
        sets[option] = [option]
        sets.setdefault(option.config, []).append(option)
    prices = {options[0]: technique.price(options[0], baseline) for key, options in sets.items() if key == options[0]}
    candidates = [options for options in sets.values() if _apart(options)]

    def order(options: list[Option]) -> tuple[int, float]:
        mine = [prices[option] for option in options]
        return estimate_peak(baseline.graph, mine), sum(price.seconds for price in mine)

    return min(candidates, key=order, default=[])


def _apart(options: Sequence[Option]) -> bool:
    """Whether no two options act in one place."""
    places = [path for option in options for path in option.site]
    return len(options) == 1 or len(places) == len(set(places))


def _applying(technique: Technique, baselines: dict[int, Profile]) -> Callable[[Workload], Applied]:
    def run(work: Workload) -> Applied:
        batch = len(work.batch[0])
        if batch not in baselines:
            baselines[batch] = profile(work, fake=True)
        return apply_options(work, best_options(technique, baselines[batch], _usual(technique, work)))

    return run


def _usual(technique: Technique, work: Workload) -> dict[str, Any]:
    usual = USUAL.get(technique.name)
    return usual(len(work.batch[0])) if usual else {}


def _planned(work: Workload) -> Applied:
    step = apply(plan(work, BUDGET, engine="graph", compile=False), work)
    return Applied(step.work, step.undo)


def _said(name: str, options: Sequence[Option]) -> str:
    config = options[0].config
    # The others follow from the model.
    settings = ", ".join(f"{each} {getattr(config, each)}" for each in USUAL[name](0)) if name in USUAL else str(config)
    return f"{name} ({settings})" if settings else name


# -- Measuring -----------------------------------------------------------------------------------------


def figures(method: Method, work: Workload, plain: Workload, repeats: int) -> Figures:
    """Peak, operations and seconds of the step under a method; the plain step runs in turns with it."""
    on_gpu = work.device.type == "cuda"
    others = torch.cuda.memory_allocated() - _bytes_of(work) if on_gpu else 0
    with method.run(work) as applied:
        for _ in range(2):  # optimizer state exists from here on
            plain_step(applied.work)
        if not on_gpu:
            traced = profile(applied.work)
            peak, static = traced.peak_bytes, traced.static_bytes
        else:
            traced = profile(applied.work, fake=True) if repeats else None  # nobody asks for its operations
            peak = cuda_peak(partial(plain_step, applied.work)) - others
            applied.work.optimizer.zero_grad()  # pyright: ignore[reportOptionalMemberAccess]: the zoo gives one
            static = torch.cuda.memory_allocated() - others
        # One more, not counted: what has not run for a while is slow once.
        pairs = [(seconds_of(plain, 1), seconds_of(applied.work, 1)) for _ in range(repeats + 1 if repeats else 0)][1:]
        plain.optimizer.zero_grad()  # pyright: ignore[reportOptionalMemberAccess]
    del work, applied
    gc.collect()
    return Figures(
        peak,
        static,
        0 if traced is None else sum(map(flops, traced.graph.ops)),
        [mine for _, mine in pairs],
        [mine / base for base, mine in pairs],
    )


def _bytes_of(work: Workload) -> int:
    """Bytes of parameters, buffers and the batch before a step, as the allocator rounds them."""
    tensors = [*work.model.parameters(), *work.model.buffers(), *work.batch]
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)


def flops(op: Op) -> int:
    """Multiplications and additions of a matrix product, a convolution or an attention; 0 for any other op."""
    name = op.name.removeprefix("aten.").partition(".")[0].rstrip("_")  # addmm_ is addmm in place
    shapes = [value.shape for value in op.inputs]
    if name in ("mm", "bmm", "addmm", "baddbmm"):  # counted from the front: with out=, that comes last
        return 2 * math.prod(op.outputs[0].shape) * shapes[name in ("addmm", "baddbmm")][-1]
    if name == "convolution":
        return 2 * math.prod(op.outputs[0].shape) * math.prod(shapes[1][1:])
    if name == "convolution_backward":  # the gradients of the input and of the weight, each like the forward
        grads = sum(len(value.shape) > 1 for value in op.outputs)
        return grads * 2 * math.prod(shapes[0]) * math.prod(shapes[2][1:])
    if "scaled_dot_product" in name and "attention" in name:
        query, key = shapes[1:3] if "backward" in name else shapes[:2]
        products = 5 if "backward" in name else 2  # the backward makes the scores again
        return products * 2 * math.prod(query) * key[-2]
    return 0


if __name__ == "__main__":
    only = {
        "help": "cases and methods whose name, as in 'ResNet-50, batch 64, sqrt (…)', holds this; and the plain step"
    }
    main(**arguments(__doc__, "device", "results", only=only))
