"""CUDA graphs over one pool: what is recorded runs when it is launched, and a failure leaves torch as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.engines.cuda_graphs import GraphRecorder
from lowtide.tracing.meter import pooled_bytes

MIB = 2**20

pytestmark = pytest.mark.gpu


def test_a_call_is_launched_over_the_same_memory() -> None:
    x = torch.ones(MIB, device="cuda")
    recorder = GraphRecorder(x.device)

    def code(arguments: list[Any]) -> Any:
        (given,) = arguments
        arguments.clear()
        return (given * 2 + 1).sum() + torch.rand((), device="cuda")

    launch, result = recorder.record(code, [x])
    held, peak = recorder.finish()
    assert held >= peak >= 8 * MIB
    assert pooled_bytes(x.device) > 0
    values: list[float] = []
    for factor in (1, 1, 3):
        x.fill_(factor)
        launch()
        values.append(float(result) - MIB * (2 * factor + 1))
    assert all(-1 <= value <= 2 for value in values)  # rounded to multiples of a quarter
    del launch, result
    recorder.free()
    assert pooled_bytes(x.device) == 0


def test_the_pool_starts_with_one_block() -> None:
    def code(arguments: list[Any]) -> Any:
        small = torch.ones(12 * MIB, dtype=torch.uint8, device="cuda")
        large = torch.ones(30 * MIB, dtype=torch.uint8, device="cuda")
        del small, large
        return torch.ones(40 * MIB, dtype=torch.uint8, device="cuda")

    sizes: list[tuple[int, int]] = []
    for block in (0, 42 * MIB):
        recorder = GraphRecorder(torch.device("cuda"), block)
        _, _ = recorder.record(code, [])
        sizes.append(recorder.finish())
    assert sizes[1][0] < sizes[0][0]
    assert sizes[1][0] >= sizes[0][1]


def test_a_call_that_cannot_be_recorded_leaves_torch_as_it_was() -> None:
    x = torch.ones(4, device="cuda")
    stream = torch.cuda.current_stream()
    recorder = GraphRecorder(x.device)
    with pytest.raises(RuntimeError):
        recorder.record(lambda arguments: [each.cpu() for each in arguments], [x])
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    assert torch.rand(2, device="cuda").isfinite().all()
    recorder = GraphRecorder(x.device)
    launch, doubled = recorder.record(lambda arguments: arguments[0] * 2, [x])
    recorder.finish()
    launch()
    assert doubled.tolist() == [2.0] * 4
