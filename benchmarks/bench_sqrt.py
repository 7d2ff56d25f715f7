"""What does √n recomputation save, and what does it cost? Beside torch's checkpoint_sequential, on a CPU or a GPU.

Before anything is timed, losses, gradients, buffers and generators of each way are compared with the plain step's.
Tensors that differ are counted: none may for lowtide. They show that torch's checkpoint runs batch norm twice.
On a CPU one thread computes: several that wait for each other on a busy machine measure the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.harness import RESULTS, Row, arguments, compare, default_device, record
from benchmarks.steps import Way, outcome, plain_step, under
from lowtide import Workload, profile, zoo
from lowtide.techniques import Forward, Undo, replace_forward
from lowtide.techniques.sqrt import checkpoint_segments

# The model, and where its chains of blocks are.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "GPT-2, 16 blocks of width 128, batch 4 x 128": (
        {"name": "gpt2", "layers": 16, "width": 128, "heads": 4, "vocab": 512, "batch": 4, "seq": 128},
        ("blocks",),
    ),
    "WRN-28-2, 3 times 4 blocks, batch 16": (
        {"name": "wrn28-2", "batch": 16},
        ("stages.0", "stages.1", "stages.2"),
    ),
}


class Peer(Forward):
    """Checkpoint a chain as people do without lowtide."""

    def __init__(self, module: nn.Module, segments: int) -> None:
        super().__init__(module)
        self.segments = segments

    def __call__(self, input: Tensor) -> Any:
        return checkpoint_sequential(list(self.module.children()), self.segments, input, use_reentrant=False)


def main(repeats: int = 9, results: Path = RESULTS) -> None:
    device = default_device()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case, (options, paths) in CASES.items():
        rows += measure(case, zoo.workload(device=device, optimizer="sgd", **options), paths, device, repeats)
    record("sqrt", rows, device=device, results=results)


def measure(case: str, work: Workload, paths: tuple[str, ...], device: str, repeats: int) -> list[Row]:
    chains = [work.model.get_submodule(path) for path in paths]
    blocks = len(list(chains[0].children()))
    root = round(blocks**0.5)

    def ours(segments: int, levels: int = 1, kept: int = 0) -> Callable[[], ExitStack]:
        def way() -> ExitStack:
            options = {"levels": levels, "kept": kept}
            return _all(checkpoint_segments(cast(nn.Sequential, c), segments, **options) for c in chains)

        return way

    def theirs(segments: int) -> Callable[[], ExitStack]:
        return lambda: _all(replace_forward(Peer(chain, segments)) for chain in chains)

    ways: dict[str, Way] = {
        "plain step": nullcontext,
        f"lowtide, √n = {root} segments": ours(root),
        f"lowtide, {root} segments, the last kept": ours(root, kept=1),
        f"lowtide, {root} segments in two levels": ours(root, levels=2),
        f"lowtide, {blocks} segments": ours(blocks),
        f"torch checkpoint_sequential, {root} segments": theirs(root),
    }
    expected = outcome(work)
    rows: list[Row] = []
    for subject, way in ways.items():
        with way():
            results, traced = outcome(work), profile(work)
        different = sum(not torch.equal(results[name], value) for name, value in expected.items())
        if different and subject.startswith("lowtide"):
            raise SystemExit(f"{case}, {subject}: {different} tensors differ from the plain step's")
        rows.append(Row.of(case, subject, "allocated peak", [traced.peak_bytes], "B"))
        rows.append(Row.of(case, subject, "saved for backward", [traced.saved_bytes], "B"))
        rows.append(Row.of(case, subject, "tensors that differ", [different], ""))
    contenders = {subject: under(way, partial(plain_step, work)) for subject, way in ways.items()}
    return rows + compare(case, contenders, check=lambda: None, repeats=repeats, warmup=1, device=device)


def _all(undos: Iterable[Undo]) -> ExitStack:
    stack = ExitStack()
    for undo in undos:
        stack.callback(undo)
    return stack


if __name__ == "__main__":
    main(**arguments(__doc__, "results"))
