"""The eager engine where capture does not go: every model and loop gives the bits of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowtide import zoo
from lowtide.engines import Step, apply, plan
from lowtide.errors import BudgetError
from lowtide.planning import Choice, Plan
from lowtide.profiling import profile
from lowtide.techniques import Option
from lowtide.techniques.optimal import Optimal
from lowtide.workload import Workload

from ..contract.workloads import Residual
from ..ranks import on_two_ranks
from .planned import smallest_budget

# -- models ----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """An LSTM layer that hands its outputs on; its kernels keep states and workspaces of their own."""

    def __init__(self, width: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0].sin().tanh()


class Branching(nn.Module):
    """What runs depends on the data; the number that decides it is read in Python, which breaks a graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.up if x.sum() > 0 else self.down
        scale = float(x.detach().abs().max().item())
        return x + self.drop(layer(x).sin().exp() / (1 + scale))


class Tied(nn.Module):
    """One embedding as input and output, and one layer in two blocks of the chain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2)) for _ in range(5)]
        blocks[3][0] = blocks[1][0]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.embedding(tokens)) @ self.embedding.weight.T


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def work_of(model: nn.Module, batch: Tensor) -> Workload:
    return Workload(model, square, batch, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


MODELS: dict[str, Callable[[], Workload]] = {
    "batch norm and dropout": lambda: work_of(
        nn.Sequential(*(Residual(4) for _ in range(8))), torch.randn(16, 4, 6, 5)
    ),
    "LSTM": lambda: work_of(nn.Sequential(*(Recurrent(8, nn.LSTM) for _ in range(4))), torch.randn(16, 12, 8)),
    "RNN": lambda: work_of(nn.Sequential(*(Recurrent(8, nn.RNN) for _ in range(4))), torch.randn(16, 3, 8)),
    "branches": lambda: work_of(nn.Sequential(*(Branching(16) for _ in range(6))), torch.randn(64, 16)),
    "tied weights": lambda: work_of(Tied(16), torch.randint(11, (32, 16))),
}


def made(name: str) -> Workload:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


# -- plans -----------------------------------------------------------------------------------------------


def planned(work: Workload) -> Step:
    """The smallest plan there is, applied."""
    before = profile(work)
    smallest = smallest_budget(work, before, "eager", allow="bitwise")
    found = plan(work, smallest, profile=before, engine="eager", allow="bitwise", tune=False)
    assert found.choices
    return apply(found, work)


def deepest(work: Workload, levels: int = 3) -> Step:
    """The most nested schedule there is, in a plan."""
    before = profile(work)
    option = max(Optimal().options(before), key=lambda o: o.config.levels)
    assert option.config.levels >= levels
    found = plan(work, "100%", profile=before, engine="eager", tune=False)
    return apply(with_option(found, option), work)


def with_option(found: Plan, option: Option) -> Plan:
    return replace(found, choices=(Choice(option, found.fidelity, 0, 0.0, "for a test"),))


# -- loops -----------------------------------------------------------------------------------------------

Loss = Callable[[Any], Tensor]
Loop = Callable[[Loss, Workload], None]


@dataclass(frozen=True)
class Trained:
    losses: list[Tensor]
    tensors: dict[str, Tensor]


def batches(work: Workload, count: int) -> list[Tensor]:
    torch.manual_seed(3)
    if not work.batch.is_floating_point():
        return [torch.randint_like(work.batch, 11) for _ in range(count)]
    return [torch.randn_like(work.batch) * (-1) ** i for i in range(count)]


def train(work: Workload, loop: Loop, loss: Loss) -> Trained:
    """Run a loop from a fixed seed; what it computed, left in the model and drew."""
    losses: list[Tensor] = []

    def noted(batch: Any) -> Tensor:
        losses.append(loss(batch))
        return losses[-1]

    torch.manual_seed(7)
    loop(noted, work)
    tensors = {name: value.clone() for name, value in work.model.state_dict().items()}
    tensors |= {f"{n}.grad": p.grad for n, p in work.model.named_parameters() if p.grad is not None}
    return Trained([value.detach() for value in losses], tensors | {"generator": torch.get_rng_state()})


def assert_same(found: Trained, expected: Trained) -> None:
    assert [str(float(loss)) for loss in found.losses] == [str(float(loss)) for loss in expected.losses]  # with nan
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        assert torch.equal(found.tensors[name], value), name


def compare(name: str, loop: Loop, *, change: Callable[[Workload], Workload] = lambda work: work, plans: Any = planned):
    plain = change(made(name))
    expected = train(plain, loop, lambda batch: plain.compute_loss(batch=batch))
    work = change(made(name))
    step = plans(work)
    assert_same(train(work, loop, step.loss), expected)


def usual(loss: Loss, work: Workload) -> None:
    for batch in batches(work, 3):
        work.optimizer.zero_grad()
        loss(batch).backward()
        work.optimizer.step()


def accumulated(loss: Loss, work: Workload) -> None:
    for _ in range(2):
        work.optimizer.zero_grad()
        for part in batches(work, 1)[0].chunk(4):
            (loss(part) / 4).backward()
        work.optimizer.step()


def in_backward(loss: Loss, work: Workload) -> None:
    """Each parameter is stepped as soon as its gradient is there, while blocks before it have yet to run again."""

    def step(parameter: Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(step) for p in work.model.parameters()]
    for batch in batches(work, 3):
        loss(batch).backward()
    for hook in hooks:
        hook.remove()


def scaled(loss: Loss, work: Workload, *, enabled: bool) -> None:
    """With a scaler; the second batch overflows, so that an enabled one leaves its step out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
    for i, batch in enumerate(batches(work, 3)):
        work.optimizer.zero_grad()
        scaler.scale(loss(batch * (float("inf") if i == 1 and enabled else 1))).backward()
        scaler.step(work.optimizer)
        scaler.update()
    assert not enabled or scaler.get_scale() < 2.0**10


