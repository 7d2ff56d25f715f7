"""Plans on the graph engine, applied: the budget in bytes, plain PyTorch's bits, and loops as people write them."""

from __future__ import annotations

import copy
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowtide import Workload, zoo
from lowtide.engines import Step, apply, graph
from lowtide.errors import BudgetError, LowtideError, PlanError
from lowtide.planning import Plan, plan
from lowtide.profiling import Profile, profile
from lowtide.techniques import Fidelity

from ..contract.contract import assert_restored, snapshot
from ..planning.steps import chain
from ..ranks import Check, assert_passed, run_on_two_ranks
from ..tracing.allocator import _alive, allocated_peak
from .test_graph import Counter, Planner, results

SOAK = bool(os.environ.get("LOWTIDE_SOAK"))
QUICK = ["lenet", "gpt2", "resnet18"]
REST = ["resnet50", "resnet18-1d", "resnext50", "wrn28-2", "wrn38", "densenet121", "unet", "roberta-base"]
MODELS = [*QUICK, *REST] if SOAK else QUICK
SIZES: dict[str, dict[str, int]] = {  # at which a step is more than its parameters
    "lenet": {"batch": 64},
    "gpt2": {"batch": 4, "seq": 64},
    "roberta-base": {"batch": 4, "seq": 64},
}
SHARES = (0.9, 0.7, 0.5, 0.35)

Loss = Callable[[Any], Tensor]


@pytest.fixture(autouse=True, scope="module")
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def smallest_budget(work: Workload, plain: Profile) -> int:
    with pytest.raises(BudgetError) as refused:
        plan(work, 1, profile=plain, engine="graph")
    found = re.search(r"(\d+) bytes\)", str(refused.value))
    assert found is not None
    return int(found[1])


def plain_loss(work: Workload) -> Loss:
    return lambda batch: work.compute_loss(batch=batch)


# -- bytes and bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_keeps_its_budget_to_the_byte_and_plain_pytorchs_bits(name: str) -> None:
    work = zoo.small(name, **SIZES.get(name, {}))
    start = copy.deepcopy(work.model.state_dict())
    before = profile(work)
    expected = results(work, plain_loss(work))
    done: set[str] = set()
    for budget, found in plans_at_shares(work, before):
        assert found.program is not None
        assert found.fidelity is Fidelity.BITWISE
        assert found.peak_bytes <= budget
        if found.program.schedule not in done:
            done.add(found.program.schedule)
            with apply(found, work) as step:
                for ours, plains in zip(results(work, step.loss), expected, strict=True):
                    assert torch.equal(ours, plains)
                assert_kept(step, work, budget)
            work.model.load_state_dict(start)
    if name in ("gpt2", "roberta-base"):
        assert len(done) > 2


def plans_at_shares(work: Workload, before: Profile) -> Iterator[tuple[int, Plan]]:
    """Plans at shares of what is above parameters, optimizer state and batch; the smallest one instead of none."""
    smallest = smallest_budget(work, before)
    for share in SHARES:
        size = before.static_bytes + int(share * (before.storage_peak_bytes - before.static_bytes))
        budget = max(size, smallest)
        yield budget, plan(work, budget, profile=before, engine="graph")


def assert_kept(step: Step, work: Workload, budget: int) -> None:
    """The promised storage peak is the traced and the counted one; the allocator's is within the budget."""
    assert step.profile().storage_peak_bytes == step.plan.storage_peak_bytes
    allocated = allocated_peak(work.model, lambda _, batch: step.loss(batch), work.batch, work.optimizer)
    assert allocated <= budget
    assert counted_peak(step, work) == step.plan.storage_peak_bytes
    work.model.zero_grad()


