"""What does ``lowtide.convert`` save in whole training steps, and at what price? Needs a GPU.

    PYTHONPATH=src:. python -m benchmarks.bench_convert [--only NAME] [--results DIR]

Peaks are bytes above what stays between steps (parameters, buffers, optimizer state); gradients count. Each variant
starts from the same parameters, and its first loss is compared with PyTorch's before it is timed. "step" is what a loop
takes, Python included, one step after the other; "step, GPU time" is a CUDA graph of it, replayed.

``--only torchvision`` compares torchvision's network alone, eager and under ``torch.compile``, in turns: see
``bench_convert_compiled``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks import bench_convert_compiled
from benchmarks.bench_convert_compiled import Step
from benchmarks.gpu_time import captured, timed
from benchmarks.harness import RESULTS, Row, arguments, record, skip
from benchmarks.quiet import quiet
from lowtide import zoo
from lowtide.techniques.batchnorm import convert

VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "PyTorch eager": lambda model: None,
    "lowtide.convert": lambda model: convert(model),
    "lowtide.convert, joins=4": lambda model: convert(model, joins=4),
    "lowtide.convert, joins=8": lambda model: convert(model, joins=8),
}
CASES = {
    "resnext101 fp32": ("resnext101", 64, None, torch.contiguous_format),
    "resnext101 bf16": ("resnext101", 64, torch.bfloat16, torch.channels_last),
    "resnet50 bf16": ("resnet50", 256, torch.bfloat16, torch.channels_last),
    "resnext152 bf16": ("resnext152", 64, torch.bfloat16, torch.channels_last),
    "wrn38 bf16": ("wrn38", 32, torch.bfloat16, torch.channels_last),
}


def main(*, only: str = "", variants: str = "", results: Path = RESULTS) -> None:
    if not torch.cuda.is_available():
        skip("it trains on a GPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if only in "torchvision":
        bench_convert_compiled.main(variants=variants, results=results)
    for case, (name, batch, dtype, layout) in CASES.items():
        if only not in case:
            continue
        title = f"{case} batch {batch} {'NHWC' if layout is torch.channels_last else 'NCHW'}"
        expected: list[float] = []
        for variant, change in VARIANTS.items():
            if variants not in variant:
                continue
            step = Step(partial(zoo.model, name), "cuda", batch, 224, change, dtype=dtype, layout=layout)
            losses = [float(step()) for _ in range(3)]
            expected = expected or losses
            if abs(losses[0] - expected[0]) > 2e-2 * abs(expected[0]):
                raise SystemExit(f"{title}, {variant}: the losses are {losses}, not {expected}")
            with quiet():
                rows = [
                    Row.of(title, variant, "peak above static", [step.peak_bytes()], "B"),
                    Row.of(title, variant, "step", timed(step, calls=5, rounds=5), "s"),
                    Row.of(title, variant, "step, GPU time", timed(captured(step), calls=1, rounds=7), "s"),
                ]
            record("convert", rows, device="cuda", results=results)
            del step
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(**arguments(__doc__, "only", "results", variants={"default": "", "help": "variants whose name holds this"}))
