"""The fastest program over a joint graph whose storages fit a budget."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, fx

from lowtide.chains import Optimal, keep_all
from lowtide.chains import simulate as simulate_chain
from lowtide.errors import BudgetError
from lowtide.planning.program import Program, program_of, simulate
from lowtide.planning.stages import Stages
from lowtide.profiling.devices import find_device
from lowtide.profiling.roofline import op_seconds
from lowtide.sizes import format_size
from lowtide.tracing.graph import Op, Value
from lowtide.tracing.joint import Joint, is_item

_CLOSE = 0.005  # of what a chain may take: how near the search goes to the largest that fits


def fastest_program(joint: Joint, budget_bytes: int, *, device: str = "cpu") -> Program:
    """The program whose simulated peak, above parameters, inputs and gradients at rest, is at most ``budget_bytes``.

    A chain counts what its stages keep; a program counts all that lives. So the chain gets as much as leaves the
    program within the budget, found by halving. Raises ``BudgetError`` with the smallest budget.
    """
    stages = Stages(joint)
    chain = stages.chain(node_seconds(joint, device))
    whole = program_of(stages, keep_all(chain))
    if simulate(whole).peak_bytes <= budget_bytes:
        return whole
    plans = Optimal(chain)
    low, high = plans.smallest_bytes, simulate_chain(chain, keep_all(chain)).peak_bytes
    best = program_of(stages, plans.schedule(low))
    smallest = simulate(best).peak_bytes
    if smallest > budget_bytes:
        raise BudgetError(
            f"{format_size(budget_bytes)} is below the smallest program of these {len(stages)} stages "
            f"({format_size(smallest)}, {smallest} bytes)"
        )
    while high - low > _CLOSE * high:
        middle = (low + high) // 2
        program = program_of(stages, plans.schedule(middle))
        if simulate(program).peak_bytes <= budget_bytes:
            low, best = middle, program
        else:
            high = middle
    return best


def node_seconds(joint: Joint, device: str) -> Callable[[fx.Node], float]:
    """What each op takes by the roofline of a device; views and taking one of several results take nothing."""
    described = find_device(device)

    def seconds(node: fx.Node) -> float:
        if is_item(node) or joint.storages[node] is not node:
            return 0.0
        return op_seconds(_op(node), described)

    return seconds


def _op(node: fx.Node) -> Op:
    read = [value.meta.get("val") for value in node.all_input_nodes]
    given = node.meta.get("val")
    inputs, outputs = (
        tuple(_value(value) for value in values if isinstance(value, Tensor))
        for values in (read, given if isinstance(given, (tuple, list)) else [given])
    )
    return Op(0, str(node.target), "forward", "", "", inputs, outputs, "", False, math.nan, 0)


def _value(tensor: Tensor) -> Value:
    return Value(0, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))
