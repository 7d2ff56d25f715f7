"""Codes in place of inputs of activations: where they may be, exact gates, and stated bounds for curves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import graph
from lowtide.errors import PlanError
from lowtide.planning.programs.codes import codes_of
from lowtide.planning.programs.program import Kind, Program, check_program, simulate
from lowtide.planning.programs.transfer import transferred
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import capture_joint
from tests.models import InTurn, squares

from ...engines.counting import assert_equal, executed_peak, plain_results, results
from ..held import coded_solutions

Function = Callable[[Tensor], Tensor]
GATES: dict[str, Function] = {
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "threshold": lambda x: F.threshold(x, 0.3, 0.1),
    "negative slope": lambda x: F.leaky_relu(x, -0.2),
    "hardtanh": lambda x: F.hardtanh(x, -0.2, 0.4),
}
CURVES: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "softplus": F.softplus,
}


def step(activation: Function, rows: int = 100) -> Workload:
    """Activations whose saved tensors nobody else reads in backward."""
    torch.manual_seed(0)
    model = InTurn(*(nn.Linear(32, 32) for _ in range(3)), each=lambda linear, x: x + activation(linear(x)))
    return Workload(model, squares, torch.randn(rows, 32))


class Coding:
    """Plans the program with codes that has the smallest peak, and shows it."""

    def __call__(self, joint: Joint) -> Program:
        solutions = coded_solutions(joint)
        self.solution = max(solutions, key=lambda each: (encoded(each.program), -each.estimate_bytes))
        check_program(self.solution.program)
        return self.solution.program


def encoded(program: Program) -> int:
    return sum(each.kind is Kind.ENCODE for each in program.forward)


@pytest.mark.parametrize("name", GATES)
def test_gates_keep_the_plain_steps_bits_in_the_simulated_bytes(name: str) -> None:
    work, planner = step(GATES[name]), Coding()
    loss = graph.planned_loss(work, planner)
    expected = plain_results(work)
    assert_equal(results(work, loss), expected)
    assert encoded(planner.solution.program) > 1
    assert planner.solution.bound == 0
    assert executed_peak(work, loss) == simulate(planner.solution.program).peak_bytes


@pytest.mark.parametrize("name", CURVES)
def test_gradients_of_curves_err_within_the_stated_bound(name: str) -> None:
    work, planner = step(CURVES[name]), Coding()
    loss = graph.planned_loss(work, planner)
    (plain_loss, *plain), (coded_loss, *coded) = plain_results(work), results(work, loss)
    assert torch.equal(coded_loss, plain_loss)
    assert torch.equal(coded.pop(), plain.pop())  # the generator
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(coded, plain, strict=True)]
    assert 0 < max(errors) <= planner.solution.bound < 0.6
    assert encoded(planner.solution.program) > 1
    assert executed_peak(work, loss) == simulate(planner.solution.program).peak_bytes


def test_values_that_backward_reads_otherwise_have_no_codes() -> None:
    both = Workload(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), squares, torch.randn(64, 32))
    assert not codes_of(capture_joint(both))  # the second layer's gradient reads what ReLU gives
    assert len(codes_of(capture_joint(step(F.relu)))) == 3
    assert not codes_of(capture_joint(step(torch.tanh)))


def test_codes_are_transferred_to_a_smaller_batch() -> None:
    program = Coding()(capture_joint(step(F.gelu)))
    joint = capture_joint(step(F.gelu, rows=50))
    smaller = transferred(program, joint)
    assert smaller is not None
    check_program(smaller)
    codes = [each.value for each in smaller.forward if each.kind is Kind.ENCODE]
    assert [smaller.bytes[value] for value in codes] == [50 * 32 * 3 // 8] * len(codes)
    work = step(F.gelu, rows=50)
    assert executed_peak(work, graph.planned_loss(work, lambda _: smaller)) == simulate(smaller).peak_bytes


def test_programs_whose_ops_read_codes_as_values_are_refused(programs: list[Program]) -> None:
    program = programs[3]
    for kind in (Kind.ENCODE, Kind.DECODE):
        wrong = [replace(each, kind=Kind.COMPUTE) if each.kind is kind else each for each in program.forward]
        backward = [replace(each, kind=Kind.COMPUTE) if each.kind is kind else each for each in program.backward]
        with pytest.raises(PlanError):
            check_program(replace(program, forward=tuple(wrong), backward=tuple(backward)))
