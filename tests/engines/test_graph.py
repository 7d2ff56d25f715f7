"""Programs on the graph engine: the plain step's bits, and the simulator's bytes."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload, zoo
from lowtide.engines import graph
from lowtide.errors import BudgetError
from lowtide.planning.programs.program import Kind, Program, simulate
from lowtide.planning.solvers.solver import fastest_program
from lowtide.tracing.capture.joint import Joint

from ..soak import SOAK, in_soak
from .counting import PLANS, Planner, executed_peak, results
from .planned import smallest_budget, squares

MODELS = ["lenet", "gpt2", "resnet18", "wrn28-2", "densenet121", "unet", "roberta-base"]
BITS = [*product(["lenet"], PLANS), ("gpt2", "smallest"), ("gpt2", "sqrt, light")]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "way"), list(product(MODELS, PLANS)) if SOAK else BITS)
def test_a_planned_step_gives_the_plain_steps_bits(name: str, way: str) -> None:
    work = zoo.small(name)
    planner = Planner(way)
    planned = graph.planned_loss(work, planner)
    plain = results(work, lambda batch: work.compute_loss(batch=batch))
    for _ in range(2):
        for found, expected in zip(results(work, planned), plain, strict=True):
            assert torch.equal(found, expected)
    assert len(planner.programs) == 1
    assert (planner.programs[0].recomputed > 0) == (way != "all")


@pytest.mark.parametrize("way", ["all", *in_soak(["middle", "smallest"])])
@pytest.mark.parametrize("name", ["lenet", *in_soak(MODELS[1:])])
def test_the_simulated_peak_is_the_executed_one(name: str, way: str) -> None:
    work = zoo.small(name)
    planner = Planner(way)
    peak = executed_peak(work, graph.planned_loss(work, planner))
    assert simulate(planner.programs[0]).peak_bytes == peak


class Grams(nn.Module):
    """Batched products of a result with its own transpose: views of a base that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            y = linear(x)
            x = x + torch.bmm(y, torch.bmm(y.transpose(1, 2), y) / 64)
        return x


@pytest.mark.parametrize("way", ["all", "middle", "smallest"])
def test_views_hold_the_bytes_of_a_base_that_is_gone(way: str) -> None:
    planner = Planner(way)
    work = Workload(Grams(), squares, torch.randn(2, 64, 8))
    peak = executed_peak(work, graph.planned_loss(work, planner))
    assert simulate(planner.programs[0]).peak_bytes == peak


def test_a_smaller_budget_runs_more_and_needs_less() -> None:
    programs: list[Program] = []

    def planner(joint: Joint) -> Program:
        programs.extend(Planner(way)(joint) for way in ("all", "middle", "smallest"))
        return programs[0]

    work = zoo.small("lenet")
    graph.planned_loss(work, planner)(work.batch)
    peaks = [simulate(program).peak_bytes for program in programs]
    again = [program.recomputed for program in programs]
    assert peaks[0] > peaks[1] >= peaks[2]
    assert again[0] == 0 < again[1] <= again[2]


@pytest.fixture(scope="module")
def smallest() -> Planner:
    """A captured GPT-2 with its program."""
    planner = Planner("smallest")
    work = zoo.small("gpt2")
    graph.planned_loss(work, planner)(work.batch)
    return planner


def test_no_stage_is_made_again_for_nothing(smallest: Planner) -> None:
    (stages,) = smallest.stages
    assert len(stages) > 4
    assert all(stages.backward[:-1])


def test_chains_are_found_across_modules() -> None:
    class Odd(nn.Module):
        """One forward, no blocks: six steps with a skip over two."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                y = torch.tanh(x @ self.weight)
                x = torch.tanh(y @ self.weight) + x
            return x

    work = Workload(Odd(), lambda model, x: model(x).square().mean(), torch.randn(64, 8))
    planner = Planner("sqrt")
    plain = results(work, lambda batch: work.compute_loss(batch=batch))
    for found, expected in zip(results(work, graph.planned_loss(work, planner)), plain, strict=True):
        assert torch.equal(found, expected)
    assert planner.programs[0].recomputed


def test_gradients_accumulate_and_a_new_shape_is_planned_anew() -> None:
    work = zoo.small("lenet")
    planner = Planner("smallest")
    planned = graph.planned_loss(work, planner)
    images, labels = work.batch
    for loss in (planned, lambda batch: work.compute_loss(batch=batch)):
        work.model.zero_grad()
        for piece in (slice(0, 2), slice(2, 4)):
            loss((images[piece], labels[piece])).backward()
        grads = [p.grad.clone() for p in work.model.parameters() if p.grad is not None]
        if loss is planned:
            ours = grads
    assert all(map(torch.equal, ours, grads))
    planned((images[:3], labels[:3])).backward()
    assert len(planner.programs) == 2


def test_a_program_prints_what_runs_again(smallest: Planner) -> None:
    text = str(smallest.programs[0])
    assert re.search(r"recompute native_dropout\w* \(run \d\) from", text)
    assert "(generator)" in text
    assert "go to backward --" in text
    assert any(i.kind is Kind.FREE for i in smallest.programs[0].backward)


def layers(count: int = 6) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(32, 32), nn.GELU())))


def half_frozen() -> Workload:
    work = zoo.small("lenet")
    for parameter in list(work.model.parameters())[:9]:
        parameter.requires_grad_(False)
    return work


def tied() -> Workload:
    model = layers()
    model[4].weight = model[0].weight
    return Workload(model, squares, torch.randn(64, 32))


class Noisy(nn.Module):
    """Draws by two kinds of op, and has a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = nn.functional.dropout(linear(x), 0.3) + torch.rand_like(x)
        return x


