"""What does one block of batch norm, leaky ReLU and convolution keep, and what does it take, under each strategy?

The in-place paper (Rota Bulò, Porzi and Kontschieder, 2018) times such a block alone. The shapes here are those of the
two networks that it trains, stage by stage: half the side, twice the channels.

"kept" is what stays allocated after the forward pass, but for the block's output: by the allocator's own count, where
nothing of lowtide is used. The block's input is another op's output that nobody else holds, as in a network. So it
counts only where the block needs it. "peak" is over both passes, the gradients of all parameters
included. On a GPU "time" is the GPU's alone, by replaying a CUDA graph; "time as launched" has Python's share.

    PYTHONPATH=src:. python -m benchmarks.bench_block [--results DIR]
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu_time import replayed, timed
from benchmarks.harness import RESULTS, Row, arguments, compare, default_device, record
from lowtide.nn import BatchNormAct2d
from lowtide.nn.strategies import Strategy

PLAIN = "PyTorch eager"
STRATEGIES: tuple[Strategy, ...] = ("standard", "checkpoint", "checkpoint_xhat", "inplace", "inplace2")
# The shape of the block's input, and the groups of its 3x3 convolution.
SHAPES = {
    "WRN-38, 32x128x112x112": ((32, 128, 112, 112), 1),
    "WRN-38, 32x256x56x56": ((32, 256, 56, 56), 1),
    "WRN-38, 32x512x28x28": ((32, 512, 28, 28), 1),
    "ResNeXt-101, 32x256x56x56": ((32, 256, 56, 56), 32),
    "ResNeXt-101, 32x512x28x28": ((32, 512, 28, 28), 32),
    "ResNeXt-101, 32x1024x14x14": ((32, 1024, 14, 14), 32),
}
CPU_SHAPES = {
    "4x64x56x56": ((4, 64, 56, 56), 1),
    "4x128x28x28": ((4, 128, 28, 28), 1),
    "4x256x28x28, 32 groups": ((4, 256, 28, 28), 32),
}


def main(*, results: Path = RESULTS) -> None:
    device = default_device()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for case, (shape, groups) in (SHAPES if device == "cuda" else CPU_SHAPES).items():
        blocks = make_blocks(shape, groups, device)
        rows = time_blocks(case, blocks, device)
        for name, block in blocks.items():
            taken = memory(block.forward, block.backward, device)
            rows += [
                Row.of(case, name, "kept", [taken.kept_bytes], "B"),
                Row.of(case, name, "buffers kept", [round(taken.kept_bytes / block.source.nbytes, 2)], ""),
                Row.of(case, name, "peak", [taken.peak_bytes], "B"),
            ]
        record("block", rows, device=device, results=results)


class Block:
    """Batch norm, leaky ReLU and a 3x3 convolution, with an input and a gradient for its output."""

    def __init__(self, model: nn.Module, source: Tensor, gradient: Tensor) -> None:
        self.model = model
        self.source = source
        self.gradient = gradient

    def __call__(self) -> tuple[Tensor, ...]:
        return self.backward(self.model(self.source))

    def forward(self) -> Tensor:
        """On an input that is an op's output, which the block alone can keep alive."""
        return self.model(self.source.mul(1))

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, [self.source, *self.model.parameters()], self.gradient)


def make_blocks(shape: tuple[int, ...], groups: int, device: str) -> dict[str, Block]:
    """The contenders: the same parameters, input and gradient."""
    torch.manual_seed(0)
    channels = shape[1]
    layers: dict[str, list[nn.Module]] = {PLAIN: [nn.BatchNorm2d(channels), nn.LeakyReLU(inplace=True)]}
    for strategy in STRATEGIES:
        layers[f"lowtide, {strategy}"] = [BatchNormAct2d(channels, "leaky_relu", strategy)]
    convolution = nn.Conv2d(channels, channels, kernel_size=3, padding=1, groups=groups, bias=False)
    source = torch.randn(shape, device=device, requires_grad=True)
    gradient = torch.randn(shape, device=device)
    return {
        name: Block(nn.Sequential(*norm_act, convolution).to(device), source, gradient)
        for name, norm_act in layers.items()
    }


def time_blocks(case: str, blocks: dict[str, Block], device: str) -> list[Row]:
    check = partial(agree, blocks)
    if device == "cpu":
        return compare(case, blocks, check=check, repeats=9)
    check()
    base = 0.0
    rows: list[Row] = []
    for name, block in blocks.items():
        taken = replayed(block)
        base = base or statistics.median(taken)
        rows += [
            Row.of(case, name, "time", taken, "s"),
            Row.of(case, name, "time ratio", [seconds / base for seconds in taken], "x"),
            Row.of(case, name, "time as launched", timed(block), "s"),
        ]
    return rows


def agree(blocks: dict[str, Block]) -> None:
    """Compare outputs and all gradients with PyTorch's."""

    def run(block: Block) -> list[Tensor]:
        out = block.model(block.source)
        return [out.detach(), *block.backward(out)]

    expected = run(blocks[PLAIN])
    for name, block in blocks.items():
        for result, right in zip(run(block), expected, strict=True):
            error = float((result - right).norm() / right.norm())
            if error > 1e-3:  # the convolution rounds its inputs to TF32
                raise SystemExit(f"{name}: results differ from PyTorch's by {error:.1e}")


class Memory(NamedTuple):
    """Bytes of a forward and a backward pass, above the bytes allocated before."""

    kept_bytes: int  # after the forward pass, but for its output
    peak_bytes: int  # over both


def memory(forward: Callable[[], Tensor], backward: Callable[[Tensor], Any], device: str) -> Memory:
    """Count both passes by the allocator, after one of each, which allocates what libraries keep."""
    backward(forward())
    gc.collect()
    if device == "cpu":
        return _cpu_memory(forward, backward)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = forward()
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    backward(out)
    return Memory(kept, torch.cuda.max_memory_allocated() - before)


def _cpu_memory(forward: Callable[[], Tensor], backward: Callable[[Tensor], Any]) -> Memory:
    """The same from the events of torch.profiler, which has one for every allocation."""
    with _events() as recording:
        out = forward()
    kept = sum(_sizes(recording)) - out.nbytes
    level = peak = 0
    del out
    with _events() as recording:
        backward(forward())
    for size in _sizes(recording):
        level += size
        peak = max(peak, level)
    return Memory(kept, peak)


def _events() -> torch.profiler.profile:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True)


def _sizes(recording: torch.profiler.profile) -> list[int]:
    """Bytes allocated (positive) and freed (negative), in order."""
    profiler: Any = recording.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


if __name__ == "__main__":
    main(**arguments(__doc__, "results"))
