"""How many passes over memory do batch norm + activation take, forward and backward?

One pass is the activation's bytes over the bandwidth of a copy. "passes" is the GPU's time, by replaying a CUDA graph.
"passes as launched" is the time of one call after the other. It includes Python, which small tensors cannot hide.

The floor is 8 when the tensor is read from memory in every sweep: 3 forward, 5 backward. It is 5 when a channel stays
on the chip between two sweeps. A rebuilt z adds 2. Peers, in the same run: PyTorch eager in both layouts,
torch.compile.

Without a GPU: seconds. lowtide's layers run ATen's kernels there, and should be no slower than PyTorch's.

    PYTHONPATH=src:. python -m benchmarks.bench_batchnorm [--no-compile] [--results DIR]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_time import copy_bandwidth, replayed, timed
from benchmarks.harness import RESULTS, Row, arguments, compare, record
from lowtide.nn import BatchNormAct2d, keep_one_buffer

SHAPES = [(64, 64, 112, 112), (64, 256, 56, 56), (64, 512, 28, 28), (256, 512, 14, 14), (64, 2048, 7, 7)]
CPU_SHAPES = [(16, 64, 56, 56), (16, 256, 28, 28), (16, 512, 14, 14)]
DTYPES = (torch.float32, torch.bfloat16)
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


def main(*, compiled: bool = True, results: Path = RESULTS) -> None:
    if not torch.cuda.is_available():
        on_a_cpu(results)
        return
    bandwidth = copy_bandwidth()
    for dtype in DTYPES:
        for shape in SHAPES:
            case = f"{'x'.join(map(str, shape))} {str(dtype)[6:]}"
            one_pass = torch.Size(shape).numel() * dtype.itemsize / bandwidth
            rows: list[Row] = []
            for name, run in contenders(shape, dtype, compiled=compiled).items():
                for metric, taken in {"passes": replayed(run), "passes as launched": timed(run)}.items():
                    rows.append(Row.of(case, name, metric, [t / one_pass for t in taken], ""))
            record("batchnorm", rows, device="cuda", results=results)
    print(f"A copy runs at {bandwidth / 1e9:,.0f} GB/s.")


def on_a_cpu(results: Path) -> None:
    for shape in CPU_SHAPES:
        for layout, memory_format in LAYOUTS.items():
            x = torch.randn(shape).to(memory_format=memory_format).requires_grad_()
            gradient = torch.randn(shape).to(memory_format=memory_format)
            eager = nn.Sequential(nn.BatchNorm2d(shape[1]), nn.ReLU(inplace=True))
            ours = BatchNormAct2d(shape[1], "relu")
            rows = compare(
                f"{'x'.join(map(str, shape))} float32 {layout}",
                {
                    "PyTorch eager, ReLU": step(eager, x, gradient),
                    "lowtide, ReLU by checkpoint": step(ours, x, gradient),
                },
                check=partial(agree, ours, eager, x, gradient),
                repeats=15,
            )
            record("batchnorm_cpu", rows, results=results)


def contenders(shape: tuple[int, ...], dtype: torch.dtype, *, compiled: bool) -> dict[str, Callable[[], object]]:
    """A forward and a backward pass each. Their results are compared before anything is timed."""
    steps: dict[str, Callable[[], object]] = {}
    for layout, memory_format in LAYOUTS.items():
        x = torch.randn(shape, device="cuda").to(dtype).to(memory_format=memory_format).requires_grad_()
        gradient = torch.randn(shape, device="cuda").to(dtype).to(memory_format=memory_format)
        channels = shape[1]
        eager = {
            act: nn.Sequential(nn.BatchNorm2d(channels), activation).cuda() for act, activation in _plain().items()
        }
        in_place = BatchNormAct2d(channels, "leaky_relu", "inplace").cuda()
        kept_x = BatchNormAct2d(channels, "relu", "checkpoint").cuda()
        agree(in_place, eager["leaky"], x, gradient)
        agree(kept_x, eager["relu"], x, gradient)
        steps[f"PyTorch eager {layout}, leaky ReLU"] = step(eager["leaky"], x, gradient)
        steps[f"PyTorch eager {layout}, ReLU"] = step(eager["relu"], x, gradient)
        if compiled:
            torch._dynamo.reset()
            steps[f"torch.compile {layout}, leaky ReLU"] = step(
                torch.compile(eager["leaky"], dynamic=False), x, gradient
            )
        steps[f"lowtide {layout}, leaky ReLU in place"] = step(in_place, x, gradient)
        steps[f"lowtide {layout}, ReLU by checkpoint, z rebuilt"] = step(kept_x, x, gradient, read=True)
    return steps


def _plain() -> dict[str, nn.Module]:
    return {"leaky": nn.LeakyReLU(inplace=True), "relu": nn.ReLU(inplace=True)}


def step(model: Any, x: Tensor, gradient: Tensor, *, read: bool = False) -> Callable[[], object]:
    """Forward and backward; ``read``: z is saved by a reader, which has it rebuilt in backward."""

    def run() -> object:
        if not read:
            return torch.autograd.grad(model(x), x, gradient)
        with keep_one_buffer():
            z = _Reader.apply(model(x))
        return torch.autograd.grad(z, x, gradient)

    return run


class _Reader(torch.autograd.Function):
    """Saves its input as a convolution does, and costs nothing else."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        assert ctx.saved_tensors[0].shape == gradients[0].shape
        return gradients[0]


def agree(ours: nn.Module, theirs: nn.Module, x: Tensor, gradient: Tensor) -> None:
    actual, expected = (torch.autograd.grad(model(x), x, gradient)[0].float() for model in (ours, theirs))
    error = float((actual - expected).norm() / expected.norm())
    if error > 1e-2:
        raise SystemExit(f"the gradients differ by {error:.1e}")


if __name__ == "__main__":
    main(**arguments(__doc__, "no_compile", "results"))