def counted_peak(step: Step, work: Workload) -> int:
    """The storages of a whole step, counted without lowtide."""
    work.model.zero_grad()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive(work)}
    with Counter() as counter, mock.patch("torch.get_rng_state", counter.get_rng_state):
        value = step.loss(work.batch)  # held to the end of the step, as in most loops
        value.backward()
        if work.optimizer is not None:
            work.optimizer.step()
    return sum(held.values()) + counter.peak_bytes


def alive(work: Workload) -> Iterator[Tensor]:
    return _alive(work.model, work.batch, work.optimizer)


def test_under_autocast_with_dropout_a_plan_gives_the_captured_graphs_bits() -> None:
    work = zoo.small("gpt2", **SIZES["gpt2"], autocast=torch.bfloat16)
    before = profile(work)
    found = plan(work, smallest_budget(work, before), profile=before, engine="graph")
    assert found.program is not None
    assert found.program.ops_again > 0
    with apply(found, work) as step:
        ours = results(work, step.loss)
        assert step.profile().storage_peak_bytes == found.storage_peak_bytes
    captured = results(work, graph.planned_loss(work, Planner("all")))
    assert all(map(torch.equal, ours, captured))
    eager = results(work, plain_loss(work))
    assert torch.equal(ours[-1], eager[-1])  # the generator
    for mine, plains in zip(ours[:-1], eager[:-1], strict=True):
        off = (mine.double() - plains.double()).norm() / plains.double().norm()
        assert off < 2**-6  # two ulps of bfloat16: plain dropout rounds its mask, which the gradients pass six times
    assert found.fidelity is Fidelity.ROUNDOFF


# -- loops -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """All that is awkward: statistics, random numbers, in-place ops, parameters whose gradient is there before
    the gradient that still reads them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.rand(96, 16))
        self.mix = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.act(self.norm(self.linear(x)))) * self.scale[: len(x)] @ self.mix


