"""What does √n recomputation save, and what does it cost? Beside torch's checkpoint_sequential, on a CPU or a GPU.

Before anything is timed, losses, gradients, buffers and generators of each way are set beside the plain step's, and
the tensors that differ are counted: none may for lowtide. torch's checkpoint runs batch norm twice, and shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.harness import Row, compare, record
from lowtide import Workload, profile, zoo
from lowtide.techniques import Forward, replace_forward
from lowtide.techniques.sqrt import checkpoint_segments
from lowtide.tracing.capture import unchanged

# The model, where its blocks are, and how many there are.
CASES: dict[str, tuple[dict[str, Any], str, int]] = {
    "GPT-2, 16 blocks of width 128, batch 4 x 128": (
        {"name": "gpt2", "layers": 16, "width": 128, "heads": 4, "vocab": 512, "batch": 4, "seq": 128},
        "blocks",
        16,
    ),
    "WRN-28-2, 12 blocks, batch 16": ({"name": "wrn28-2", "batch": 16}, "stages", 12),
}


class Peer(Forward):
    """What people write without lowtide."""

    segments: int

    def __call__(self, input: Tensor) -> Any:
        return checkpoint_sequential(list(self.module.children()), self.segments, input, use_reentrant=False)


def main(repeats: int = 7) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []
    for case, (options, path, blocks) in CASES.items():
        rows += measure(case, zoo.workload(device=device, optimizer="sgd", **options), path, blocks, device, repeats)
    record("sqrt", rows, device=device)


def measure(case: str, work: Workload, path: str, blocks: int, device: str, repeats: int) -> list[Row]:
    chain = work.model.get_submodule(path)
    assert isinstance(chain, nn.Sequential)
    root = round(blocks**0.5)

    def peer() -> AbstractContextManager[object]:
        forward = Peer(chain)
        forward.segments = root
        return replace_forward(forward)

    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain step": nullcontext,
        f"lowtide, √n = {root} segments": lambda: checkpoint_segments(chain, root),
        f"lowtide, {root} segments in two levels": lambda: checkpoint_segments(chain, root, levels=2),
        f"lowtide, every block ({blocks})": lambda: checkpoint_segments(chain, blocks),
        f"torch checkpoint_sequential, {root}": peer,
    }
    expected = outcome(work)
    rows: list[Row] = []
    for subject, way in ways.items():
        with way():
            found, traced = outcome(work), profile(work)
        different = sum(not torch.equal(found[name], value) for name, value in expected.items())
        if different and subject.startswith("lowtide"):
            raise SystemExit(f"{case}, {subject}: {different} tensors differ from the plain step's")
        rows.append(Row.of(case, subject, "allocated peak", [traced.peak_bytes], "B"))
        rows.append(Row.of(case, subject, "saved for backward", [traced.saved_bytes], "B"))
        rows.append(Row.of(case, subject, "tensors that differ", [different], ""))

    def run(way: Callable[[], AbstractContextManager[object]]) -> Callable[[], object]:
        def step() -> None:
            with way():
                plain_step(work)

        return step

    contenders = {subject: run(way) for subject, way in ways.items()}
    return rows + compare(case, contenders, check=lambda: None, repeats=repeats, warmup=1, device=device)


def outcome(work: Workload) -> dict[str, Tensor]:
    """Everything that a step leaves, copied; the step itself is taken back."""
    with unchanged(work):
        torch.manual_seed(0)
        loss = plain_step(work)
        model = work.model
        found = {"loss": loss, "generator": torch.get_rng_state()}
        found |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
        found |= dict(model.named_buffers())
        return {name: value.detach().clone() for name, value in found.items()}


def plain_step(work: Workload) -> Tensor:
    assert work.optimizer is not None
    work.optimizer.zero_grad(set_to_none=True)
    loss = work.compute_loss()
    loss.backward()
    work.optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    main()
