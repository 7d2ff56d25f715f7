"""The table of activations agrees with torch's modules."""

import pytest
import torch

from lowtide.kernels.pointwise import POINTWISE, read


@pytest.mark.parametrize("name", POINTWISE)
def test_an_activation_is_what_torchs_module_computes(name):
    op = POINTWISE[name]
    module = op.module(0.0, 0.0) if name == "threshold" else op.module()
    x = torch.linspace(-30.0, 30.0, 101)
    assert read(module) == (name, op.defaults)
    assert torch.equal(op.function(x, *op.defaults), module(x))
    if op.in_place is not None:
        written = x.clone()
        assert op.in_place(written, *op.defaults).data_ptr() == written.data_ptr()
        assert torch.equal(written, module(x))
