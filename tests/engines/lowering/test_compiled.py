"""The ``compiled`` lowering: the plain step's results, each distinct region once, and nothing held longer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import lowtide
from lowtide import Workload
from lowtide.engines.lowering import compiled
from lowtide.engines.lowering.compiled import CompiledLowering, SeededLowering
from lowtide.engines.lowering.graph_code import boxed
from lowtide.planning.solvers.solver import SOLVERS
from lowtide.techniques.technique import Fidelity
from tests.models import squares

from ...planning.held import offloading
from ..counting import results
from ..lowered import LoweredStep, convolutions, dropping, interpreted, language_model

WORKS = {"GPT-2": language_model, "convolutions": convolutions}


@pytest.fixture(scope="module", params=WORKS)
def plain(request: pytest.FixtureRequest) -> LoweredStep:
    """A step without random numbers."""
    return LoweredStep(WORKS[request.param]())


@pytest.fixture(scope="module")
def random() -> LoweredStep:
    return LoweredStep(language_model(dropout=0.2))


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compile_graph", interpreted)


# -- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["everything", "smallest"])
@pytest.mark.usefixtures("no_inductor")
def test_regions_give_the_plain_steps_results(which: str, plain: LoweredStep) -> None:
    torch.testing.assert_close(plain.results(plain.programs[which], CompiledLowering()), plain.plain())


def test_compiled_code_gives_the_plain_steps_results() -> None:
    step = LoweredStep(convolutions(blocks=1, depth=1))
    torch.testing.assert_close(step.results(step.programs["smallest"], CompiledLowering()), step.plain())


def test_compiled_code_draws_the_masks_of_the_same_program_run_op_by_op() -> None:
    random = LoweredStep(language_model(dropout=0.2, layers=1))
    program = random.programs["smallest"]
    expected = random.results(program)
    torch.testing.assert_close(random.results(program, CompiledLowering()), expected)
    assert not torch.allclose(expected[0], random.plain()[0], rtol=1e-4)  # whose masks are others


@pytest.mark.usefixtures("no_inductor")
def test_programs_of_one_graph_draw_the_same_masks(random: LoweredStep) -> None:
    expected = random.results(random.programs["everything"])
    for program in random.programs.values():
        for lowering in (SeededLowering(), CompiledLowering()):
            torch.testing.assert_close(random.results(program, lowering), expected)


def test_masks_are_the_same_wherever_a_program_reads_them() -> None:
    """For fixed masks the step is linear in its input: the sum of its results is the input times its gradient."""
    work = dropping()
    step = LoweredStep(work)
    assert {each.solver for each in step.solutions} == set(SOLVERS) - {"blocks"}  # they are too small
    for solution in step.solutions:
        work.batch.grad = None
        value = results(work, step.loss(solution.program, SeededLowering()))[0]
        torch.testing.assert_close(
            (work.batch * work.batch.grad).sum(), value, msg=lambda text, s=solution: f"{s}: {text}"
        )


def test_each_step_draws_other_masks(random: LoweredStep) -> None:
    loss = random.loss(random.programs["smallest"], SeededLowering())
    assert loss(random.work.batch).item() != loss(random.work.batch).item()


# -- code ------------------------------------------------------------------------------------------------


def test_equal_blocks_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def compilations(layers: int) -> int:
        calls: list[fx.GraphModule] = []
        step = LoweredStep(language_model(dropout=0.2, layers=layers))
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "compile_graph", lambda module, _: calls.append(module) or boxed(module))
            CompiledLowering().lower(step.joint, step.programs["everything"])
        return len(calls)

    assert compilations(3) == compilations(4)


def test_fit_compiles_each_region_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(compiled, "decompose", lambda module, *_: calls.append(str(module.graph)) or module)
    monkeypatch.setattr(compiled, "compile_graph", interpreted)
    work = convolutions()
    step = lowtide.fit(work.model, work.loss, work.batch, budget="80%", engine="graph", compile=True)
    with step:
        assert step.plan.program is not None
        assert step.plan.program.lowering == "compiled"
        step(work.batch)
    assert len(calls) == len(set(calls)) > 1


def test_ops_of_lowtide_and_draws_are_not_given_to_inductor(
    random: LoweredStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: set[str] = set()

    def collect(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        targets.update(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return interpreted(module, inputs)

    monkeypatch.setattr(compiled, "compile_graph", collect)
    monkeypatch.setattr(random.joint, "compiled", {})
    CompiledLowering().lower(random.joint, random.programs["smallest"])
    assert targets
    assert not {each for each in targets if "lowtide" in each or "rand" in each or "native_dropout" in each}


def test_gradients_of_max_pools_are_not_scattered_into_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    targets: set[str] = set()

    def collect(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        targets.update(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return interpreted(module, inputs)

    monkeypatch.setattr(compiled, "compile_graph", collect)
    pooled = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, 1), nn.Tanh())
    step = LoweredStep(Workload(pooled, squares, torch.randn(2, 3, 9, 9)))
    torch.testing.assert_close(step.results(step.programs["smallest"], CompiledLowering()), step.plain())
    assert "aten.max_pool2d_with_indices_backward.default" in targets
    assert not {each for each in targets if "scatter" in each}


def test_values_are_freed_after_their_last_reader(random: LoweredStep, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    monkeypatch.setattr(compiled, "compile_graph", lambda module, _: watch.watched(boxed(module)))
    monkeypatch.setattr(compiled, "boxed", lambda module, **_: watch.watched(boxed(module)))
    monkeypatch.setattr(random.joint, "compiled", {})
    loss = random.loss(random.programs["smallest"], CompiledLowering())
    random.work.model.zero_grad()
    value = loss(random.work.batch)
    value.backward()
    at_the_end = set(watch.alive())  # loss and gradients
    del value
    assert len(watch.reads) > 5
    assert len(at_the_end) < len(watch.storages)
    for call, alive in enumerate(watch.after):
        read_later = {storage for reads in watch.reads[call + 1 :] for storage in reads}
        assert alive <= read_later | at_the_end, call


class Watch:
    """Which results of regions each region reads, and which are alive when it has run."""

    def __init__(self) -> None:
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self.reads: list[set[int]] = []
        self.after: list[set[int]] = []

    def alive(self) -> Iterator[int]:
        return (number for number, storage in enumerate(self.storages) if storage() is not None)

    def watched(self, code: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
        def run(arguments: list[Any]) -> Sequence[Any]:
            self.reads.append(set(self._numbers(arguments)))
            outcome = code(arguments)
            assert arguments == []
            self.after.append(set(self.alive()))
            new = [each for each in outcome if isinstance(each, Tensor) and not [*self._numbers([each])]]
            self.storages += [weakref.ref(each.untyped_storage()) for each in new]
            return outcome

        return run

    def _numbers(self, values: Sequence[Any]) -> Iterator[int]:
        """Numbers of the storages of values that a region made."""
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                yield from (n for n, each in enumerate(self.storages) if each() is storage)


# -- the contract of a lowering --------------------------------------------------------------------------


def test_programs_that_copy_to_the_host_are_left_to_other_lowerings(plain: LoweredStep) -> None:
    assert CompiledLowering().can_run(plain.joint, plain.programs["everything"])
    assert not CompiledLowering().can_run(plain.joint, offloading(plain.joint))


def test_the_plain_steps_graph_stays_as_it_is_beside_its_compiled_form(random: LoweredStep) -> None:
    captured = random.capture.graph.joint
    assert random.joint is not captured
    assert SeededLowering().form(captured) is CompiledLowering().form(captured) is random.joint
    assert [node.name for node in random.joint.primals] == [node.name for node in captured.primals]
    assert len(random.joint.outputs) == len(captured.outputs)
    assert not any("lowtide" in str(node.target) for node in captured.module.graph.nodes)


def test_compiled_programs_promise_no_bits(plain: LoweredStep) -> None:
    solution = plain.solutions[0]
    for fidelity in (Fidelity.BITWISE, Fidelity.APPROXIMATE):
        price = CompiledLowering().price(plain.problem, solution, fidelity)
        assert price.fidelity is max(fidelity, Fidelity.ROUNDOFF)
