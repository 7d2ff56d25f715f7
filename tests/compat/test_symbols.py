"""Sizes as symbols: marked in a block, captured by Dynamo, and evaluated."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from lowtide.compat.symbols import expression_of, is_symbol, value_of, varying
from lowtide.errors import TraceError


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:
    yield
    torch._dynamo.reset()


def test_varying_dimensions_are_captured_as_symbols_and_leave_no_mark() -> None:
    seen: list[list[Any]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        seen.append(inputs)
        return graph

    double = torch.compile(lambda x: x * 2, backend=backend, dynamic=False, fullgraph=True)
    batch = torch.ones(4, 5)
    with varying([(batch, 1)]):
        double(batch)
    assert not vars(batch)
    for length in (5, 7):
        assert torch.equal(double(torch.ones(4, length)), torch.full((4, length), 2.0))
    (inputs,) = seen
    (size,) = {expression_of(each) for each in inputs if isinstance(each, torch.SymInt)}
    assert is_symbol(size)
    assert not is_symbol(4 * size)
    assert value_of(4 * size + 1, {size: 7}) == 29
    with pytest.raises(TraceError):
        value_of(size, {})


def test_marks_of_the_users_stay() -> None:
    batch = torch.ones(4, 5)
    torch._dynamo.maybe_mark_dynamic(batch, 0)
    before = {name: set(value) if isinstance(value, set) else value for name, value in vars(batch).items()}
    with varying([(batch, 1), (batch, 0)]):
        assert batch._dynamo_weak_dynamic_indices == {0, 1}
    assert vars(batch) == before
