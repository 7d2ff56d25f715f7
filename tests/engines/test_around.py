"""Training around the planned loss: the plan saves nothing there, and says so once."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lowtide.engines import Step, apply, plan
from lowtide.workload import Workload
from tests.models import blocks, squares
from tests.refusals import warned

Only = Callable[..., None]


def recomputed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False).square().mean()


def applied(engine: str, only: Only, loss: Callable[..., torch.Tensor] = squares) -> Step:
    model = blocks(4, 32, nn.GELU)
    work = Workload(model, loss, torch.randn(256, 32), torch.optim.SGD(model.parameters(), lr=0.1))
    if engine == "graph":
        return apply(plan(work, "70%", engine="graph", tune=False), work)
    only(engine)
    step = apply(plan(work, "70%", engine="eager", allow="changed", tune=False), work)
    assert {choice.option.technique for choice in step.plan.choices} == {engine}
    return step


@pytest.mark.parametrize("engine", ["graph", "microbatch"])
def test_a_loop_around_the_planned_loss_is_warned_about_once(engine: str, only: Only) -> None:
    step = applied(engine, only)
    with warned("step.loss(batch)") as found:
        step.model(step.work.batch).sum().backward()
    assert found[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        squares(step.model, step.work.batch).backward()


@pytest.mark.parametrize("engine", ["graph", "microbatch"])
def test_steps_evaluation_copies_and_the_undone_model_are_not_warned_about(engine: str, only: Only) -> None:
    step = applied(engine, only)
    model, x = step.model, step.work.batch
    with warnings.catch_warnings(action="error"):
        step(x)
        step.loss(x).backward()
        with torch.no_grad():
            model(x)
            step.loss(x)
        model.eval()(x)
        model.train()
        step(x)
        copy.deepcopy(model)(x)
        pickle.loads(pickle.dumps(model))(x)
        step.undo()
        squares(model, x).backward()
    assert not model._forward_pre_hooks


def test_a_plan_that_acts_in_the_model_leaves_its_forward_unwatched(only: Only) -> None:
    step = applied("sqrt", only)
    with warnings.catch_warnings(action="error"):
        squares(step.model, step.work.batch).backward()
    assert not step.model._forward_pre_hooks


def test_a_model_that_the_loss_recomputes_is_inside_of_it(only: Only) -> None:
    step = applied("microbatch", only, recomputed)
    with warnings.catch_warnings(action="error"):
        step(step.work.batch)


def test_a_compiled_copy_of_the_loop_has_no_graph_break(only: Only) -> None:
    step = applied("microbatch", only)
    compiled = torch.compile(step.model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(step.work.batch), step.model.eval()(step.work.batch))


def test_a_step_prints_what_it_is(only: Only) -> None:
    for engine, words in (("graph", "graph engine"), ("sqrt", "eager engine")):
        step = applied(engine, only)
        text = repr(step)
        assert text.startswith("Step(Sequential in ")
        assert words in text
        assert "recompute" in text or "sqrt on" in text
        step.undo()


@pytest.mark.filterwarnings("ignore:A step took:RuntimeWarning")  # as both warnings say
def test_a_dispatch_mode_and_an_autocast_are_each_warned_about_once(only: Only) -> None:
    step = applied("graph", only)

    def twice() -> None:
        step(step.work.batch)
        step(step.work.batch)

    with warned("dispatch mode") as found, FlopCounterMode(display=False) as counter:
        twice()
    assert counter.get_total_flops() > 0
    assert step.profile().storage_peak_bytes == step.plan.storage_peak_bytes
    assert sum("A step took" not in str(each.message) for each in found) == 1
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with warned("autocast") as found, autocast:
        twice()
    assert sum("A step took" not in str(each.message) for each in found) == 1


def test_the_watch_leaves_the_captured_graph_as_it_was_planned() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    work = Workload(model, squares, torch.randn(256, 32))
    step = apply(plan(work, "70%", engine="graph", tune=False), work)
    with warnings.catch_warnings(action="error"):
        step(work.batch)
        step.profile()
    with warned("step.loss(batch)"):
        model(work.batch)
