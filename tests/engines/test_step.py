"""A planned step trains as plain PyTorch does, on the user's own model, and goes away without a trace."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.engines import Step, apply, plan
from lowtide.errors import LowtideError, PlanError, WorkloadError
from lowtide.planning import Choice, Plan
from lowtide.techniques import Fidelity, register
from lowtide.workload import Workload
from tests.refusals import refused, warned

from ..contract.outcomes import assert_restored, snapshot
from ..contract.workloads import WORKLOADS, larger
from ..planning.steps import Loose, chain

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}


def batches(work: Workload, count: int) -> list[Any]:
    torch.manual_seed(5)
    return [(torch.randn_like(work.batch[0]), work.batch[1]) for _ in range(count)]


@pytest.mark.filterwarnings("ignore:A step took:RuntimeWarning")  # a fake step counts no workspaces of kernels
@pytest.mark.parametrize(("optimizer", "autocast"), [("sgd", None), ("adamw", torch.bfloat16)])
def test_training_gives_the_losses_and_weights_of_plain_pytorch(optimizer: str, autocast: torch.dtype | None) -> None:
    work = larger(WORKLOADS["convnet"]())
    model = copy.deepcopy(work.model)
    plain_optimizer = OPTIMIZERS[optimizer](model)
    work = replace(work, optimizer=OPTIMIZERS[optimizer](work.model), autocast=autocast)
    data = batches(work, 4)

    torch.manual_seed(7)
    expected: list[Tensor] = []
    for batch in data:
        plain_optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
            loss = work.loss(model, batch)
        loss.backward()
        plain_optimizer.step()
        expected.append(loss.detach())

    step = apply(plan(work, "80%", fake=True, tune=False), work)
    assert step.plan.choices
    torch.manual_seed(7)
    found = [step(batch) for batch in data]
    assert all(map(torch.equal, found, expected))
    assert not any(loss.requires_grad for loss in found)
    state = step.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_undo_gives_the_model_back_bit_for_bit() -> None:
    work = chain()
    before = snapshot(work.model)
    step = apply(plan(work, "60%", fake=True, tune=False), work)
    assert "forward" in work.model.__dict__
    assert list(step.model.state_dict()) == list(before.values)
    step.undo()
    step.undo()
    assert_restored(work.model, before)


def test_a_step_without_an_optimizer_fills_the_gradients() -> None:
    work = replace(chain(), optimizer=None)
    with apply(plan(work, "60%", fake=True, tune=False), work) as step:
        step(work.batch)
        first = [p.grad.clone() for p in work.model.parameters()]
        step(work.batch)
    assert all(torch.equal(p.grad, g) for p, g in zip(work.model.parameters(), first, strict=True))


def test_the_first_steps_are_measured() -> None:
    work = chain()
    step = apply(plan(work, "60%", fake=True, tune=False), work)
    assert step.measured is None
    for _ in range(5):
        step(work.batch)
    assert step.measured is not None
    assert step.measured.steps == 3
    assert step.measured.seconds > 0
    assert step.measured.peak_bytes == step.plan.peak_bytes
    assert step.profile().storage_peak_bytes == step.plan.storage_peak_bytes


def test_on_a_cpu_a_step_above_its_budget_is_warned_about_once() -> None:
    work = chain()
    chosen = plan(work, "60%", fake=True, tune=False)
    too_low = replace(chosen, budget_bytes=chosen.peak_bytes - 1, peak_bytes=chosen.peak_bytes - 2)
    with apply(too_low, work) as step:
        step(work.batch)
        with warned("predicted", "promised"):
            step(work.batch)
        with warnings.catch_warnings(action="error"):
            step(work.batch)


# -- what cannot be applied leaves the model alone -----------------------------------------------------


def test_no_batch_is_refused() -> None:
    work = chain()
    with apply(plan(work, "60%", fake=True, tune=False), work) as step, refused("None", kind=WorkloadError):
        step(None)


def test_an_autocast_that_was_not_planned_is_warned_about_once() -> None:
    work = chain()
    with apply(plan(work, "60%", fake=True, tune=False), work) as step, torch.autocast("cpu", dtype=torch.bfloat16):
        with warned("autocast"):
            step.loss(work.batch)
        with warnings.catch_warnings(action="error"):
            step.loss(work.batch)


def test_arguments_of_another_type_are_named() -> None:
    work: Any = chain()
    chosen: Any = plan(work, "60%", fake=True, tune=False)
    with refused("Workload", "apply(plan, work)", kind=PlanError):
        apply(work, chosen)
    with pytest.raises(WorkloadError):
        apply(chosen, work.model)
    other = chain(3)
    before = snapshot(other.model)
    with refused("model", kind=PlanError):
        apply(chosen, other)
    assert_restored(other.model, before)


def with_choice(found: Plan, technique: Loose, work: Workload) -> Plan:
    (option,) = technique.options(None)  # pyright: ignore
    extra = Choice(option, Fidelity.CHANGED, 0, 0.0, "because")
    return replace(found, choices=(*found.choices, extra))


def test_a_plan_with_a_technique_that_is_not_here_is_refused() -> None:
    work = chain()
    before = snapshot(work.model)
    chosen = with_choice(plan(work, "60%", fake=True, tune=False), Loose(name="absent"), work)
    with refused("absent", kind=PlanError):
        apply(chosen, work)
    assert_restored(work.model, before)


def test_a_technique_that_fails_takes_back_those_before_it() -> None:
    class Failing(Loose):
        conflicts: Mapping[str, str] = {}

    work = chain()
    before = snapshot(work.model)
    technique = Failing(fails=True)
    with register(technique), refused("never works", kind=RuntimeError):
        apply(with_choice(plan(work, "60%", fake=True, tune=False), technique, work), work)
    assert_restored(work.model, before)


@pytest.mark.gpu
def test_on_a_gpu_the_measured_peak_keeps_the_promise() -> None:
    work = gpu_chain()
    chosen = plan(work, "60%", compile=False, tune=False)
    step: Step = apply(chosen, work)
    for _ in range(3):
        step(work.batch)
    assert step.measured is not None
    assert step.measured.peak_bytes is not None
    assert step.measured.peak_bytes <= chosen.budget_bytes
    assert step.measured.peak_bytes == pytest.approx(chosen.peak_bytes, rel=0.02)


def gpu_chain() -> Workload:
    torch.manual_seed(0)
    work = chain(12)
    model = work.model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, work.loss, torch.randn(2**20, 16, device="cuda"), optimizer)


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_a_step_is_not_copied_and_a_copy_of_its_model_is_a_model_of_its_own(engine: Any) -> None:
    work = chain(3)
    step = apply(plan(work, "80%", engine=engine, allow="bitwise", tune=False), work)
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with refused("copy.deepcopy(step.model)", kind=LowtideError):
            way(step)
        if engine == "graph" and way is not copy.copy:
            with refused("copy.deepcopy(step.model)", kind=LowtideError):
                way(step.work)
    step(work.batch)
    copies = copy.deepcopy(step.model), pickle.loads(pickle.dumps(step.model))
    work.model.zero_grad()
    step.undo()
    work.loss(work.model, work.batch).backward()
    for twin in copies:
        twin.zero_grad()
        work.loss(twin, work.batch).backward()
        for ours, theirs in zip(twin.parameters(), work.model.parameters(), strict=True):
            assert ours is not theirs
            assert torch.equal(ours.grad, theirs.grad)
