"""Ops that write over an argument give the bits of the ones that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lowtide.planning.programs.in_place import in_place_form

_aten: Any = torch.ops.aten
_ELSEWHERE = ("polygamma", "pow.Scalar")  # their first argument is no tensor


def pointwise() -> list[Any]:
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    found: list[Any] = []
    for name in sorted(names):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(_aten, packet, None), overload or "default", None)
        if op is not None and torch.Tag.pointwise in op.tags and not name.startswith(_ELSEWHERE):
            found.append(op)
    return found


def arguments(op: Any, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    made = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {"Tensor": None, "number": 0.3, "float": 0.3, "int": 1, "bool": False}
    args: list[Any] = []
    keywords: dict[str, Any] = {}
    for each in op._schema.arguments:
        kind = str(each.type)
        if kind in given:
            value = torch.rand(7, 37, generator=made).mul_(0.8).add_(0.1).to(dtype) if kind == "Tensor" else given[kind]
            if each.kwarg_only:
                keywords[each.name] = value
            else:
                args.append(value)
    return args, keywords


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_form_in_place_gives_the_same_bits(dtype: torch.dtype) -> None:
    tried: set[str] = set()
    for op in pointwise():
        node = fx.Graph().call_function(op)
        form, (args, keywords) = in_place_form(node), arguments(op, dtype)
        try:
            expected: Any = op(*args, **keywords)
        except (RuntimeError, NotImplementedError):  # not for such numbers, or with another argument than these
            continue
        if form is None or not isinstance(expected, Tensor) or expected.dtype != dtype:
            continue
        into = args[0].clone()
        if form._overloadname == "grad_input":
            written = form(into, *args[1:], **{**keywords, "grad_input": into})
        else:
            written = form(into, *args[1:], **keywords)
        assert written.data_ptr() == into.data_ptr(), op
        torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True, msg=str(op))
        tried.add(str(op))
    assert len(tried) > 80
    assert "aten.mul.Scalar" in tried
