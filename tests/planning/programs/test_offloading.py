"""Copies beside ops: when they are done, and what waits for them."""

from __future__ import annotations

import pytest

from lowtide import zoo
from lowtide.planning.programs.offloading import HostLink, host_bytes, stalls
from lowtide.planning.programs.program import Cost, Instruction, Kind, Program, Role, Value, check_program
from lowtide.profiling.devices import find_device
from lowtide.tracing.capture.joint import bytes_of
from lowtide.tracing.capture.loss import capture_joint

from ...soak import in_soak
from ..held import LINK, solutions

LINE = HostLink(bandwidth=1.0, latency=0.0, budget_bytes=100)
A, B, C, D, BACK = Value("a"), Value("b"), Value("c"), Value("d"), Value("a", run=1)
HOST = Value("a", role=Role.HOST)


def program(*, free_at: int, fetch_at: int) -> Program:
    """Ops of a second each: a, b and c, then d, which reads a again. A copy takes as many seconds as a has bytes."""
    forward = [Instruction(Kind.COMPUTE, A), Instruction(Kind.OFFLOAD, HOST, (A,))]
    forward += [Instruction(Kind.COMPUTE, B, (A,)), Instruction(Kind.COMPUTE, C, (B,))]
    forward.insert(free_at, Instruction(Kind.FREE, A))
    backward = [Instruction(Kind.COMPUTE, Value(f"g{number}"), (C,)) for number in range(4)]
    backward.insert(fetch_at, Instruction(Kind.FETCH, BACK, (HOST,)))
    backward.append(Instruction(Kind.COMPUTE, D, (BACK,)))
    return Program(tuple(forward), tuple(backward), (C, HOST), (), {}, {A: 3, HOST: 3, BACK: 3})


def waits(made: Program) -> dict[str, float]:
    """Seconds of waits, by instruction."""
    check_program(made)
    ops = (Kind.COMPUTE, Kind.RECOMPUTE)
    waited = stalls(made, lambda each: Cost(1.0 if each.kind in ops else 0.0), LINE)
    return {str(each): wait for each, wait in zip((*made.forward, *made.backward), waited, strict=True) if wait}


@pytest.mark.parametrize(("free_at", "wait"), [(3, 2.0), (4, 1.0)])
def test_freeing_waits_for_the_copy_to_the_host(free_at: int, wait: float) -> None:
    assert waits(program(free_at=free_at, fetch_at=0)) == {"free      a": wait}


@pytest.mark.parametrize(("fetch_at", "wait"), [(1, 0.0), (2, 1.0), (4, 3.0)])
def test_the_first_reader_waits_for_the_fetch(fetch_at: int, wait: float) -> None:
    made = waits(program(free_at=4, fetch_at=fetch_at))
    assert made == {"free      a": 1.0, **({"compute   d from a (run 2)": wait} if wait else {})}


def test_copies_of_one_way_follow_each_other() -> None:
    made = program(free_at=4, fetch_at=0)
    twice = Value("a", run=2)
    more = (Instruction(Kind.FETCH, twice, (HOST,)), Instruction(Kind.COMPUTE, Value("e"), (twice,)))
    backward = (*made.backward[:-1], *more)
    longer = Program(made.forward, backward, made.kept, (), {}, {**made.bytes, twice: 3})
    assert waits(longer) == {"free      a": 1.0, "compute   e from a (run 3)": 3.0}
    both = Program(made.forward, (more[0], *made.backward, more[1]), made.kept, (), {}, longer.bytes)
    assert waits(both)["compute   d from a (run 2)"] == 2.0  # two copies of 3 seconds, beside four ops


@pytest.mark.parametrize("name", ["lenet", "gpt2", *in_soak(["unet"])])
def test_the_solvers_seconds_are_those_of_its_programs(name: str) -> None:
    joint = capture_joint(zoo.small(name))

    def cost(each: Instruction) -> Cost:
        node = joint.nodes[each.value.op]
        runs = each.kind in (Kind.COMPUTE, Kind.RECOMPUTE) and not each.value.is_state
        is_kernel = runs and joint.storages[node] is node and node.target.__name__ != "getitem"
        return Cost(1.0 + bytes_of(node) if is_kernel else 0.0)

    offloading = [solution for solution in solutions(joint) if solution.host_bytes]
    assert offloading
    for solution in offloading:
        again = (each for each in solution.program.backward if each.kind is Kind.RECOMPUTE)
        seconds = sum(cost(each).seconds for each in again) + sum(stalls(solution.program, cost, LINK))
        assert solution.seconds == pytest.approx(seconds, rel=0.01)


def test_a_links_figures_are_its_devices() -> None:
    link = HostLink.of(find_device("h200"))
    assert link.seconds(55 * 10**9) == pytest.approx(1.0, rel=1e-3)
    assert link.budget_bytes == host_bytes() > 2**28
