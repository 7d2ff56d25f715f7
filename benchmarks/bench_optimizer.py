"""What does a step of the optimizer take, in bytes and seconds, with states in 8 bits? And what becomes of the result?

On a GPU: the parameters of GPT-2 medium in float32. AdamW with 8-bit states moves 16 bytes a parameter where torch's
fused AdamW moves 28. ``lowtide`` is the kernel in ``lowtide/kernels/triton/adamw8bit.py``. bitsandbytes stands beside
it where it is installed. "time" is of 20 steps in a row, which are launched ahead of the GPU.

On a CPU: a smaller set of parameters, and the result: LeNet on MNIST if the data is found.

    PYTHONPATH=src:. python -m benchmarks.bench_optimizer [--data DIR] [--results DIR]
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.data import mnist
from benchmarks.gpu_time import timed
from benchmarks.harness import RESULTS, Row, arguments, compare, default_device, record
from lowtide import Workload, profile, zoo
from lowtide.errors import LowtideError
from lowtide.optim import AdamW8bit, lower_state, round_updates, step_in_backward, store_gradients

Make = Callable[[Any], torch.optim.Optimizer]


def adamw(**options: Any) -> Make:
    return lambda ps: torch.optim.AdamW(ps, lr=1e-3, **options)


def changed(change: Callable[[torch.optim.Optimizer], object], **options: Any) -> Make:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(**options)(parameters)
        change(optimizer)
        return optimizer

    return make


def bitsandbytes(parameters: Any) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-3, weight_decay=1e-2)


def main(*, data: str | None = None, results: Path = RESULTS) -> None:
    device = default_device()
    size: dict[str, Any] = {} if device == "cuda" else {"layers": 2, "width": 256, "heads": 4, "vocab": 5000}
    with torch.device("meta"):
        shapes = [p.shape for p in zoo.model("gpt2-medium", **size).parameters()]
    count = sum(shape.numel() for shape in shapes)
    case = f"step of {count / 1e6:.1f}M parameters in {len(shapes)} tensors, as GPT-2 has them"
    ways: dict[str, Make] = {"torch AdamW, fused": adamw(fused=True), "torch AdamW, foreach": adamw(foreach=True)}
    ways["lowtide AdamW8bit"] = lambda ps: AdamW8bit(ps, lr=1e-3)
    if find_spec("bitsandbytes") is not None:
        ways["bitsandbytes AdamW8bit"] = bitsandbytes
    if device == "cuda":
        ways["torch AdamW, fused, states on the host"] = changed(lambda o: lower_state(o, "cpu"), fused=True)
    rows = steps(case, shapes, ways, device)
    record("optimizer", rows, device=device, results=results)
    if device == "cpu":
        record("optimizer_peaks", peaks(), results=results)
        quality(data, results)


def steps(case: str, shapes: list[torch.Size], ways: dict[str, Make], device: str) -> list[Row]:
    """Bytes and seconds of a step, one way after the other, so that their states are not all there at once."""
    rows: list[Row] = []
    expected: list[Tensor] = []
    first = 0.0
    for subject, make in ways.items():
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer = make(parameters)
        for _ in range(3):
            optimizer.step()
        if not expected:
            expected = [p.detach().clone() for p in parameters]
        worst = max(float((p.detach() - e).norm() / e.norm()) for p, e in zip(parameters, expected, strict=True))
        if worst > 0.02:
            raise SystemExit(f"{subject}: after three steps the parameters differ by {worst:.1e}")
        held = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        count = sum(p.numel() for p in parameters)
        on_device = sum(v.nbytes for v in held if v.device.type == device)
        rows.append(Row.of(case, subject, "state bytes a parameter", [round(on_device / count, 3)], ""))
        if device == "cuda":
            taken = timed(optimizer.step, calls=20)  # launches run ahead, so that this is the GPU's time
        else:
            timing = compare(case, {subject: optimizer.step}, check=lambda: None, repeats=7)
            taken = [timing[0].low, timing[0].value, timing[0].high]
        first = first or sorted(taken)[len(taken) // 2]
        rows.append(Row.of(case, subject, "time", taken, "s"))
        rows.append(Row.of(case, subject, "time ratio", [t / first for t in taken], "x"))
        del optimizer, held, parameters
    return rows


def peaks() -> list[Row]:
    """The traced peak of a whole step of a small GPT-2, and its parts."""
    case = "GPT-2, 4 blocks of width 256, batch 1 x 32: a whole step"
    sizes: dict[str, Any] = {"layers": 4, "width": 256, "heads": 4, "vocab": 2000, "batch": 1, "seq": 32}
    ways: dict[str, list[Callable[[torch.optim.Optimizer], object]]] = {
        "torch AdamW": [],
        "8-bit states": [lambda o: lower_state(o, "8bit")],
        "step in backward": [step_in_backward],
        "8-bit states, step in backward": [lambda o: lower_state(o, "8bit"), step_in_backward],
        "16-bit gradients": [lambda o: store_gradients(o, "16bit")],
        "8-bit gradients": [lambda o: store_gradients(o, "8bit")],
    }
    if find_spec("torchao") is not None:
        ways["4-bit states, by torchao"] = [lambda o: lower_state(o, "4bit")]
    rows: list[Row] = []
    for subject, changes in ways.items():
        work: Workload = zoo.workload("gpt2", optimizer="adamw", **sizes)
        assert work.optimizer is not None
        for change in changes:
            change(work.optimizer)
        profiled = profile(work)
        rows.append(Row.of(case, subject, "peak", [profiled.peak_bytes], "B"))
        rows.append(Row.of(case, subject, "static", [profiled.static_bytes], "B"))
        gradients = profiled.graph.live_bytes("gradient")
        rows.append(Row.of(case, subject, "gradients in full at once", [int(gradients.max())], "B"))
    return rows


def quality(data: str | None, results: Path) -> None:
    """LeNet on MNIST, two epochs over 6,000 images: the loss at the end and the accuracy, over seeds."""
    try:
        (images, labels), test = mnist(data)
    except LowtideError as error:
        print(f"no quality rows: {error}")
        return
    half = torch.bfloat16
    ways: dict[str, tuple[torch.dtype, Make]] = {
        "float32 weights, AdamW": (torch.float32, adamw()),
        "float32 weights, AdamW8bit": (torch.float32, lambda ps: AdamW8bit(ps, lr=1e-3)),
        "float32 weights, AdamW, 16-bit gradients": (torch.float32, changed(lambda o: store_gradients(o, "16bit"))),
        "float32 weights, AdamW, 8-bit gradients": (torch.float32, changed(lambda o: store_gradients(o, "8bit"))),
        "bfloat16 weights, AdamW, to nearest": (half, adamw()),
        "bfloat16 weights, AdamW, stochastic": (half, changed(lambda o: round_updates(o, "stochastic"))),
        "bfloat16 weights, AdamW, kahan": (half, changed(lambda o: round_updates(o, "kahan"))),
        "bfloat16 weights, AdamW8bit, stochastic": (
            half,
            lambda ps: AdamW8bit(ps, lr=1e-3, rounding="stochastic"),
        ),
    }
    if find_spec("bitsandbytes") is not None:
        ways["float32 weights, bitsandbytes AdamW8bit"] = (torch.float32, bitsandbytes)
    if find_spec("torchao") is not None:
        ways["float32 weights, AdamW, 4-bit states by torchao"] = (
            torch.float32,
            changed(lambda o: lower_state(o, "4bit")),
        )
    case = "LeNet on MNIST, 2 epochs of 6,000 images, batch 64"
    rows: list[Row] = []
    for subject, (dtype, make) in ways.items():
        trainings = [_train(seed, dtype, make, images[:6_000], labels[:6_000], test) for seed in range(3)]
        for metric, index, unit in (("loss", 0, ""), ("accuracy", 1, "%")):
            values = [each[index] for each in trainings]
            rows.append(Row(case, subject, metric, sum(values) / 3, min(values), max(values), unit, 3))
    record("optimizer_quality", rows, results=results)


def _train(seed: int, dtype: torch.dtype, make: Make, images: Tensor, labels: Tensor, test: Any) -> tuple[float, float]:
    torch.manual_seed(seed)
    model = zoo.model("lenet", norm=False).to(dtype)
    optimizer = make(model.parameters())
    last: list[float] = []
    for _ in range(2):
        order = torch.randperm(len(images))
        for chosen in order[: len(order) // 64 * 64].split(64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[chosen].to(dtype)).float(), labels[chosen])
            loss.backward()
            optimizer.step()
            last.append(loss.item())
    with torch.no_grad():
        predicted = torch.cat([model(part.to(dtype)).argmax(1) for part in test.inputs.split(1000)])
    tail = last[-100:]
    return round(sum(tail) / len(tail), 4), 100 * float((predicted == test.labels).float().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(**arguments(__doc__, "data", "results"))