def awkward(*, tied: bool = True) -> Workload:
    """Blocks of which two share a layer, the first frozen in part."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linears = [nn.Linear(16, 16) for _ in range(4)]
        linears[3] = linears[1] if tied else linears[3]
        model = nn.Sequential(*map(Block, linears))
        model[0].norm.weight.requires_grad_(False)
        model[0].linear.bias.requires_grad_(False)
        return work_of(model, torch.randn(64, 16))


def work_of(model: nn.Module, batch: Tensor) -> Workload:
    return Workload(model, squares, batch, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@dataclass(frozen=True)
class Ready:
    """A plan applied, and the state that the model started from."""

    step: Step
    work: Workload
    start: dict[str, Tensor]

    def compare(self, loop: Callable[[Loss, nn.Module], Sequence[Tensor]], *, close: Sequence[str] = ()) -> None:
        """A loop with the planned loss and with a plain twin of the model: the same bits in all that is left."""
        twin = copy.deepcopy(self.work.model)
        losses: dict[nn.Module, Loss] = {self.work.model: self.step.loss, twin: lambda batch: squares(twin, batch)}
        left: list[list[Tensor]] = []
        rounded: list[list[Tensor]] = []
        for model, loss in losses.items():
            model.load_state_dict(self.start)
            model.zero_grad()
            torch.manual_seed(5)
            found = loop(loss, model)
            gradients = [p.grad for n, p in model.named_parameters() if p.grad is not None and n not in close]
            rounded.append([p.grad for p in map(model.get_parameter, close) if p.grad is not None])
            left.append([*found, *gradients, *model.state_dict().values(), torch.get_rng_state()])
            model.zero_grad()
        assert len(left[0]) == len(left[1])
        assert all(map(torch.equal, *left))
        torch.testing.assert_close(*rounded)

    def batches(self, count: int) -> list[Tensor]:
        made = torch.Generator().manual_seed(7)
        return [torch.randn(self.work.batch.shape, generator=made) for _ in range(count)]


def planned(work: Workload) -> Ready:
    before = profile(work)
    budget = (smallest_budget(work, before) + before.peak_bytes) // 2
    found = plan(work, budget, profile=before, engine="graph")
    assert found.program is not None
    assert found.program.ops_again > 0
    return Ready(apply(found, work), work, copy.deepcopy(work.model.state_dict()))


@pytest.fixture(scope="module")
def ready() -> Ready:
    return planned(awkward())


def test_hooks_of_parameters_see_and_change_gradients(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        seen: dict[str, Tensor] = {}

        def halve(gradient: Tensor, name: str) -> Tensor:
            assert name not in seen
            seen[name] = gradient.clone()
            return gradient / 2

        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        hooks = [p.register_hook(partial(halve, name=n)) for n, p in trained]
        value = loss(ready.work.batch)
        value.backward()
        for hook in hooks:
            hook.remove()
        assert len(seen) == len(trained)
        return [value.detach(), *(seen[n] for n, _ in trained)]

    ready.compare(loop)


def in_backward(loss: Loss, model: nn.Module, data: list[Tensor]) -> list[Tensor]:
    def update(parameter: Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters() if p.requires_grad]
    losses = []
    for batch in data:
        value = loss(batch)
        value.backward()
        losses.append(value.detach())
    for hook in hooks:
        hook.remove()
    assert all(p.grad is None for p in model.parameters())
    return losses


def test_an_optimizer_that_steps_in_backward_steps_as_in_plain_pytorch(ready: Ready) -> None:
    ready.compare(lambda loss, model: in_backward(loss, model, ready.batches(3)))


def test_gradients_accumulate_over_microbatches(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            for batch in ready.batches(4):
                (loss(batch) / 4).backward()
            optimizer.step()
        return []

    ready.compare(loop)


def test_two_losses_go_backward_together(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        first, second = ready.batches(2)
        (loss(first) + 2 * loss(second)).backward()
        return []

    # Autograd adds up four gradients of what is tied, in its order: a planned loss has added up two of them before.
    ready.compare(loop, close=["1.linear.weight", "1.linear.bias"])


def test_clipping_and_a_scheduler(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        norms = []
        for batch in ready.batches(3):
            optimizer.zero_grad()
            loss(batch).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
            scheduler.step()
        return norms

    ready.compare(loop)


def test_a_gradient_scaler_leaves_an_overflow_out(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for i, batch in enumerate(ready.batches(3)):
            optimizer.zero_grad()
            scaler.scale(loss(batch) * (float("inf") if i == 1 else 1)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() < 2.0**10
        return []

    ready.compare(loop)


def test_autograd_grad_of_all_and_of_some_parameters(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        trained = [p for p in model.parameters() if p.requires_grad]
        found: list[Tensor] = []
        for some in (trained, trained[:1], trained[-2:]):
            found += torch.autograd.grad(loss(ready.work.batch), some)
        assert all(p.grad is None for p in trained)
        return found

    ready.compare(loop)


def test_evaluation_without_gradients_then_training_again(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        found = []
        for mode in (True, False, True):
            model.train(mode)
            value = loss(ready.work.batch)
            value.backward()
            with torch.no_grad():
                found += [value.detach(), loss(ready.work.batch), loss(ready.work.batch[:5])]
            with torch.inference_mode():
                found.append(loss(ready.work.batch).clone())
        assert not any(value.requires_grad for value in found)
        return found

    ready.compare(loop)


def test_only_what_is_trained_has_gradients(ready: Ready) -> None:
    model = ready.work.model
    ready.step.loss(ready.work.batch).backward()
    with_gradients = {n for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert with_gradients == {n for n, p in model.named_parameters() if p.requires_grad}


def test_the_loss_is_freed_with_all_it_kept_where_no_backward_runs(ready: Ready) -> None:
    with Counter() as counter:
        value = ready.step.loss(ready.work.batch)
        assert counter.bytes > ready.work.batch.nbytes
        del value
        assert counter.bytes == 0


# -- gradients leave early -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide() -> Ready:
    """Parameters outweigh all else."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    work = Workload(model, squares, torch.randn(64, 64))
    return planned(work)


