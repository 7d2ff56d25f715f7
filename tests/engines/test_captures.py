"""Captures on the graph engine: how many there are, what they hold, and when a step is captured anew."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide import Workload
from lowtide.engines import apply, graph, plan
from lowtide.planning.solvers.solver import fastest_program
from lowtide.tracing.capture.loss import CompiledLoss
from tests.models import layers, squares
from tests.refusals import warned

from .counting import Planner, assert_equal, plain_results, results

# -- what is held ----------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects of torch's warn when they are looked at
        return sum(isinstance(each, Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("engine", ["graph", "eager"])
def test_cycles_of_plan_apply_and_undo_leave_no_tensors_behind(engine: Any) -> None:
    model, batch = layers(3, 32, nn.GELU), torch.randn(64, 32)

    def cycle() -> int:
        work = Workload(model, squares, batch)
        with apply(plan(work, "80%", engine=engine, tune=False), work) as step:  # the same plan each time
            assert engine == step.plan.engine
            step(batch)
        model.zero_grad()
        del work, step
        return live_tensors()

    counts = [cycle() for _ in range(3)]
    assert counts[1] == counts[2]


def test_releasing_a_step_leaves_the_users_own_compiled_functions_alone() -> None:
    compiled: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        compiled.append(module)
        return module

    double = torch.compile(lambda x: x * 2, backend=backend)
    double(torch.ones(3))
    work = Workload(layers(6, 32, nn.GELU), squares, torch.randn(64, 32))
    loss = graph.PlannedLoss(work, lambda _: Planner("all"))
    loss(work.model, work.batch).backward()
    loss.release()
    double(torch.ones(3))
    assert len(compiled) == 1


def test_only_so_many_shapes_stay_captured_and_the_others_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_MOST_SHAPES", 2)
    work = Workload(layers(2, 32, nn.GELU), squares, torch.randn(64, 32))
    loss = graph.PlannedLoss(work, lambda _: lambda joint: fastest_program(joint, 2**40))
    counts: list[int] = []
    for size in (64, 63, 62, 61):
        loss(work.model, work.batch[:size]).backward()
        counts.append(live_tensors())
    assert counts[2] == counts[3]
    held = [type(each) for each in gc.get_objects()]
    assert held.count(graph.Runner) == held.count(CompiledLoss) == 2
    pending = loss(work.model, work.batch[:61])
    loss(work.model, work.batch[:60])
    loss(work.model, work.batch[:59])  # which frees 61
    pending.backward()


def test_a_setting_that_cannot_be_captured_runs_the_plain_step_and_says_so() -> None:
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())))
    work = Workload(model, squares, torch.randn(64, 32))
    loss = graph.planned_loss(work, Planner("smallest"))
    loss(work.batch).backward()
    model[1].momentum = None
    model.zero_grad()
    twin = copy.deepcopy(model)
    with warned("captured"):
        loss(work.batch).backward()
    squares(twin, work.batch).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert all(map(torch.equal, model.buffers(), twin.buffers()))


# -- captured once ---------------------------------------------------------------------------------------


class Patched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def test_a_class_that_is_patched_between_plan_and_apply_runs_as_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo does not guard methods of classes."""
    work = Workload(nn.Sequential(*(Patched() for _ in range(4))), squares, torch.randn(64, 32))
    chosen = plan(work, "80%", engine="graph", tune=False)
    monkeypatch.setattr(Patched, "forward", lambda self, x: x + self.inner(x).relu())
    expected = plain_results(work)
    with apply(chosen, work) as step:
        with warned("planned anew"):
            found_now = results(work, step.loss)
        assert_equal(found_now, expected)


def test_another_kind_of_attention_is_captured_anew() -> None:
    """Dynamo does not guard the flags that choose it."""
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    work = Workload(model, lambda model, x: (model(x) * x).mean(), torch.randn(16, 24, 32))
    with apply(plan(work, "90%", engine="graph", tune=False), work) as step:
        step.loss(work.batch).backward()
        model.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):
            expected = plain_results(work)
            with warned("planned anew"):
                ours = results(work, step.loss)
            torch.testing.assert_close(ours, expected)


def test_two_steps_of_one_plan_run_each_its_own_program() -> None:
    model, batch = layers(4, 32, nn.GELU), torch.randn(64, 32)
    work = Workload(model, squares, batch)
    chosen = plan(work, "80%", engine="graph", tune=False)
    expected = plain_results(work)
    with apply(chosen, work) as first:
        for _ in range(2):
            with apply(chosen, work) as second:
                for step in (first, second):
                    assert_equal(results(work, step.loss), expected)
