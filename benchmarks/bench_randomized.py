"""What does a linear layer take and keep that sketches its input, beside ``nn.Linear``?

Forward and backward passes of one layer, bf16 on a GPU: 16,384 rows, 1024 to 4096 features and back, at ratio 0.2.
"kept" is the bytes that autograd holds of the input, counted. "gradient error" is √(variance) over the norm of the
weight's gradient, the mean over a few draws. The input is random, and the gradient depends on it.

    PYTHONPATH=src:. python -m benchmarks.bench_randomized [--results DIR]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.gpu_time import replayed, timed
from benchmarks.harness import RESULTS, Row, arguments, compare, default_device, record
from lowtide.nn import RandomizedLinear

RATIO = 0.2
SHAPES = [(16384, 1024, 4096), (16384, 4096, 1024)]
CPU_SHAPES = [(2048, 256, 1024), (2048, 1024, 256)]
CHOICES: list[tuple[str, int | None]] = [
    ("rademacher", 128), ("gaussian", 128), ("dct", 128), ("rows", 128), ("rows", None),
]  # fmt: skip
WHOLE: list[tuple[str, int | None]] = [("rademacher", None), ("dct", None)]  # of the batch at once: slow, for the table


def main(*, results: Path = RESULTS) -> None:
    device = default_device()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for rows, inner, outer in SHAPES if device == "cuda" else CPU_SHAPES:
        torch.manual_seed(0)
        case = f"{rows:,} rows, {inner} to {outer}, {str(dtype)[6:]}"
        plain = nn.Linear(inner, outer, device=device, dtype=dtype)
        x = torch.randn(rows, inner, device=device, dtype=dtype, requires_grad=True)
        with torch.no_grad():
            gradient = (plain(x) + torch.randn(rows, outer, device=device, dtype=dtype)) / rows
        layers = {"nn.Linear": plain} | {
            f"lowtide, {kind}, {'blocks of ' + str(block) if block else 'one block'}": RandomizedLinear.from_linear(
                plain, ratio=RATIO, sketch=kind, block=block
            )
            for kind, block in (*CHOICES, *WHOLE)
        }
        for layer in layers.values():
            agree(layer, plain, x, gradient)
        steps = {name: partial(step, layer, x, gradient) for name, layer in layers.items()}
        rows_of = times(case, steps, device)
        for name, layer in layers.items():
            rows_of.append(Row.of(case, name, "kept", [kept_bytes(layer, x)], "B"))
            errors = [error(layer, plain, x, gradient) for _ in range(3)] if layer is not plain else [0.0]
            rows_of.append(Row.of(case, name, "gradient error", [100 * e for e in errors], "%"))
        record("randomized", rows_of, device=device, results=results)


def times(case: str, steps: dict[str, Callable[[], object]], device: str) -> list[Row]:
    if device == "cpu":
        return compare(case, steps, check=lambda: None, repeats=7)
    rows: list[Row] = []
    first: dict[str, float] = {}
    for name, run in steps.items():
        # A block that is the whole batch goes through torch's sort or FFT, which a graph need not hold.
        measures = {"as launched": timed} if "one block" in name else {"GPU time": replayed, "as launched": timed}
        for metric, measure in measures.items():
            taken = measure(run)
            base = first.setdefault(metric, statistics.median(taken))
            rows.append(Row.of(case, name, metric, taken, "s"))
            rows.append(Row.of(case, name, f"{metric}, ratio", [t / base for t in taken], "x"))
    return rows


def step(layer: nn.Module, x: Tensor, gradient: Tensor) -> object:
    """Forward and backward, all three gradients."""
    return torch.autograd.grad(layer(x), [x, *layer.parameters()], gradient)


def agree(layer: nn.Module, plain: nn.Module, x: Tensor, gradient: Tensor) -> None:
    """The output and the exact gradients bit for bit; the weight's within a few times what the ratio lets expect."""
    expected, sketched = step(plain, x, gradient), step(layer, x, gradient)
    if not torch.equal(layer(x), plain(x)):
        raise SystemExit(f"{layer} gives another output")
    for place in (0, 2):
        if not torch.equal(sketched[place], expected[place]):
            raise SystemExit(f"{layer} gives another gradient of the {('input', '', 'bias')[place]}")
    if (off := error(layer, plain, x, gradient)) > 4:
        raise SystemExit(f"the weight's gradient of {layer} is off by {off:.1f} times its norm")


def error(layer: nn.Module, plain: nn.Module, x: Tensor, gradient: Tensor) -> float:
    sketched, expected = (step(m, x, gradient)[1].float() for m in (layer, plain))
    return float((sketched - expected).norm() / expected.norm())


def kept_bytes(layer: nn.Module, x: Tensor) -> float:
    """Bytes that autograd holds beside the parameters."""
    held: dict[int, int] = {}
    parameters = {p.data_ptr() for p in layer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            held[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    del y
    return float(sum(held.values()))


if __name__ == "__main__":
    main(**arguments(__doc__, "results"))
