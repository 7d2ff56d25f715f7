"""Is a converted network faster than a plain one, as launched from Python and under ``torch.compile``? Needs a GPU.

    PYTHONPATH=src:. python -m benchmarks.bench_convert_compiled [--variants NAME] [--results DIR]

torchvision's ResNeXt-101 trains in each variant from the same parameters on the same batch, in turns. "host" is the
time until a step returns, without waiting for the GPU. "host, small batch" is the same on two small images, which the
GPU finishes at once. "kernels" is the GPU's own time, the sum over the kernels of a step. "CUDA graphs" is
``mode="reduce-overhead"``; its peak counts the memory that the graphs hold between steps, too.

Gradients are compared first: each variant's differ from plain eager's by 0.1% at most. That is in float32 on the same
network with one block a stage and SiLU for ReLU. In bf16, the gradients of untrained deep networks are uncorrelated.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.harness import RESULTS, Row, arguments, record, skip, torchvision_models
from benchmarks.steps import cuda_peak, relative_error
from lowtide import convert

CASE = "torchvision resnext101_32x8d, bf16, batch 64, NHWC"
BATCH, SIDE, ROUNDS, STEPS = 64, 224, 10, 3
LARGEST_ERROR = 1e-3  # of float32 gradients
PLAIN = "PyTorch eager"


def main(*, variants: str = "", results: Path = RESULTS) -> None:
    if not torch.cuda.is_available():
        skip("it trains on a GPU")
    resnet = torchvision_models().resnet

    def build(*blocks: int) -> nn.Module:
        return resnet.ResNet(resnet.Bottleneck, list(blocks), groups=32, width_per_group=8)

    check(CASE, lambda: smooth(build(1, 1, 1, 1)), "cuda", variants=variants)
    measure(CASE, lambda: build(3, 4, 23, 3), "cuda", variants=variants, results=results)


def smooth(model: nn.Module) -> nn.Module:
    """Replace ReLU, where rounding x changes a gradient by a jump: plain float32 differs from float64 by 0.6%."""
    for module in model.modules():
        if hasattr(module, "relu"):
            module.relu = nn.SiLU(inplace=True)
    return model


def check(case: str, build: Callable[[], nn.Module], device: str, *, variants: str = "") -> None:
    """Compare each variant's float32 gradients with plain eager's."""
    exact: list[Tensor] = []
    with full_float32():
        for name, prepare in chosen(variants).items():
            step = prepare(lambda change, **how: Step(build, device, 8, 64, change, dtype=None, **how))
            gradients = step.gradients()
            exact = exact or gradients
            error = relative_error(gradients, exact)
            print(f"{name}: float32 gradients differ by {error:.1e}", flush=True)
            if not error <= LARGEST_ERROR:
                raise SystemExit(f"{case}, {name}: gradients differ from plain eager's by {error:.1e}")


@contextmanager
def full_float32() -> Generator[None]:
    """Turn TF32 off."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            yield
    finally:
        matmul.allow_tf32 = before


def chosen(variants: str) -> dict[str, Prepare]:
    """Variants whose name holds this, and the plain one."""
    return {name: prepare for name, prepare in VARIANTS.items() if variants in name or name == PLAIN}