def test_gradients_that_are_used_at_once_are_never_all_alive(wide: Ready) -> None:
    whole = sum(p.nbytes for p in wide.work.model.parameters())
    wide.step.loss(wide.work.batch).backward()
    wide.work.model.zero_grad()
    value = wide.step.loss(wide.work.batch)
    with Counter() as counter:
        in_backward(lambda _: value, wide.work.model, [wide.work.batch])
    above = counter.peak_bytes - 4 * wide.work.batch.nbytes  # values and their gradients, while one stage runs
    assert above < whole / 2


def test_accumulation_holds_no_second_set_of_gradients(wide: Ready) -> None:
    whole = sum(p.nbytes for p in wide.work.model.parameters())
    wide.step.loss(wide.work.batch).backward()
    value = wide.step.loss(wide.work.batch)
    with Counter() as counter:
        value.backward()
    wide.work.model.zero_grad()
    assert counter.peak_bytes - 4 * wide.work.batch.nbytes < whole / 2
    del value


# -- refusals --------------------------------------------------------------------------------------------


def test_a_second_backward_pass_is_refused(ready: Ready) -> None:
    value = ready.step.loss(ready.work.batch)
    value.backward(retain_graph=True)
    with pytest.raises(LowtideError, match=r"runs once.*Compute the loss again"):
        value.backward()
    ready.work.model.zero_grad()


def test_gradients_of_gradients_are_refused(ready: Ready) -> None:
    parameter = next(ready.work.model.parameters())
    with pytest.raises(LowtideError, match=r"Gradients of gradients.*create_graph"):
        torch.autograd.grad(ready.step.loss(ready.work.batch), parameter, create_graph=True)


@pytest.mark.parametrize("name", ["1.linear.weight", "2.mix", "3.norm.weight", "3.mix"])
def test_a_parameter_written_to_before_backward_is_autograds_error(ready: Ready, name: str) -> None:
    twin = copy.deepcopy(ready.work.model)
    losses: dict[nn.Module, Loss] = {twin: lambda batch: squares(twin, batch), ready.work.model: ready.step.loss}
    for model, loss in losses.items():
        value = loss(ready.work.batch)
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()
    ready.work.model.zero_grad()
    ready.work.model.load_state_dict(ready.start)


# -- plans as files --------------------------------------------------------------------------------------


def test_a_plan_from_a_file_runs_as_the_plan_itself(ready: Ready) -> None:
    work = awkward()
    read = Plan.from_json(json.dumps(ready.step.plan.to_json(), allow_nan=False))
    assert read == ready.step.plan
    expected = results(work, plain_loss(work))
    step = apply(read, work)
    for ours, plains in zip(results(work, step.loss), expected, strict=True):
        assert torch.equal(ours, plains)
    assert step.profile().storage_peak_bytes == read.storage_peak_bytes


def test_a_plan_of_another_step_patches_nothing(ready: Ready) -> None:
    work = awkward()
    before = snapshot(work.model)
    frozen = awkward()
    frozen.model[2].mix.requires_grad_(False)
    others = {
        "another model": awkward(tied=False),
        "another batch": replace(work, batch=work.batch[:8]),
        "another optimizer": replace(work, optimizer=torch.optim.Adam(work.model.parameters())),
        "another autocast": replace(work, autocast=torch.bfloat16),
    }
    for reason, other in (*others.items(), ("another model", frozen)):
        with pytest.raises(PlanError, match=reason):
            apply(ready.step.plan, other)
    assert_restored(work.model, before)


