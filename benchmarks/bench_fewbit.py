"""How near are a few bits to the derivative of each activation, and what do they cost beside torch's own?

The tables' RMSE is √∫(f'−q)²w over standard normal inputs, for 1 to 8 bits. Then forward and backward of GELU: seconds,
and bytes kept for backward, beside PyTorch eager and torch.compile. Before that, outputs must have the same bits, and
gradients must differ as the tables say. On a GPU "GPU time" is by replaying a CUDA graph, "time as launched" is that of
one call after the other. The curves and their steps are drawn to docs/images/fewbit.svg, with altair.

    PYTHONPATH=src:. python -m benchmarks.bench_fewbit [--draw] [--no-compile] [--results DIR]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.drawing import say_drawn
from benchmarks.gpu_time import copy_bandwidth, replayed, timed
from benchmarks.harness import RESULTS, ROOT, Row, arguments, compare, record
from lowtide.kernels.activations import CURVES, Activation
from lowtide.nn import fewbit
from lowtide.nn.fewbit_tables import BITS, table_of
from lowtide.reporting.charts import FONT, alt, chart_of
from lowtide.reporting.figures import save_figure

FIGURE = ROOT / "docs" / "images" / "fewbit.svg"
SHAPES = [((16, 1024, 4096), torch.bfloat16), ((16, 1024, 4096), torch.float32), ((64, 128, 3072), torch.bfloat16)]
CPU_SHAPE = (8, 128, 512)
DRAWN_BITS = (1, 3)


def main(*, draw: bool = False, compiled: bool = True, results: Path = RESULTS) -> None:
    if not draw:
        record("fewbit_tables", list(accuracy()), results=results)
        if torch.cuda.is_available():
            on_a_gpu(compiled, results)
        else:
            on_a_cpu(results)
    if draw or not torch.cuda.is_available():
        say_drawn(lambda: draw_curves(FIGURE))


def accuracy() -> list[Row]:
    case = "RMSE of the derivative, standard normal inputs"
    return [
        Row.of(
            case, name, f"{bits} bit{'s' * (bits > 1)}", [round(table_of(Activation.pointwise(name), bits).rmse, 4)], ""
        )
        for name in CURVES
        for bits in BITS
    ]


def on_a_cpu(results: Path) -> None:
    x, dy = torch.randn(CPU_SHAPE, requires_grad=True), torch.randn(CPU_SHAPE)
    runs = contenders()
    case = f"GELU {'x'.join(map(str, CPU_SHAPE))} float32"
    rows = compare(
        case,
        {name: step(module, x, dy) for name, module in runs.items()},
        check=lambda: [agree(module, x, dy) for module in runs.values()],
        repeats=9,
    )
    record("fewbit", [*rows, *kept(case, runs, x)], results=results)


def on_a_gpu(compiled: bool, results: Path) -> None:
    bandwidth = copy_bandwidth()
    for shape, dtype in SHAPES:
        case = f"GELU {'x'.join(map(str, shape))} {str(dtype)[6:]}"
        x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
        dy = torch.randn(shape, device="cuda").to(dtype)
        runs = contenders()
        for module in runs.values():
            agree(module, x, dy)
        rows = kept(case, runs, x)
        if compiled:
            torch._dynamo.reset()
            runs["torch.compile"] = torch.compile(nn.GELU(), dynamic=False)
        first: dict[str, list[float]] = {}
        for name, module in runs.items():
            run = step(module, x, dy)
            for metric, taken in {"GPU time": replayed(run), "time as launched": timed(run)}.items():
                base = first.setdefault(metric, taken)
                rows.append(Row.of(case, name, metric, taken, "s"))
                ratios = [mine / plain for mine, plain in zip(taken, base, strict=True)]
                rows.append(Row.of(case, name, f"{metric} ratio", ratios, "x"))
        record("fewbit", rows, device="cuda", results=results)
        floor = 4 * x.nbytes / bandwidth
        print(
            f"{case}: reading x and dy and writing y and dx takes {floor * 1e6:.0f} µs at {bandwidth / 1e9:,.0f} GB/s"
        )


def contenders() -> dict[str, nn.Module]:
    """Torch's own first."""
    modules: dict[str, nn.Module] = {"PyTorch eager": nn.GELU()}
    for bits in (3, 4, 2, 1, 8):
        modules[f"lowtide, {bits} bit{'s' * (bits > 1)}"] = fewbit.GELU(bits=bits)
    return modules


