"""Results that wait on the host: the same bits, and the bytes that the simulator says, on either side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowtide import Workload, zoo
from lowtide.chains import keep_all, sqrt
from lowtide.engines.graph import planned_loss
from lowtide.errors import PlanError
from lowtide.planning.programs.chain_order import program_of
from lowtide.planning.programs.offloading import with_offloaded
from lowtide.planning.programs.program import Kind, Program, Value, simulate
from lowtide.planning.programs.stages import Stages
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import capture_joint
from tests.engines.counting import executed_peak, results
from tests.refusals import refused
from tests.soak import in_soak

RULES = {"all": keep_all, "sqrt": sqrt}


def own_results(program: Program, most: int) -> list[Value]:
    """The largest kept results with storages of their own."""
    shared = [storage for cell in program.kept for storage in program.held(cell)]
    own = [c for c in program.kept if program.held(c) == (c,) and c in program.bytes and shared.count(c) == 1]
    return sorted((c for c in own if not c.is_state), key=lambda cell: -program.bytes[cell])[:most]


def planner(rule: str, made: list[Program], most: int = 8) -> Callable[[Joint], Program]:
    def plan(joint: Joint) -> Program:
        stages = Stages(joint)
        plain = program_of(stages, RULES[rule](stages.chain(lambda node: 1.0)))
        made[:] = [plain, with_offloaded(plain, own_results(plain, most))]
        return made[1]

    return plan


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["lenet", *in_soak(["gpt2", "unet"])])
def test_an_offloaded_step_gives_the_plain_steps_bits_in_the_bytes_that_were_said(name: str, rule: str) -> None:
    work, made = zoo.small(name), list[Program]()
    loss = planned_loss(work, planner(rule, made))
    expected = results(work, lambda batch: work.compute_loss(batch=batch))
    assert all(map(torch.equal, results(work, loss), expected))
    plain, offloaded = made
    moved = simulate(offloaded)
    assert moved.peak_bytes <= simulate(plain).peak_bytes
    assert rule == "sqrt" or moved.peak_bytes < simulate(plain).peak_bytes  # there segments that run again are the peak
    both = max(map(sum, zip(moved.live_bytes, moved.host_bytes, strict=True)))  # here the host's memory is the device's
    assert executed_peak(work, loss) == both


def test_the_host_holds_a_result_from_forward_to_backward() -> None:
    stages = Stages(capture_joint(zoo.small("lenet")))
    plain = program_of(stages, keep_all(stages.chain(lambda node: 1.0)))
    (cell,) = own_results(plain, 1)
    program = with_offloaded(plain, [cell])
    simulation = simulate(program)
    border = len(program.forward)
    assert max(simulation.host_bytes) == simulation.host_bytes[border - 1] == plain.bytes[cell]
    assert simulation.host_bytes[-1] == 0
    assert held_between(program) == held_between(plain) - plain.bytes[cell]
    assert simulation.live_bytes[-1] == simulate(plain).live_bytes[-1]
    kinds = [each.kind for each in (*program.forward, *program.backward)]
    assert kinds.count(Kind.OFFLOAD) == kinds.count(Kind.FETCH) == 1
    assert f"offload   {cell}.host from {cell}" in str(program)
    assert f"fetch     {cell.op} (run 2) from {cell}.host" in str(program)


def test_what_is_not_a_results_own_storage_is_refused() -> None:
    stages = Stages(capture_joint(zoo.small("gpt2")))
    program = program_of(stages, keep_all(stages.chain(lambda node: 1.0)))
    parameter = next(cell for cell in program.kept if cell.op.startswith("primals"))
    view = next(cell for cell in program.kept if program.held(cell) != (cell,) and not cell.op.startswith("primals"))
    for cell in (parameter, Value("nothing"), view):
        with refused(cell.op, kind=PlanError):
            with_offloaded(program, [cell])


@pytest.mark.gpu
def test_on_a_gpu_the_device_holds_less_between_the_passes() -> None:
    def held(work: Workload, most: int) -> int:
        loss = planned_loss(work, planner("all", [], most))
        loss(work.batch).backward()  # what is captured and what a first run allocates for good
        work.model.zero_grad()
        value = loss(work.batch)
        torch.cuda.synchronize()
        bytes = torch.cuda.memory_allocated()
        value.backward()
        return bytes

    work, made = zoo.small("unet", device="cuda", batch=16), list[Program]()
    expected = results(work, lambda batch: work.compute_loss(batch=batch))
    actual = results(work, planned_loss(work, planner("all", made)))
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-4)  # two plain steps differ too, by atomic sums
    saved = held_between(made[0]) - held_between(made[1])
    assert saved > 2**20
    assert held(work, 0) - held(work, 8) == pytest.approx(saved, rel=0.01)


def held_between(program: Program) -> int:
    return simulate(program).live_bytes[len(program.forward) - 1]