@pytest.mark.parametrize("stages", [1, 99])
def test_a_schedule_of_another_graph_is_refused_when_it_should_run(ready: Ready, stages: int) -> None:
    program = ready.step.plan.program
    assert program is not None
    there_and_back = [*(f"F{i}e" for i in range(1, stages + 1)), *(f"B{i}" for i in range(stages, 0, -1))]
    wrong = replace(ready.step.plan, program=replace(program, schedule=", ".join(there_and_back)))
    step = apply(Plan.from_json(wrong.to_json()), ready.work)
    with pytest.raises(PlanError, match=f"schedule has {stages} stages, and the step's graph"):
        step.loss(ready.work.batch)


# -- other shapes ----------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each graph that is compiled."""
    calls: list[Any] = []
    original = graph._Backend.__call__

    def count(self: Any, *args: Any) -> Any:
        calls.append(self)
        return original(self, *args)

    monkeypatch.setattr(graph._Backend, "__call__", count)
    return calls


def test_another_shape_is_planned_once_and_keeps_the_bits(ready: Ready, compiled: list[Any]) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        found = []
        for size in (17, 64, 65, 17):
            value = loss(ready.batches(1)[0].repeat(2, 1)[:size])
            value.backward()
            found.append(value.detach())
        return found

    ready.step.loss(ready.work.batch)
    compiled.clear()
    ready.compare(loop)
    assert len(compiled) == 2  # for 17 and 65, and for neither again
    ready.compare(loop)
    assert len(compiled) == 2


def test_a_batch_that_does_not_fit_is_warned_about_and_runs(ready: Ready) -> None:
    large = torch.randn(96, 16)
    tight = planned_tightly(ready.work)
    with pytest.warns(RuntimeWarning) as warned:
        value = tight.loss(large)
    assert len(warned) == 1
    said = str(warned[0].message)
    assert "float32[96, 16] does not fit the budget" in said
    assert "planned for float32[64, 16]" in said
    value.backward()
    ready.work.model.zero_grad()
    ready.work.model.load_state_dict(ready.start)


def planned_tightly(work: Workload) -> Step:
    before = profile(work)
    return apply(plan(work, smallest_budget(work, before), profile=before, engine="graph"), work)


def test_a_larger_batch_is_within_the_budget_or_warned_about() -> None:
    work, larger = (zoo.small("lenet", batch=batch) for batch in (64, 66))
    before = profile(work)
    step = apply(plan(work, before.peak_bytes - 1, profile=before, engine="graph"), work)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = allocated_peak(work.model, lambda _, batch: step.loss(batch), larger.batch, work.optimizer)
    assert found <= step.plan.budget_bytes or warned


# -- undo ------------------------------------------------------------------------------------------------


def test_undo_gives_the_plain_loss_back_and_twice_is_harmless(compiled: list[Any]) -> None:
    work = awkward()
    before = snapshot(work.model)
    kind, keys, optimizer = type(work.model), list(work.model.state_dict()), work.optimizer
    step = planned(work).step
    assert (type(step.model), list(step.model.state_dict())) == (kind, keys)
    assert step.model is work.model
    for _ in range(2):
        step.undo()
        assert step.work is work
        assert work.optimizer is optimizer
    assert_restored(work.model, before)
    value = step.loss(work.batch)
    assert not compiled
    assert isinstance(value.grad_fn, type(work.compute_loss().grad_fn))


# -- random graphs ---------------------------------------------------------------------------------------

WIDTH = 16
STEPS = ("linear", "tied", "conv", "norm", "batch norm", "dropout", "relu", "relu_", "residual", "concat", "chunk",
         "scale", "mix")  # fmt: skip