@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_trains_as_without_a_plan(name: str) -> None:
    compare(name, usual)


@pytest.mark.parametrize("loop", [usual, accumulated, in_backward], ids=lambda loop: loop.__name__)
def test_every_loop_trains_as_without_a_plan_in_the_deepest_nesting(loop: Loop) -> None:
    compare("batch norm and dropout", loop, plans=deepest)


def test_statistics_are_updated_once_a_step_in_the_deepest_nesting() -> None:
    work = made("batch norm and dropout")
    step = deepest(work)
    step(work.batch)
    assert {int(block.norm.num_batches_tracked) for block in work.model} == {1}


@pytest.mark.parametrize("name", ["batch norm and dropout", "branches", "tied weights"])
def test_under_autocast(name: str) -> None:
    compare(name, usual, change=lambda work: replace(work, autocast=torch.bfloat16), plans=partial(deepest, levels=2))


@pytest.mark.parametrize("enabled", [False, True])
def test_with_a_gradient_scaler(enabled: bool) -> None:
    compare("LSTM", partial(scaled, enabled=enabled), plans=partial(deepest, levels=2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, where a graph breaks
def test_in_a_compiled_model_with_graph_breaks() -> None:
    def compiled(work: Workload) -> Workload:
        model = torch.compile(work.model, backend="eager")
        return replace(work, loss=lambda _, batch: square(model, batch))

    try:
        compare("branches", usual, change=compiled, plans=planned_before_compiling)
    finally:
        torch.compiler.reset()


def planned_before_compiling(work: Workload) -> Step:
    return apply(planned(made("branches")).plan, work)


def test_a_branch_that_the_second_batch_takes_is_the_one_that_runs_again() -> None:
    work = made("branches")
    step = planned(work)
    first, second = batches(work, 2)
    for batch in (first.abs(), -second.abs()):
        twin = copy.deepcopy(work.model)
        del twin.forward
        torch.manual_seed(1)
        square(twin, batch).backward()
        torch.manual_seed(1)
        step.loss(batch).backward()
        for ours, theirs in zip(work.model.parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
        work.model.zero_grad()


def test_a_recurrent_network_without_blocks_is_told_what_is_missing() -> None:
    with pytest.raises(BudgetError, match=r"optimal needs a nn.Sequential or nn.ModuleList of two or more blocks"):
        plan(zoo.small("lstm"), "50%", fake=True, engine="eager", tune=False)


# -- on two ranks ----------------------------------------------------------------------------------------


def ranked() -> Workload:
    torch.manual_seed(0)
    return work_of(nn.Sequential(*(Residual(4) for _ in range(6))), torch.randn(16, 4, 6, 5))


def on_ranks(rank: int, wrap: Callable[[nn.Module], nn.Module], plans: Callable[[Workload], Step]) -> None:
    """A planned local model and a plain one, both wrapped after: the same losses and state on every rank."""
    results: list[Trained] = []
    for make_step in (None, plans):
        work = ranked()
        if make_step is not None:
            make_step(work)
        model = wrap(work.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapped = replace(work, model=model, optimizer=optimizer)
        torch.manual_seed(rank)
        data = [torch.randn_like(work.batch) for _ in range(3)]

        def loop(loss: Loss, work: Workload, data: list[Tensor] = data) -> None:
            for batch in data:
                work.optimizer.zero_grad()
                loss(batch).backward()
                work.optimizer.step()

        trained = train(wrapped, loop, lambda batch, model=model: square(model, batch))
        whole = {name: full(value) for name, value in trained.tensors.items()}
        results.append(replace(trained, tensors=whole))
    assert_same(results[1], results[0])
    counted = {int(v) for name, v in results[1].tensors.items() if name.endswith("num_batches_tracked")}
    assert counted == {3}


def full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)  # parameters of a block are freed after its forward, until its backward
    return fully_shard(model, mesh=mesh)


def ddp_of_a_planned_model_is_ddp_of_the_plain_one(rank: int) -> None:
    on_ranks(rank, DistributedDataParallel, planned)


def ddp_in_the_deepest_nesting(rank: int) -> None:
    on_ranks(rank, DistributedDataParallel, deepest)


def fsdp2_of_a_planned_model_is_fsdp2_of_the_plain_one(rank: int) -> None:
    on_ranks(rank, sharded, planned)


def fsdp2_in_the_deepest_nesting(rank: int) -> None:
    on_ranks(rank, sharded, deepest)


test_on_two_ranks = on_two_ranks(
    ddp_of_a_planned_model_is_ddp_of_the_plain_one,
    ddp_in_the_deepest_nesting,
    fsdp2_of_a_planned_model_is_fsdp2_of_the_plain_one,
    fsdp2_in_the_deepest_nesting,
)
