"""What acts on gradients in backward, where gradients of several processes are still to be added up."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide import Workload
from lowtide.errors import PlanError
from lowtide.techniques import Option, techniques


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


OPTIONS = [Option("optimizer_in_backward", ("",)), Option("stored_gradients", ("",), (("bits", "8bit"),))]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_ddp_is_refused_and_left_as_it_was(option, one_process):
    model = nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    work = Workload(model, lambda model, x: model(x).square().mean(), torch.randn(2, 4), optimizer)
    with pytest.raises(PlanError, match=r"DistributedDataParallel reduces a gradient after.*fully_shard"):
        techniques()[option.technique].apply(work, [option])
    work.compute_loss().backward()
    assert all(p.grad is not None for p in model.parameters())
