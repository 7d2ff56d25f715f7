"""Calls without tensors, to repeat alone."""

import pytest
import torch

from lowtide.tracing.op_calls import Call

aten = torch.ops.aten


def test_a_call_is_repeated_with_the_same_shapes():
    x = torch.ones(4, 3).t()
    call = Call.of(aten.add.Tensor, (x, torch.ones(3, 1, dtype=torch.bfloat16)), {"alpha": 2})
    args, kwargs = call.tensors(torch.device("cpu"))
    assert [(t.shape, t.stride(), t.dtype) for t in args] == [
        ((3, 4), (1, 3), torch.float32),
        ((3, 1), (1, 1), torch.bfloat16),
    ]
    assert kwargs == {"alpha": 2}
    assert call.function(*args, **kwargs).shape == (3, 4)


@pytest.mark.parametrize(
    ("function", "args", "alone"),
    [
        (aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), True),
        (aten._foreach_add_.Scalar, ([torch.ones(2)], 1), False),
        (aten.mul.Tensor, (torch.ones(2, dtype=torch.uint8), 2), False),  # bytes may be a library's own record
        (aten.mul.Tensor, (torch.ones(2, device="meta"), 2), False),
    ],
)
def test_calls_whose_values_matter_do_not_run_alone(function, args, alone):
    assert Call.of(function, args, {}).runs_alone == alone