class Random(nn.Module):
    """Steps that each read the last value, and some an earlier one too."""

    def __init__(self, steps: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.first, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        layers: dict[str, Callable[[], nn.Module]] = {
            "conv": lambda: nn.Conv1d(4, 4, 3, padding=1),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "batch norm": lambda: nn.BatchNorm1d(WIDTH),
            "concat": lambda: nn.Linear(2 * WIDTH, WIDTH),
            "chunk": lambda: nn.Linear(WIDTH, 2 * WIDTH),
        }
        self.layers = nn.ModuleList(layers.get(step, lambda: nn.Linear(WIDTH, WIDTH))() for step, _ in steps)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for (step, back), layer in zip(self.steps, self.layers, strict=True):
            values.append(self.run(step, layer, values[-1], values[-1 - back % len(values)]))
        return values[-1]

    def run(self, step: str, layer: nn.Module, x: Tensor, earlier: Tensor) -> Tensor:
        match step:
            case "tied":
                return self.tied(x)
            case "conv":
                return layer(x.view(-1, 4, WIDTH // 4)).flatten(1)
            case "dropout":
                return F.dropout(x, 0.3)
            case "relu":
                return F.relu(x)
            case "relu_":
                return F.relu_(layer(x))
            case "residual":
                return x + earlier
            case "concat":
                return layer(torch.cat([x, earlier], dim=1))
            case "chunk":
                left, right = layer(x).chunk(2, dim=1)
                return left * right.sigmoid()
            case "scale":
                return x * layer.bias
            case "mix":
                return x.tanh() @ layer.weight
        return layer(x)


@settings(
    max_examples=300 if SOAK else 5,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 4)), min_size=3, max_size=14),
    rows=st.integers(2, 200),
    share=st.floats(-0.1, 1, exclude_max=True),
    optimizer=st.booleans(),
)
def test_any_graph_at_any_budget_keeps_bits_and_bytes_or_is_refused(
    steps: list[tuple[str, int]], rows: int, share: float, optimizer: bool
) -> None:
    torch.manual_seed(rows)
    model = Random(steps)
    work = work_of(model, torch.randn(rows, WIDTH))
    work = work if optimizer else replace(work, optimizer=None)
    before = profile(work)
    smallest = smallest_budget(work, before)
    budget = int(smallest + share * (before.peak_bytes - smallest))
    try:
        found = plan(work, budget, profile=before, engine="graph")
    except BudgetError:
        assert budget < smallest
        return
    assert found.peak_bytes <= budget
    if found.program is None:
        assert found.peak_bytes == before.peak_bytes
        return
    expected = results(work, plain_loss(work))
    with apply(found, work) as step:
        for ours, plains in zip(results(work, step.loss), expected, strict=True):
            assert torch.equal(ours, plains)
        assert_kept(step, work, budget)
    torch._dynamo.reset()


# -- on two ranks ----------------------------------------------------------------------------------------


class PlannedModule(nn.Module):
    """What DDP wraps: its forward is the planned loss."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.model, self.step = step.model, step

    def forward(self, batch: Tensor) -> Tensor:
        return self.step.loss(batch)


def ddp_around_the_planned_loss_is_ddp_around_the_plain_one(rank: int) -> None:
    work = chain(2)
    plain = DistributedDataParallel(copy.deepcopy(work.model), bucket_cap_mb=1e-3)
    wrapped = DistributedDataParallel(PlannedModule(planned(work).step), bucket_cap_mb=1e-3)
    torch.manual_seed(rank)
    for _ in range(3):
        batch = torch.randn_like(work.batch)
        squares(plain, batch).backward()
        wrapped(batch).backward()
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert torch.equal(ours.grad, theirs.grad)


def a_ddp_model_is_not_captured_and_that_is_said(rank: int) -> None:
    work = chain(2)
    inside = Workload(DistributedDataParallel(work.model), squares, work.batch)
    with pytest.raises(PlanError, match="not captured as one graph"):
        plan(inside, "70%", engine="graph")


CHECKS: tuple[Check, ...] = (
    ddp_around_the_planned_loss_is_ddp_around_the_plain_one,
    a_ddp_model_is_not_captured_and_that_is_said,
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_on_two_ranks(CHECKS, folder)
    return folder


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check: Check, ran: Path) -> None:
    assert_passed(check, ran)
