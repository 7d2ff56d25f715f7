"""Programs recorded as CUDA graphs: the bits and promises of the program, whatever the loop does.

Without a GPU, a pretended recorder runs what it recorded again.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload, apply, zoo
from lowtide.engines import Step
from lowtide.engines.recorded import RecordedRunner
from lowtide.errors import BudgetError
from lowtide.planning import Plan
from lowtide.tracing.meter import pooled_bytes
from tests.models import layers, squares

from ..refusals import warned
from .planned import IN_BACKWARD, Loss, Ready, awkward, smallest_plan
from .pretend import PretendRecorder
from .test_autograd import (  # the same loops, recorded
    test_a_gradient_scaler_leaves_an_overflow_out,
    test_an_optimizer_that_steps_in_backward_steps_as_in_plain_pytorch,
    test_clipping_and_a_scheduler,
    test_gradients_accumulate_over_microbatches,
    test_hooks_of_parameters_see_and_change_gradients,
    test_only_what_is_trained_has_gradients,
    test_two_losses_go_backward_together,
)

__all__ = [
    "test_a_gradient_scaler_leaves_an_overflow_out",
    "test_an_optimizer_that_steps_in_backward_steps_as_in_plain_pytorch",
    "test_clipping_and_a_scheduler",
    "test_gradients_accumulate_over_microbatches",
    "test_hooks_of_parameters_see_and_change_gradients",
    "test_only_what_is_trained_has_gradients",
    "test_two_losses_go_backward_together",
]


# The budget is near the smallest, so gradients that accumulate are warned about.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients of .* exist before the step")


def recorded(chosen: Plan) -> Plan:
    assert chosen.program is not None
    return replace(chosen, program=replace(chosen.program, is_recorded=True))


@pytest.fixture(scope="module")
def unapplied() -> tuple[Plan, Workload]:
    work = awkward()
    return recorded(smallest_plan(work, share=1 / 8)), work


@pytest.fixture
def ready(unapplied: tuple[Plan, Workload], monkeypatch: pytest.MonkeyPatch) -> Iterator[Ready]:
    """A step that was recorded, and of which each test launches some."""
    monkeypatch.setattr(RecordedRunner, "recorder", PretendRecorder)
    chosen, work = unapplied
    start = copy.deepcopy(work.model.state_dict())
    with apply(chosen, work) as step:
        assert [launches(step, work.batch) for _ in range(2)] == [0, 2]
        work.model.zero_grad()
        before = PretendRecorder.launches
        yield Ready(step, work, start)
        assert PretendRecorder.launches > before
    work.model.load_state_dict(start)


def launches(step: Step, batch: Tensor) -> int:
    before = PretendRecorder.launches
    step.model.zero_grad()
    step.loss(batch).backward()
    return PretendRecorder.launches - before


def test_many_steps_have_the_plain_steps_bits(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        losses = []
        for batch in ready.batches(5):
            model.zero_grad()
            losses.append(loss(batch))
            losses[-1].backward()
        return [each.detach() for each in losses]

    ready.compare(loop)


def test_gradients_that_somebody_holds_are_not_overwritten(ready: Ready) -> None:
    trained = [p for p in ready.work.model.parameters() if p.requires_grad]
    held = torch.autograd.grad(ready.step.loss(ready.work.batch), trained)
    before = [each.clone() for each in held]
    with warned("no longer launched"):
        ready.step.loss(ready.work.batch).backward()
    assert all(map(torch.equal, held, before))
    assert not launches(ready.step, ready.work.batch)


def test_a_loss_that_waits_keeps_its_saved_values(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        first, second = ready.batches(2)
        waiting = loss(first)
        loss(second).backward()
        model.zero_grad()
        waiting.backward()
        return []

    ready.compare(loop)


def test_a_loss_without_backward_is_forgotten(ready: Ready) -> None:
    ready.step.loss(ready.work.batch)
    assert launches(ready.step, ready.work.batch) == 2


def test_a_backward_pass_runs_once(ready: Ready) -> None:
    loss = ready.step.loss(ready.work.batch)
    loss.backward(retain_graph=True)
    with pytest.raises(lowtide.LowtideError, match="runs once"):
        loss.backward()
    with pytest.raises(lowtide.LowtideError, match="Gradients of gradients"):
        ready.step.loss(ready.work.batch).backward(create_graph=True)


def test_parameters_that_moved_are_recorded_anew(ready: Ready) -> None:
    for _ in range(20):
        assert launches(ready.step, ready.work.batch) == 2
    for parameter in ready.work.model.parameters():
        parameter.data = parameter.data.clone()
    assert launches(ready.step, ready.work.batch) == 2
    test_many_steps_have_the_plain_steps_bits(ready)


def test_an_evaluation_frees_the_recording_and_too_many_end_it(ready: Ready) -> None:
    for steps, again in ((20, 2), (3, 0)):
        for _ in range(steps):
            launches(ready.step, ready.work.batch)
        with torch.no_grad():
            ready.step.loss(ready.work.batch)
        assert launches(ready.step, ready.work.batch) == again


class Averaging(nn.Module):
    """Keeps an average that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3, 16)
        self.average = torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean(0))
        return self.layers(x + self.average)


