"""Operators know their schemas and kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher

from lowtide.compat import operators

aten: Any = torch.ops.aten


def test_overloads_are_told_from_operators_that_take_functions() -> None:
    assert isinstance(aten.add.Tensor, operators.OpOverload)
    assert isinstance(torch.ops.higher_order.cond, operators.HigherOrderOperator)


def test_a_schema_has_names_and_arguments() -> None:
    schema = operators.schema_of(aten.add.Tensor)
    assert (schema.name, schema.overload_name) == ("aten::add", "Tensor")
    assert [each.name for each in schema.arguments] == ["self", "other", "alpha"]
    assert (operators.name_of(aten.add.Tensor), operators.name_of(len)) == ("aten::add", "")
    assert operators.schema_of(aten.exp.default).overload_name == ""


def test_ops_have_forms_in_place_or_none() -> None:
    ops = (aten.add.Tensor, aten.relu.default, aten.index_put.default, aten.mm.default)
    forms = (aten.add_.Tensor, aten.relu_.default, aten.index_put_.default, None)
    assert tuple(map(operators.in_place_form, ops)) == forms


def test_memory_formats_and_strides_are_those_of_kernels() -> None:
    x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert operators.suggest_memory_format(x) is torch.channels_last
    assert operators.elementwise_strides(x, x) == (x + x).stride()


def test_decompositions_are_replaced_and_restored() -> None:
    op, x = aten.dropout.default, torch.ones(2, requires_grad=True)
    kernels = operators.decompositions_of(op)
    assert kernels
    with enable_python_dispatcher():
        assert op(x, 0.5, False).shape == (2,)
        before = operators.replace_decompositions({op: dict.fromkeys(kernels, lambda input, p, train: input[:1])})
        assert before == {op: kernels}
        try:
            assert op(x, 0.5, False).shape == (1,)
        finally:
            operators.replace_decompositions(before)
        assert op(x, 0.5, False).shape == (2,)
    assert operators.decompositions_of(op) == kernels


def test_updates_of_many_tensors_are_those_of_each() -> None:
    def rows() -> list[Tensor]:
        return [torch.full((2,), 1.0 + i) for i in range(3)]

    held, others = rows(), rows()
    operators.foreach_add_(held, 1)
    operators.foreach_addcmul_(held, others, others, [2.0] * 3)
    operators.foreach_lerp_(held, others, 0.5)
    expected = [torch.lerp(x + 1 + 2 * x * x, x, 0.5) for x in rows()]
    assert all(map(torch.equal, held, expected))
    assert all(map(torch.equal, operators.foreach_mul(others, 3.0), [x * 3 for x in others]))
    assert all(map(torch.equal, operators.foreach_sub(others, others), [x - x for x in others]))
