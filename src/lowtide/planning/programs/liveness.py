"""Liveness: first and last use of each value in a fixed order, and results that may reuse an input's buffer.

Nothing here runs or allocates: sizes and positions in, lives out. ``lowtide.planning.programs.arena`` places them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from lowtide.errors import LowtideError
from lowtide.planning.programs.in_place import is_elementwise, lies_like
from lowtide.planning.programs.program import Instruction, Kind, Program, Value
from lowtide.tracing.capture.batchnorm import inputs_of
from lowtide.tracing.capture.joint import Joint, bytes_of, is_item, viewed


@dataclass(frozen=True, slots=True)
class Access:
    """One op: the values it reads, the values it makes, and inputs that its result may overwrite."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    over: tuple[int, ...] = ()


@dataclass(frozen=True)
class Order:
    """Ops in execution order. A value is one storage, made by one op, with all of its views.

    Values are numbered; ``bytes`` has the size of each. ``kept`` are those that live to the end.

    >>> mul, add, exp = Access((), (0,)), Access((0,), (1,), over=(0,)), Access((1,), (2,), over=(1,))
    >>> exp_of_a_times_b_plus_3 = Order((mul, add, exp), bytes=(4, 4, 4), kept=frozenset({2}))
    >>> peak_bytes(lives(exp_of_a_times_b_plus_3)), peak_bytes(lives_in_place(exp_of_a_times_b_plus_3))
    (8, 4)
    """

    ops: tuple[Access, ...]
    bytes: tuple[int, ...]
    kept: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        values: set[int] = set()
        for position, op in enumerate(self.ops):
            if not set(op.reads) <= values:
                raise LowtideError(f"Op {position} reads {sorted(set(op.reads) - values)}, which no op before it makes")
            if not set(op.over) <= set(op.reads):
                raise LowtideError(f"Op {position} would write over {op.over}, of which it reads {op.reads}")
            if values & set(op.makes) or len(set(op.makes)) < len(op.makes):
                raise LowtideError(f"Op {position} makes {op.makes}, of which some exist already")
            values |= set(op.makes)
        if values != set(range(len(self.bytes))):
            raise LowtideError(f"The ops make {len(values)} values, and there are {len(self.bytes)} sizes")

    def without_kept(self) -> Order:
        """The same order with zero bytes for values that stay, such as gradients."""
        return Order(self.ops, tuple(0 if v in self.kept else size for v, size in enumerate(self.bytes)), self.kept)


class Life(NamedTuple):
    """The first and the last op during which a buffer is needed, and its bytes."""

    born: int
    dies: int
    bytes: int


def lives(order: Order) -> list[Life]:
    """The life of each value: from the op that makes it to the one at which its reference counter falls to zero."""
    born, dies = [0] * len(order.bytes), [0] * len(order.bytes)
    for position, op in enumerate(order.ops):
        for value in op.makes:
            born[value] = dies[value] = position
        for value in op.reads:
            dies[value] = position
    for value in order.kept:
        dies[value] = len(order.ops) - 1
    return [Life(*life) for life in zip(born, dies, order.bytes, strict=True)]


def in_place(order: Order) -> list[int]:
    """Buffer of each value, named by the first value in it.

    A result takes over an input that the op may write over, that is as large, and that nothing needs afterwards.
    """
    dies = [life.dies for life in lives(order)]
    buffers = list(range(len(order.bytes)))
    for position, op in enumerate(order.ops):
        free = [v for v in dict.fromkeys(op.over) if dies[v] == position and v not in order.kept]
        for value in op.makes:
            taken = next((v for v in free if order.bytes[v] == order.bytes[value]), None)
            if taken is not None:
                free.remove(taken)
                buffers[value] = buffers[taken]
    return buffers


def lives_in_place(order: Order) -> list[Life]:
    """Lives of buffers, with results that reuse their inputs' buffers."""
    merged: dict[int, Life] = {}
    for buffer, life in zip(in_place(order), lives(order), strict=True):
        first = merged.get(buffer, life)
        merged[buffer] = Life(first.born, max(first.dies, life.dies), life.bytes)
    return list(merged.values())


def peak_bytes(lives: Sequence[Life]) -> int:
    """Most bytes that live at once, a lower bound for every placement."""
    changes: dict[int, int] = {}
    for life in lives:
        changes[life.born] = changes.get(life.born, 0) + life.bytes
        changes[life.dies + 1] = changes.get(life.dies + 1, 0) - life.bytes
    live = peak = 0
    for position in sorted(changes):
        live += changes[position]
        peak = max(peak, live)
    return peak


def order_of(joint: Joint, program: Program) -> Order:
    """The order of a program's ops, each result in a storage of its own. The loss and the gradients stay at the end."""
    numbers: dict[Value, int] = {}  # by storage; one that an op writes over gets another number
    sizes: list[int] = []

    def shown(cell: Value) -> list[int]:
        return [numbers[storage] for storage in program.held(cell) if storage in numbers]

    def access(each: Instruction) -> Access:
        node = joint.nodes[each.value.op]
        is_state = each.value.is_state
        reads = tuple(dict.fromkeys(value for cell in each.reads for value in shown(cell)))
        alike, other = set[int](), set[int]()
        for source, cell in zip(inputs_of(node, again=each.kind is Kind.RECOMPUTE), each.reads, strict=False):
            (alike if _takes_its_place(source, node) else other).update(shown(cell))
        over = alike - other if is_elementwise(node) and not is_state else ()
        known = len(sizes)
        if is_state or not (is_item(node) or viewed(node)):
            for storage in program.held(each.value):
                numbers[storage] = len(sizes)
                sizes.append(program.bytes[storage])
        return Access(reads, tuple(range(known, len(sizes))), tuple(sorted(over)))

    def accesses(instructions: Sequence[Instruction]) -> list[Access]:
        return [access(each) for each in instructions if each.kind in (Kind.COMPUTE, Kind.RECOMPUTE)]

    forward = accesses(program.forward)
    *buffers, loss = [shown(Value(each.name)) for each in joint.outputs if isinstance(each, fx.Node)]
    if forward:  # new values of buffers go into them when forward is done
        moved = {value for values in buffers for value in values} - set(forward[-1].makes)
        forward[-1] = replace(forward[-1], reads=tuple({*forward[-1].reads, *moved}))
    backward = accesses(program.backward)
    gradients = [shown(cell) for cell in program.gradients if cell is not None]
    stays = frozenset(value for values in (loss, *gradients) for value in values)
    return Order((*forward, *backward), tuple(sizes), stays)


def _takes_its_place(source: fx.Node, result: fx.Node) -> bool:
    """Whether a result could take its input's place element by element, with nothing else in that storage."""
    return lies_like(source.meta.get("val"), result.meta.get("val")) and bytes_of(source) == bytes_of(result)