class Returning(nn.Module):
    """Views of the batch live long, and sums could be written over it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


class Chunked(nn.Module):
    """Views that come as a list, and a sum of two views of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 128)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            a, b, c, d = self.wide(x).chunk(4, dim=1)
            square = (a * b.sigmoid() + c.tanh() * d)[:32]
            square = square + square.t()
            x = torch.cat([square, square.relu()])
        return x


STEPS: dict[str, Callable[[], Workload]] = {
    "chunks": lambda: Workload(Chunked(), squares, torch.randn(64, 32)),
    "half frozen": half_frozen,
    "tied weights": tied,
    "autocast": lambda: Workload(layers(), squares, torch.randn(64, 32), autocast=torch.bfloat16),
    "float64": lambda: Workload(layers().double(), squares, torch.randn(64, 32, dtype=torch.float64)),
    "a batch with gradients": lambda: Workload(layers(), squares, torch.randn(64, 32, requires_grad=True)),
    "noise": lambda: Workload(Noisy(), squares, torch.randn(64, 32)),
    "views of the batch": lambda: Workload(Returning(), squares, torch.randn(16, 8, 32)),
    "attention": lambda: Workload(Attending(), squares, torch.randn(2, 8, 32)),
    "one op": lambda: Workload(nn.Linear(4, 4), lambda model, x: model(x).sum(), torch.randn(2, 4)),
}


@pytest.mark.parametrize("way", ["smallest", *in_soak(["sqrt"])])
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_all_kinds_give_the_plain_steps_bits(name: str, way: str) -> None:
    work = STEPS[name]()
    plain = results(work, lambda batch: work.compute_loss(batch=batch))
    planner = Planner(way)
    loss = graph.planned_loss(work, planner)
    for found, expected in zip(results(work, loss), plain, strict=True):
        assert torch.equal(found, expected)
    assert simulate(planner.programs[0]).peak_bytes == executed_peak(work, loss)


def test_training_goes_as_without_a_plan() -> None:
    work = zoo.small("gpt2")
    start = copy.deepcopy(work.model.state_dict())
    ends: list[list[Tensor]] = []
    for loss in (graph.planned_loss(work, Planner("middle")), lambda batch: work.compute_loss(batch=batch)):
        work.model.load_state_dict(start)
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(work.model.parameters(), 1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            loss(work.batch).backward()
            nn.utils.clip_grad_norm_(work.model.parameters(), 1.0)
            optimizer.step()
        ends.append([parameter.detach().clone() for parameter in work.model.parameters()])
    assert all(map(torch.equal, *ends))


# -- budgets -------------------------------------------------------------------------------------------


SHARES = [0.9, 0.7, 0.5, 0.35]
AT_SHARES = [*product(["lenet"], SHARES), ("gpt2", 0.5)]


@pytest.mark.parametrize(("name", "share"), list(product(MODELS, SHARES)) if SOAK else AT_SHARES)
def test_a_budget_is_kept_to_the_byte_or_refused_with_the_smallest(name: str, share: float) -> None:
    work = zoo.small(name)
    promised: list[tuple[int, Program]] = []

    def planner(joint: Joint) -> Program:
        budget = int(share * simulate(fastest_program(joint, 2**60)).peak_bytes)
        try:
            program = fastest_program(joint, budget)
        except BudgetError as error:
            found = re.search(r"(\d+) bytes", str(error))
            assert found is not None
            budget = int(found[1])
            program = fastest_program(joint, budget)
        promised.append((budget, program))
        return program

    loss = graph.planned_loss(work, planner)
    plain = results(work, lambda batch: work.compute_loss(batch=batch))
    for found, expected in zip(results(work, loss), plain, strict=True):
        assert torch.equal(found, expected)
    (budget, program), *_ = promised
    assert simulate(program).peak_bytes == executed_peak(work, loss) <= budget


def test_a_larger_budget_never_runs_more_again() -> None:
    seen: list[list[int]] = []

    def planner(joint: Joint) -> Program:
        whole = simulate(fastest_program(joint, 2**60)).peak_bytes
        programs = []
        for share in (1.0, 0.95, 0.9, 0.8, 0.7, 0.6):
            with contextlib.suppress(BudgetError):
                programs.append(fastest_program(joint, int(share * whole)))
        seen.append([program.recomputed for program in programs])
        return programs[-1]

    work = zoo.small("lenet")
    graph.planned_loss(work, planner)(work.batch)
    assert seen[0][0] == 0
    assert seen[0] == sorted(seen[0])


# -- plans ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "resnet18", "unet", "roberta-base"])
def test_a_plan_holds_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    work = zoo.small(name, device="cuda")
    plain = lowtide.profile(work)
    smallest = smallest_budget(work, plain)
    found = lowtide.verify(work, lowtide.plan(work, smallest, profile=plain, engine="graph"))
    assert found.ok, str(found)
    assert found.storage_peak_bytes == found.plan.storage_peak_bytes
    if name in ("gpt2", "roberta-base"):
        assert found.plan.fidelity == "bitwise"
