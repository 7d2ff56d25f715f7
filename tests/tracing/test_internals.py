"""Private names of torch that lowtide uses are those that torch uses."""

from __future__ import annotations

import sys

import pytest
import torch

from lowtide.tracing.internals import assume_constant_result


@pytest.mark.parametrize("is_imported", [True, False])
def test_a_result_is_constant_to_dynamo_whether_dynamo_is_imported_or_not(
    is_imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = torch.compiler.assume_constant_result(lambda: 0)
    if not is_imported:
        monkeypatch.delitem(sys.modules, "torch._dynamo")
    marked = assume_constant_result(lambda: 0)
    assert vars(marked) == vars(expected) != {}