def measure(
    case: str,
    build: Callable[[], nn.Module],
    device: str,
    *,
    variants: str = "",
    batch: int = BATCH,
    side: int = SIDE,
    results: Path = RESULTS,
) -> None:
    """Measure each variant's peak, then time them in turns; rows are printed and appended."""
    steps: dict[str, Step] = {}
    rows: list[Row] = []
    torch._dynamo.reset()  # or the shapes of the check would make these dynamic
    for name, prepare in chosen(variants).items():
        start = time.perf_counter()
        counters.clear()
        steps[name] = step = prepare(lambda change, **how: Step(build, device, batch, side, change, **how))
        step()
        breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
        for _ in range(2):
            step()
        peak = step.peak_bytes() + (graph_pool_bytes() if "graphs" in name else 0)
        recompiles = counters["stats"]["unique_graphs"] - graphs
        rows += [
            Row.of(case, name, "peak above static", [peak], "B"),
            Row.of(case, name, "graphs", [graphs], ""),
            Row.of(case, name, "graph breaks", [breaks], ""),
            Row.of(case, name, "recompiles", [recompiles], ""),
        ]
        print(f"{name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
    gc.collect()
    rows += times(case, steps)
    record("convert_compiled", rows, device=device, results=results)


def graph_pool_bytes() -> int:
    """Bytes that CUDA graphs hold. The allocator's peak leaves them out once a graph is replayed.

    All graphs share one pool, so the variant that needs less comes first.
    """
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


def times(case: str, steps: dict[str, Step]) -> list[Row]:
    """Seconds of a step and of its host part, in turns."""
    step_times: dict[str, list[float]] = {name: [] for name in steps}
    host_times: dict[str, list[float]] = {name: [] for name in steps}
    small_times: dict[str, list[float]] = {name: [] for name in steps if "compile" not in name}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step.wait()
            start = time.perf_counter()
            step()
            host_times[name].append(time.perf_counter() - start)
            step.wait()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            step.wait()
            step_times[name].append((time.perf_counter() - start) / STEPS)
    for _ in range(ROUNDS):
        for name, taken in small_times.items():
            with steps[name].small() as step:
                step()
                step.wait()
                start = time.perf_counter()
                step()
                step.wait()
                taken.append(time.perf_counter() - start)
    rows: list[Row] = []
    kernel_times = {name: [kernel_seconds(step)] for name, step in steps.items()}
    for metric, table in (
        ("step", step_times),
        ("host", host_times),
        ("host, small batch", small_times),
        ("kernels", kernel_times),
    ):
        rows += [Row.of(case, name, metric, taken, "s") for name, taken in table.items()]
    plain = statistics.median(step_times[PLAIN])
    rows += [Row.of(case, name, "ratio", [t / plain for t in taken], "x") for name, taken in step_times.items()]
    return rows


def kernel_seconds(step: Step) -> float:
    """The sum over the GPU kernels of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as trace:
        step()
        step.wait()
    return sum(event.self_device_time_total for event in trace.key_averages()) / 1e6


class Step:
    """A training step: forward under autocast, backward, SGD with momentum."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        device: str,
        batch: int,
        side: int,
        change: Callable[[nn.Module], object] = lambda model: None,
        *,
        dtype: torch.dtype | None = torch.bfloat16,
        layout: torch.memory_format = torch.channels_last,
        compiled: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        self.model = build().to(device).to(memory_format=layout).train()
        self.change = change(self.model)  # held: it may hold the undo
        self.call: Any = self.model if compiled is None else torch.compile(self.model, **compiled)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.images = torch.randn(batch, 3, side, side, device=device).to(memory_format=layout)
        self.labels = torch.randint(1000, (batch,), device=device)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.backward()
        self.optimizer.step()
        return loss

    def backward(self) -> Tensor:
        with torch.autocast(self.device, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            loss = F.cross_entropy(self.call(self.images), self.labels)
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        """Gradients at the current parameters, copied."""
        self.optimizer.zero_grad(set_to_none=True)
        self.backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def peak_bytes(self) -> int:
        self.optimizer.zero_grad(set_to_none=True)
        if self.device != "cuda":
            return 0
        static = torch.cuda.memory_allocated()
        return cuda_peak(self) - static

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def small(self) -> Generator[Step]:
        """The same step on two small images."""
        images, labels = self.images, self.labels
        self.images, self.labels = images[:2, :, :64, :64].clone(memory_format=torch.channels_last), labels[:2]
        try:
            yield self
        finally:
            self.images, self.labels = images, labels


Make = Callable[..., Step]
Prepare = Callable[[Make], Step]

GRAPHS = {"mode": "reduce-overhead"}
VARIANTS: dict[str, Prepare] = {
    PLAIN: lambda make: make(lambda model: None),
    "lowtide.convert": lambda make: make(convert),
    "torch.compile": lambda make: make(lambda model: None, compiled={}),
    "torch.compile, lowtide.convert": lambda make: make(convert, compiled={}),
    "torch.compile, CUDA graphs, lowtide.convert": lambda make: make(convert, compiled=GRAPHS),
    "torch.compile, CUDA graphs": lambda make: make(lambda model: None, compiled=GRAPHS),
}


if __name__ == "__main__":
    main(**arguments(__doc__, "results", variants={"default": "", "help": "variants whose name holds this"}))
