"""Programs recorded as CUDA graphs: the bits and promises of the program, whatever the loop does.

Without a GPU, a pretended recorder runs what it recorded again.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload, apply
from lowtide.engines import Step
from lowtide.engines.recorded import RecordedRunner, _OwnInputs
from lowtide.planning import Plan
from lowtide.planning.programs.program import simulate
from tests.models import Call, layers, squares

from ..refusals import warned
from .planned import Loss, Ready, awkward, recorded, smallest_plan
from .pretend import PretendRecorder
from .test_autograd import (  # the same loops, recorded
    test_a_gradient_scaler_leaves_an_overflow_out,
    test_a_parameter_written_to_before_backward_is_autograds_error,
    test_an_optimizer_that_steps_in_backward_steps_as_in_plain_pytorch,
    test_clipping_and_a_scheduler,
    test_gradients_accumulate_over_microbatches,
    test_hooks_of_parameters_see_and_change_gradients,
    test_only_what_is_trained_has_gradients,
    test_two_losses_go_backward_together,
)

__all__ = [
    "test_a_gradient_scaler_leaves_an_overflow_out",
    "test_a_parameter_written_to_before_backward_is_autograds_error",
    "test_an_optimizer_that_steps_in_backward_steps_as_in_plain_pytorch",
    "test_clipping_and_a_scheduler",
    "test_gradients_accumulate_over_microbatches",
    "test_hooks_of_parameters_see_and_change_gradients",
    "test_only_what_is_trained_has_gradients",
    "test_two_losses_go_backward_together",
]


# The budget is near the smallest, so gradients that accumulate are warned about.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients of .* exist before the step")


@pytest.fixture(scope="module")
def unapplied() -> tuple[Plan, Workload]:
    work = awkward()
    return recorded(smallest_plan(work, share=1 / 8)), work


@pytest.fixture
def ready(
    unapplied: tuple[Plan, Workload], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Ready]:
    """A step that was recorded, and of which each test launches some."""
    monkeypatch.setattr(RecordedRunner, "recorder", PretendRecorder)
    chosen, work = unapplied
    start = copy.deepcopy(work.model.state_dict())
    with apply(chosen, work) as step:
        assert [launches(step, work.batch) for _ in range(2)] == [0, 2]
        work.model.zero_grad()
        before = PretendRecorder.launches
        yield Ready(step, work, start)
        if request.node.originalname in __all__:
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


def test_a_view_of_a_gradient_is_not_overwritten(ready: Ready) -> None:
    parameter = next(p for p in ready.work.model.parameters() if p.requires_grad)
    launches(ready.step, ready.work.batch)
    assert parameter.grad is not None
    view, values = parameter.grad.view(-1), parameter.grad.clone().view(-1)
    with warned("no longer launched", "still in use"):
        ready.step.loss(ready.work.batch)
    assert torch.equal(view, values)


def test_two_losses_a_step_go_on(ready: Ready) -> None:
    for _ in range(10):
        (ready.step.loss(ready.work.batch) + ready.step.loss(ready.work.batch)).backward()
        assert launches(ready.step, ready.work.batch) == 2


def test_a_loss_that_is_held_does_not_hold_the_recording(ready: Ready) -> None:
    together: Any = ready.step.work.loss
    (runner,) = together._recorded._runners
    left = weakref.ref(runner._recording)
    loss = ready.step.loss(ready.work.batch)
    loss.backward()
    runner.pause()
    gc.collect()
    assert left() is None
    assert loss.grad_fn is not None


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


def test_an_evaluation_frees_the_recording_and_leaves_gradients(ready: Ready) -> None:
    parameter = next(p for p in ready.work.model.parameters() if p.requires_grad)
    for _ in range(25):
        launches(ready.step, ready.work.batch)
        assert parameter.grad is not None
    before, values = parameter.grad.data_ptr(), parameter.grad.clone()
    view = parameter.grad.view(-1)
    with torch.no_grad():
        ready.step.loss(ready.work.batch)
    assert parameter.grad.data_ptr() != before  # or it would hold the pool
    assert torch.equal(parameter.grad, values)
    assert torch.equal(view, values.view(-1))
    assert launches(ready.step, ready.work.batch) == 2


def test_evaluations_after_few_steps_end_the_recording(ready: Ready) -> None:
    for _ in range(3):
        launches(ready.step, ready.work.batch)
        with torch.no_grad():
            ready.step.loss(ready.work.batch)
        if launches(ready.step, ready.work.batch) == 2:
            break
    with warned("no longer launched", "something else ran the model"), torch.no_grad():
        ready.step.loss(ready.work.batch)
    assert not launches(ready.step, ready.work.batch)


def test_losses_that_are_kept_without_backward_end_the_recording(ready: Ready) -> None:
    kept = [ready.step.loss(ready.work.batch) for _ in range(8)]
    with warned("an earlier loss is kept"):
        kept.append(ready.step.loss(ready.work.batch))
    kept[0].backward()  # its saved values are there
    assert not launches(ready.step, ready.work.batch)


def test_a_step_without_backward_is_not_the_first(
    unapplied: tuple[Plan, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedRunner, "recorder", PretendRecorder)
    chosen, work = unapplied
    with apply(chosen, work) as step:
        for _ in range(3):
            step.loss(work.batch)
        assert [launches(step, work.batch) for _ in range(2)] == [0, 2]


def test_parameters_that_move_before_backward_are_noticed(ready: Ready) -> None:
    loss = ready.step.loss(ready.work.batch)
    for parameter in ready.work.model.parameters():
        parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match="another address"):
        loss.backward()


@pytest.mark.parametrize(
    "batch", [torch.randn(64, 33)[:, 1:17], torch.randn(64, 1).expand(64, 16)], ids=["slice", "row"]
)
def test_strides_of_a_batch_are_kept(batch: Tensor, ready: Ready) -> None:
    inputs = _OwnInputs([batch], [], set())
    (own,) = inputs.tensors
    assert own.stride() == batch.stride()
    assert torch.equal(own, batch)

    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        for _ in range(3):
            model.zero_grad()
            loss(batch).backward()
        return []

    with warned("planned anew") as caught:  # for other ops
        ready.compare(loop)
    assert not any("no longer launched" in str(each.message) for each in caught)


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
            version = model.average._version
            assert launches(step, batch) == (2 if number else 0)
            assert torch.equal(model.average, twin.average)
            assert model.average._version > version  # which autograd compares


def test_a_batch_of_another_shape_frees_the_recording(ready: Ready) -> None:
    for _ in range(20):
        launches(ready.step, ready.work.batch)
    assert not launches(ready.step, ready.work.batch[:32])
    assert launches(ready.step, ready.work.batch) == 2


def test_gradients_of_one_memory_are_given_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedRunner, "recorder", PretendRecorder)

    def add(m: Any, x: Tensor) -> Tensor:
        return m.inner(x + m.first + m.second)

    model = Call(
        add, inner=layers(3, 16), first=nn.Parameter(torch.randn(64, 16)), second=nn.Parameter(torch.randn(64, 16))
    )
    work = Workload(model, squares, torch.randn(64, 16))
    with apply(recorded(smallest_plan(work)), work) as step:
        for number in range(3):
            assert launches(step, work.batch) == (2 if number else 0)
            gradients = [p.grad for p in (model.first, model.second)]
            assert torch.equal(*gradients)
            assert gradients[0].data_ptr() != gradients[1].data_ptr()


def test_one_of_several_captures_has_a_recording(ready: Ready) -> None:
    model = ready.work.model
    for mode in (True, False):
        model.train(mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # evaluation with gradients is planned anew
            counts = [launches(ready.step, ready.work.batch) for _ in range(3)]
        assert counts[-1] == 2
    model.train()
    together: Any = ready.step.work.loss
    runners = list(together._recorded._runners)
    assert len(runners) == 2
    assert sum(each._recording is not None for each in runners) == 1


@pytest.mark.parametrize(
    ("pools", "best", "tries"),
    [
        ([1020], 0, 1),  # 2% more than what it holds, in the block of the program's size
        ([2000, 1020], 1, 2),
        ([2000, 1100, 1050, 1060, 1070], 2, 5),
        ([2000, 3000, 3000, 3000, 1900], 4, 5),
        ([1500, torch.OutOfMemoryError(), 1030, 1040, torch.OutOfMemoryError()], 2, 5),
    ],
)
def test_the_pool_starts_with_the_block_that_makes_it_smallest(
    pools: list[Any], best: int, tries: int, unapplied: tuple[Plan, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[int] = []

    class Sized(PretendRecorder):
        def finish(self) -> tuple[int, int]:
            blocks.append(self._block_bytes)
            pool = pools[blocks.index(self._block_bytes)]
            if isinstance(pool, Exception):
                raise pool
            return pool, 1000

    monkeypatch.setattr(RecordedRunner, "recorder", Sized)
    chosen, work = unapplied
    assert chosen.program is not None
    sizes = [simulate(chosen.program.instructions).peak_bytes, 1000, 1030, 1060, 0]
    with apply(chosen, work) as step:
        assert [launches(step, work.batch) for _ in range(2)] == [0, 2]
        assert blocks == [*sizes[:tries], *([sizes[best]] if best < tries - 1 or pools[-1] != pools[best] else [])]
        for parameter in work.model.parameters():
            parameter.data = parameter.data.clone()
        assert launches(step, work.batch) == 2
        assert blocks[-1] == sizes[best]


@pytest.mark.parametrize("number", [1, 2])
def test_a_recording_that_fails_leaves_the_step_as_it_was(
    number: int, unapplied: tuple[Plan, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(PretendRecorder):
        def record(self, code: Callable[[list[Any]], Any], arguments: list[Any]) -> tuple[Callable[[], None], Any]:
            calls.append(1)
            if len(calls) == number:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(code, arguments)

    calls: list[int] = []
    monkeypatch.setattr(RecordedRunner, "recorder", Failing)
    chosen, work = unapplied
    start = copy.deepcopy(work.model.state_dict())
    with apply(chosen, work) as step:
        step.loss(work.batch).backward()
        with warned("no longer launched", "not permitted"):
            step.loss(work.batch).backward()
        work.model.load_state_dict(start)
        assert not launches(step, work.batch)
        Ready(step, work, start).compare(lambda loss, _: [loss(work.batch).detach()])


def test_a_planned_batch_after_others_is_recorded_too(
    unapplied: tuple[Plan, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedRunner, "recorder", PretendRecorder)
    chosen, work = unapplied
    with apply(chosen, work) as step:
        for rows in (48, 32, 40):
            assert not launches(step, work.batch[:rows])
        assert [launches(step, work.batch) for _ in range(2)] == [0, 2]
        Ready(step, work, copy.deepcopy(work.model.state_dict())).compare(lambda loss, _: [loss(work.batch).detach()])


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
    monkeypatch.setattr(RecordedRunner, "recorder", type("Never", (PretendRecorder,), {"device_type": "cuda"}))
    with apply(chosen, work) as step:
        step.loss(work.batch).backward()
        with warned("on the host"):
            step.loss(work.batch).backward()
        assert not launches(step, work.batch)
