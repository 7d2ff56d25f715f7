"""The corners of "tracing changes nothing": what models, losses and batches do to themselves."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.errors import WorkloadError
from lowtide.profiling import profile
from lowtide.tracing import trace
from tests.tracing.comparing import assert_same, snapshot


def mean_loss(model, batch):
    return model(batch).float().mean()


class Rebinding(nn.Module):
    """Rebinds a buffer, registers another on the way, and keeps a list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.log = []

    def forward(self, x):
        self.count = self.count + 1
        if "seen" not in self._buffers:
            self.register_buffer("seen", torch.ones(4, device=x.device))
        self.log.append(x.shape)
        return self.linear(x) * self.seen


WAYS = [{}, {"fake": True}, {"fake": True, "device": "h200"}]


@pytest.mark.parametrize("how", WAYS, ids=["real", "fake", "h200"])
def test_buffers_that_a_model_rebinds_or_registers_are_as_before(how):
    work = Workload(Rebinding(), mean_loss, torch.randn(3, 4))
    before = snapshot(work)
    trace(work, **how)
    assert_same(before, snapshot(work))
    assert work.model.log == []
    assert "seen" not in work.model.state_dict()


@pytest.mark.parametrize("how", WAYS[:2], ids=["real", "fake"])
def test_a_batch_that_requires_gradients_gets_none(how):
    batch = torch.randn(3, 4, requires_grad=True)
    trace(Workload(nn.Linear(4, 4), mean_loss, batch), **how)
    assert batch.grad is None


@pytest.mark.parametrize("how", WAYS[:2], ids=["real", "fake"])
def test_a_loss_may_take_its_batch_apart(how):
    batch = {"x": torch.randn(3, 4), "y": torch.randn(3, 4)}
    work = Workload(nn.Linear(4, 4), lambda model, b: (model(b.pop("x")) - b.pop("y")).square().mean(), batch)
    trace(work, **how)
    assert list(batch) == ["x", "y"]


def test_a_criterion_in_the_losss_closure_is_left_alone():
    criterion = nn.BatchNorm1d(4)
    work = Workload(nn.Linear(4, 4), lambda model, x: criterion(model(x)).square().mean(), torch.randn(3, 4))
    trace(work)
    assert criterion.weight.grad is None
    assert int(criterion.num_batches_tracked) == 0


class Criterion(nn.Module):
    """Learns and counts."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, y):
        self.calls += 1
        return (y * self.scale).square().mean()


CRITERION = Criterion()
CRITERIA = {"first": [Criterion()]}


class Trainer:
    def __init__(self, criterion):
        self.criterion = criterion
        self.several = {"other": Criterion()}

    def loss(self, model, x):
        return self.criterion(model(x)) + self.several["other"](model(x))

    __call__ = loss


def with_criterion(model, x, *, criterion):
    return criterion(model(x))


def with_globals(model, x):
    return CRITERION(model(x)) + CRITERIA["first"][0](model(x))


HOLDERS = {
    "method": lambda mine: Trainer(mine).loss,
    "object": Trainer,
    "partial": lambda mine: partial(with_criterion, criterion=mine),
    "partial of a method": lambda mine: partial(Trainer(mine).loss),
    "closure of an object": lambda mine: (lambda trainer: lambda model, x: trainer.loss(model, x))(Trainer(mine)),
    "default": lambda mine: lambda model, x, criterion=mine: criterion(model(x)),
    "globals": lambda mine: with_globals,
}


@pytest.mark.parametrize("how", [{}, {"fake": True}], ids=["real", "fake"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_criterion_is_left_alone_however_the_loss_holds_it(holder, how):
    mine = Criterion()
    loss = HOLDERS[holder](mine)
    trace(Workload(nn.Linear(4, 4), loss, torch.randn(3, 4)), **how)
    owner = getattr(getattr(loss, "func", loss), "__self__", loss)
    others = list(owner.several.values()) if isinstance(owner, Trainer) else []
    for criterion in (mine, *others, CRITERION, *CRITERIA["first"]):
        assert criterion.calls == 0
        assert criterion.scale.grad is None


def test_an_expanded_batch_is_traced():
    work = Workload(nn.Linear(4, 4), mean_loss, torch.randn(1, 4).expand(5, 4))
    assert trace(work).storage_peak_bytes == trace(work, fake=True).storage_peak_bytes


def test_two_dtypes_on_one_storage_count_once():
    base = torch.zeros(1000)
    work = Workload(nn.Linear(10, 1), lambda model, b: model(b[0].view(100, 10)).mean(), (base, base.view(torch.int32)))
    real, fake = trace(work), trace(work, fake=True)
    assert real.storage_peak_bytes == fake.storage_peak_bytes
    assert [s.bytes for s in fake.storages if s.category == "input"] == [4000]


def test_a_scalar_parameter_is_predicted_on_the_gpu():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * self.scale

    graph = trace(Workload(Scaled(), mean_loss, torch.randn(3, 4)), fake=True, device="h200")
    assert {s.device for s in graph.storages if s.category == "parameter"} == {"cuda"}


def test_a_hook_on_the_optimizer_is_called_once():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    trace(Workload(model, mean_loss, torch.randn(3, 4), optimizer))
    assert calls == [1]


def test_a_fused_optimizer_counts_no_versions_and_is_undone_all_the_same():
    model = nn.Linear(4, 4)
    work = Workload(model, mean_loss, torch.randn(3, 4), torch.optim.AdamW(model.parameters(), fused=True))
    for _ in range(2):  # without a state, and with one
        before = snapshot(work)
        trace(work)
        assert_same(before, snapshot(work))
        work.compute_loss().backward()
        work.optimizer.step()


def test_sparse_adam_is_traced():
    model = nn.Sequential(nn.Embedding(100, 8, sparse=True))
    work = Workload(model, mean_loss, torch.randint(100, (4,)), torch.optim.SparseAdam(list(model.parameters())))
    graph = trace(work)
    assert sum(s.bytes for s in graph.storages if s.category == "optimizer state") >= 2 * 100 * 8 * 4


def test_lbfgs_is_refused_with_the_reason():
    model = nn.Linear(4, 4)
    with pytest.raises(WorkloadError, match="LBFGS"):
        profile(Workload(model, mean_loss, torch.randn(3, 4), torch.optim.LBFGS(model.parameters())))


@pytest.mark.parametrize("autocast", ["bf16", torch.float64])
def test_an_autocast_that_cannot_be_says_what_can(autocast):
    with pytest.raises(WorkloadError, match="bfloat16"):
        Workload(nn.Linear(4, 4), mean_loss, torch.randn(3, 4), autocast=autocast)


class ThroughData(torch.optim.Optimizer):
    """As many published optimizers: its writes are not counted."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.data, alpha=-group["lr"])


def test_what_is_written_through_data_is_put_back():
    model = nn.Linear(4, 4)

    def loss(model, x):
        model.weight.data.clamp_(-0.1, 0.1)
        return model(x).square().mean()

    before = copy.deepcopy(model.state_dict())
    work = Workload(model, loss, torch.randn(8, 4), ThroughData(model.parameters()))
    profile(work)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