def test_tensors_that_the_step_writes_to_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedRunner, "recorder", PretendRecorder)
    torch.manual_seed(0)
    model = Averaging()
    twin = copy.deepcopy(model)
    work = Workload(model, squares, torch.randn(64, 16))
    with apply(recorded(smallest_plan(work)), work) as step:
        for number in range(5):
            batch = torch.randn(64, 16)
            squares(twin, batch)
            assert launches(step, batch) == (2 if number else 0)
            assert torch.equal(model.average, twin.average)


def test_a_batch_of_another_shape_frees_the_recording(ready: Ready) -> None:
    for _ in range(20):
        launches(ready.step, ready.work.batch)
    assert not launches(ready.step, ready.work.batch[:32])
    assert launches(ready.step, ready.work.batch) == 2


def test_a_plan_says_that_it_is_recorded(unapplied: tuple[Plan, Workload]) -> None:
    chosen, _ = unapplied
    assert "recorded as CUDA graphs" in str(chosen)
    assert Plan.from_json(chosen.to_json()) == chosen


def test_verify_compares_what_is_launched(unapplied: tuple[Plan, Workload], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedRunner, "recorder", PretendRecorder)
    chosen, work = unapplied
    before = PretendRecorder.launches
    assert lowtide.verify(work, chosen).results_agree
    assert PretendRecorder.launches - before >= 2 * 2  # of the second step before, and of the one that is compared

    class Wrong(PretendRecorder):
        def record(self, code: Callable[[list[Any]], Any], arguments: list[Any]) -> tuple[Callable[[], None], Any]:
            return lambda: None, super().record(code, arguments)[1]

    monkeypatch.setattr(RecordedRunner, "recorder", Wrong)
    assert not lowtide.verify(work, chosen).results_agree


def test_what_cannot_be_recorded_runs_as_it_is(
    unapplied: tuple[Plan, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, work = unapplied
    monkeypatch.setattr(RecordedRunner, "recorder", type("Never", (PretendRecorder,), {"takes": lambda _: False}))
    with apply(chosen, work) as step:
        step.loss(work.batch).backward()
        with warned("inputs on the host"):
            step.loss(work.batch).backward()
        assert not launches(step, work.batch)


# -- on a GPU --------------------------------------------------------------------------------------------


_POOL = 2**27  # beside the plan's bytes: cuBLAS takes 32 MiB of it, and blocks have 20


def compiled(work: Workload) -> Plan:
    """The smallest plan, with room for a recording's pool: on small models, most bytes are cuBLAS's."""
    plain = lowtide.profile(work)
    ways: dict[str, Any] = {"profile": plain, "engine": "graph", "compile": True, "forbid": IN_BACKWARD, "tune": False}
    with pytest.raises(BudgetError) as refused:
        lowtide.plan(work, 1, **ways)
    assert refused.value.smallest_bytes is not None
    chosen = lowtide.plan(work, refused.value.smallest_bytes, **ways)
    return replace(chosen, budget_bytes=chosen.budget_bytes + _POOL)


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[tuple[Ready, Ready]]:
    """A step that is launched as CUDA graphs, and a twin whose program runs as it is."""
    steps: list[Ready] = []
    for is_recorded in (True, False):
        torch.manual_seed(0)
        work = zoo.small("gpt2", device="cuda", batch=16)
        chosen = compiled(work)
        chosen = recorded(chosen) if is_recorded else chosen
        steps.append(Ready(apply(chosen, work), work, copy.deepcopy(work.model.state_dict())))
    yield steps[0], steps[1]
    for each in steps:
        each.step.undo()


def losses(ready: Ready, steps: int) -> list[Tensor]:
    ready.work.model.load_state_dict(ready.start)
    torch.cuda.manual_seed(3)
    return [ready.step(ready.work.batch) for _ in range(steps)]


def gradients(ready: Ready, micro: int = 1) -> list[Tensor]:
    ready.work.model.load_state_dict(ready.start)
    ready.work.model.zero_grad()
    torch.cuda.manual_seed(4)
    for _ in range(micro):
        (ready.step.loss(ready.work.batch) / micro).backward()
    left = [p.grad.clone() for p in ready.work.model.parameters() if p.grad is not None]
    ready.work.model.zero_grad()
    return left


def assert_close(left: list[list[Tensor]]) -> None:
    """The kernels of both were compiled alone, and gradients of an embedding are sums in any order."""
    for mine, other in zip(*left, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()


@pytest.mark.gpu
def test_a_recorded_step_is_that_of_its_program(on_gpu: tuple[Ready, Ready]) -> None:
    recorded, plain = [losses(each, 6) for each in on_gpu]
    assert pooled_bytes(torch.device("cuda")) > 0
    assert_close([recorded, plain])
    assert len(set(map(float, recorded))) == 6
    for micro in (1, 3):
        assert_close([gradients(each, micro) for each in on_gpu])


@pytest.mark.gpu
def test_an_evaluation_frees_the_recordings_memory(on_gpu: tuple[Ready, Ready]) -> None:
    ready, _ = on_gpu
    losses(ready, 30)
    ready.work.model.zero_grad()
    with torch.no_grad():
        ready.step.loss(ready.work.batch)
    gc.collect()
    assert pooled_bytes(torch.device("cuda")) == 0
    assert_close([gradients(each) for each in on_gpu])
    assert pooled_bytes(torch.device("cuda")) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "resnet18"])
def test_a_recorded_plan_keeps_its_promise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    work = zoo.small(name, device="cuda", batch=256)
    verification = lowtide.verify(work, recorded(compiled(work)))
    assert verification.ok, str(verification)
