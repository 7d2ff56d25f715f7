"""The eager engine where capture does not go: every model and loop gives the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import zoo
from lowtide.engines import Step, apply, plan
from lowtide.errors import BudgetError
from lowtide.planning import Choice
from lowtide.profiling import profile
from lowtide.techniques.optimal import Optimal
from lowtide.workload import Workload
from tests.models import Call, squares
from tests.refusals import refused

from ..contract.workloads import Residual
from .planned import smallest_plan, work_of

# -- models ----------------------------------------------------------------------------------------------


def recurrent(width: int, kind: type[nn.RNNBase] = nn.LSTM) -> Call:
    """An LSTM layer that hands its outputs on; its kernels keep states and workspaces of their own."""
    return Call(lambda m, x: x + m.rnn(x)[0].sin().tanh(), rnn=kind(width, width, batch_first=True))


def branching(width: int) -> Call:
    """The data decides which branch runs. Python reads the number, which breaks a graph."""

    def branch(m: Any, x: Tensor) -> Tensor:
        layer = m.up if x.sum() > 0 else m.down
        scale = float(x.detach().abs().max().item())
        return x + m.drop(layer(x).sin().exp() / (1 + scale))

    return Call(branch, up=nn.Linear(width, width), down=nn.Linear(width, width), drop=nn.Dropout(0.3))


def tied(width: int) -> Call:
    """One embedding as input and output, and one layer in two blocks of the chain."""
    embedding = nn.Embedding(11, width)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2)) for _ in range(5)]
    blocks[3][0] = blocks[1][0]
    chain = nn.Sequential(*blocks)
    return Call(lambda m, x: m.chain(m.embedding(x)) @ m.embedding.weight.T, embedding=embedding, chain=chain)


MODELS: dict[str, Callable[[], Workload]] = {
    "batch norm and dropout": lambda: work_of(
        nn.Sequential(*(Residual(4) for _ in range(8))), torch.randn(16, 4, 6, 5)
    ),
    "LSTM": lambda: work_of(nn.Sequential(*(recurrent(8) for _ in range(4))), torch.randn(16, 12, 8)),
    "RNN": lambda: work_of(nn.Sequential(*(recurrent(8, nn.RNN) for _ in range(4))), torch.randn(16, 3, 8)),
    "branches": lambda: work_of(nn.Sequential(*(branching(16) for _ in range(6))), torch.randn(64, 16)),
    "tied weights": lambda: work_of(tied(16), torch.randint(11, (32, 16))),
}


def step_of(name: str) -> Workload:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


# -- plans -----------------------------------------------------------------------------------------------


def planned(work: Workload) -> Step:
    """Apply the smallest plan."""
    chosen = smallest_plan(work, engine="eager", allow="bitwise")
    assert chosen.choices
    return apply(chosen, work)


def deepest(work: Workload, levels: int = 3) -> Step:
    """Apply the most nested schedule."""
    before = profile(work)
    option = max(Optimal().options(before), key=lambda o: o.config.levels)
    assert option.config.levels >= levels
    fits = plan(work, "100%", profile=before, engine="eager", tune=False)
    return apply(replace(fits, choices=(Choice(option, fits.fidelity, 0, 0.0, "for a test"),)), work)


# -- loops -----------------------------------------------------------------------------------------------

Loss = Callable[[Any], Tensor]
Loop = Callable[[Loss, Workload], None]


@dataclass(frozen=True)
class Trained:
    losses: list[Tensor]
    tensors: dict[str, Tensor]


def batches(work: Workload, count: int) -> list[Tensor]:
    if not work.batch.is_floating_point():
        return [torch.randint_like(work.batch, 11) for _ in range(count)]
    return [torch.randn_like(work.batch) * (-1) ** i for i in range(count)]


def train(work: Workload, loop: Loop, loss: Loss, seed: int = 7) -> Trained:
    """Run a loop from a fixed seed; return what it computed, left in the model and drew."""
    losses: list[Tensor] = []

    def noted(batch: Any) -> Tensor:
        losses.append(loss(batch))
        return losses[-1]

    torch.manual_seed(seed)
    loop(noted, work)
    tensors = {name: value.clone() for name, value in work.model.state_dict().items()}
    tensors |= {f"{n}.grad": p.grad for n, p in work.model.named_parameters() if p.grad is not None}
    return Trained([value.detach() for value in losses], tensors | {"generator": torch.get_rng_state()})


def assert_same(ours: Trained, expected: Trained) -> None:
    assert [str(float(loss)) for loss in ours.losses] == [str(float(loss)) for loss in expected.losses]  # with nan
    assert ours.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        assert torch.equal(ours.tensors[name], value), name


def compare(name: str, loop: Loop, *, change: Callable[[Workload], Workload] = lambda work: work, plans: Any = planned):
    plain = change(step_of(name))
    expected = train(plain, loop, lambda batch: plain.compute_loss(batch=batch))
    work = change(step_of(name))
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


def scaled(loss: Loss, work: Workload) -> None:
    """With a scaler; the second batch overflows, so that it leaves its step out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, batch in enumerate(batches(work, 3)):
        work.optimizer.zero_grad()
        scaler.scale(loss(batch * (float("inf") if i == 1 else 1))).backward()
        scaler.step(work.optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**10


@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_trains_as_without_a_plan(name: str) -> None:
    compare(name, usual)


@pytest.mark.parametrize("loop", [accumulated, in_backward], ids=lambda loop: loop.__name__)
def test_every_loop_trains_as_without_a_plan_in_the_deepest_nesting(loop: Loop) -> None:
    compare("batch norm and dropout", loop, plans=deepest)


@pytest.mark.parametrize("name", ["batch norm and dropout", "branches"])
def test_under_autocast(name: str) -> None:
    compare(name, usual, change=lambda work: replace(work, autocast=torch.bfloat16), plans=partial(deepest, levels=2))


def test_with_a_gradient_scaler() -> None:
    compare("LSTM", scaled, plans=partial(deepest, levels=2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, where a graph breaks
def test_in_a_compiled_model_with_graph_breaks() -> None:
    def compiled(work: Workload) -> Workload:
        model = torch.compile(work.model, backend="eager")
        return replace(work, loss=lambda _, batch: squares(model, batch))

    try:
        compare("branches", usual, change=compiled, plans=planned_before_compiling)
    finally:
        torch.compiler.reset()


def planned_before_compiling(work: Workload) -> Step:
    return apply(planned(step_of("branches")).plan, work)


def test_a_recurrent_network_without_blocks_is_told_what_is_missing() -> None:
    with refused("optimal", "nn.Sequential", kind=BudgetError):
        plan(zoo.small("lstm"), "50%", fake=True, engine="eager", tune=False)