def step(module: Any, x: Tensor, dy: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(module(x), x, dy)


def agree(module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """The same bits forward; backward the error that the table has, inputs being normal."""
    if not torch.equal(module(x), nn.functional.gelu(x)):
        raise SystemExit(f"{module} has another output than torch")
    ones = torch.ones_like(dy)
    actual, expected = (torch.autograd.grad(run(x), x, ones)[0].float() for run in (module, nn.functional.gelu))
    error = float((actual - expected).square().mean().sqrt())
    rmse = table_of(Activation.pointwise("gelu"), module.bits).rmse if isinstance(module, fewbit.GELU) else 0.0
    if abs(error - rmse) > 0.02 * rmse + 1e-3:  # bfloat16 rounds slopes too
        raise SystemExit(f"{module}: the gradients' error is {error:.4f}, not {rmse:.4f}")


def kept(case: str, runs: dict[str, nn.Module], x: Tensor) -> list[Row]:
    """Bytes that each keeps for backward."""
    rows: list[Row] = []
    for name, module in runs.items():
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(_count, saved), lambda tensor: tensor):
            module(x)
        rows.append(Row.of(case, name, "kept for backward", [sum(saved)], "B"))
    return rows


def _count(saved: list[int], tensor: Tensor) -> Tensor:
    saved.append(tensor.nbytes)
    return tensor


def draw_curves(path: Path) -> Path:
    """The derivative of every activation, and the steps that stand for it."""
    x = torch.linspace(-4, 4, 321, dtype=torch.float64)
    names = {"f'": "#8a8f98", "1 bit": "#e69f00", "3 bits": "#0072b2"}
    color = alt.Color("line:N", title=None, scale=alt.Scale(domain=list(names), range=list(names.values())))

    def panel(name: str) -> Any:
        curve = Activation.pointwise(name)
        smooth = [{"x": a, "y": b, "line": "f'"} for a, b in zip(x.tolist(), curve.slope(x).tolist(), strict=True)]
        steps: list[dict[str, Any]] = []
        for bits in DRAWN_BITS:
            table = table_of(curve, bits)
            line = f"{bits} bit{'s' * (bits > 1)}"
            inside = [b for b in table.boundaries if -4 < b < 4]
            first = sum(b <= -4 for b in table.boundaries)
            ends = [-4.0, *inside, 4.0]
            for i in range(len(ends) - 1):
                level = table.levels[first + i]
                steps += [{"x": ends[i], "y": level, "line": line}, {"x": ends[i + 1], "y": level, "line": line}]
        axes = {
            "x": alt.X("x:Q", title=None, axis=alt.Axis(tickCount=5)),
            "y": alt.Y("y:Q", title=None),
            "color": color,
        }
        back = chart_of(smooth).mark_line(strokeWidth=3, opacity=0.7).encode(**axes)
        front = chart_of(steps).mark_line(strokeWidth=1.5).encode(**axes)
        return (back + front).properties(width=170, height=130, title=name)

    subtitle = "The best 2 and the best 8 steps for inputs from the standard normal distribution."
    title = alt.TitleParams(
        "Derivatives of 13 activations, and few-bit approximations", subtitle=subtitle, anchor="start"
    )
    chart = alt.concat(*(panel(name) for name in CURVES), columns=5, title=title, background="white", padding=16)
    return save_figure(chart.configure(font=FONT).configure_view(stroke=None).configure_legend(orient="bottom"), path)


if __name__ == "__main__":
    main(**arguments(__doc__, "draw", "no_compile", "results"))
