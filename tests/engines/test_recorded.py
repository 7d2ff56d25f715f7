"""Programs recorded as CUDA graphs: the bits and promises of the program, whatever the loop does.

Without a GPU, a pretended recorder runs what it recorded again.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from lowtide import Workload, apply, zoo
from lowtide.engines import Step
from lowtide.engines.recorded import RecordedRunner, _OwnInputs, needs_host
from lowtide.errors import BudgetError
from lowtide.planning import Plan
from lowtide.planning.programs.program import simulate
from lowtide.tracing.meter import pooled_bytes
from tests.models import Call, layers, squares

from ..refusals import warned
from .planned import IN_BACKWARD, Loss, Ready, awkward, smallest_plan
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


def recorded(chosen: Plan) -> Plan:
    assert chosen.program is not None
    return replace(chosen, program=replace(chosen.program, is_recorded=True))


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


@pytest.mark.parametrize(
    ("loss", "is_needed"),
    [
        (lambda m, x: (m(x) * 2).sum(), False),
        (lambda m, x: (m(x) * torch.tensor(0.5, device="cpu")).sum(), False),  # a constant
        (lambda m, x: (m(x) * torch.rand((), device="cpu")).sum(), True),
        (lambda m, x: (m(x) + torch.arange(2.0, device="cpu").to(x.device)).sum(), True),
        (lambda m, x: m(x).cpu().sum(), True),
    ],
    ids=["device", "constant", "random", "copy", "result"],
)
def test_what_the_host_computes_is_not_recorded(loss: Any, is_needed: bool) -> None:
    model = nn.Linear(2, 2, device="meta")  # in place of a GPU
    batch = torch.empty(3, 2, device="meta")
    graph = make_fx(lambda w, b, x: loss(lambda x: F.linear(x, w, b), x), tracing_mode="fake")(
        model.weight, model.bias, batch
    )
    joint: Any = SimpleNamespace(module=graph)
    assert needs_host(joint, "meta") == is_needed


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
