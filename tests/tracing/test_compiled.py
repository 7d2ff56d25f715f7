"""Compiled submodules run compiled while they are traced, and show as one op each way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide import Workload
from lowtide.tracing import trace
from lowtide.tracing.compiled import is_compiled
from tests.models import Call
from tests.tracing.allocator import allocated_peak
from tests.tracing.layers import mean_loss

# Dynamo looks at .grad of what it compiles, and its own warning must not stop it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def blocks():
    torch.manual_seed(0)
    torch._dynamo.reset()
    block = Call(lambda m, x: m.down(F.gelu(m.up(x))), up=nn.Linear(64, 256), down=nn.Linear(256, 64))
    return block, nn.Sequential(nn.Linear(64, 64), block, nn.LayerNorm(64))


@pytest.mark.parametrize("how", ["torch.compile(module)", "module.compile()"])
def test_a_compiled_block_is_one_op_each_way_and_its_memory_is_measured(how):
    block, model = blocks()
    if how == "module.compile()":
        block.compile()
    else:
        model[1] = torch.compile(block)
    batch = torch.randn(128, 64)
    graph = trace(Workload(model, mean_loss, batch))
    compiled = [op for op in graph.ops if op.name.startswith("inductor.")]
    assert [op.phase for op in compiled] == ["forward", "backward"]
    assert not [op for op in graph.ops if "gelu" in op.name]  # not run eagerly behind our back
    assert graph.peak_bytes == pytest.approx(allocated_peak(model, mean_loss, batch, None), rel=0.01)


def test_a_fake_trace_says_that_it_takes_compiled_modules_for_eager_ones():
    block, model = blocks()
    model[1] = torch.compile(block)
    graph = trace(Workload(model, mean_loss, torch.randn(8, 64)), fake=True)
    assert any("eager" in note for note in graph.notes)


def test_a_loss_that_wraps_itself_is_an_error():
    def loss(model, x):
        return model(x).mean()

    loss.__wrapped__ = loss
    with pytest.raises(ValueError, match="wrapper loop"):
        is_compiled(loss)
