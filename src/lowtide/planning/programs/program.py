"""A planned step as a program: compute, recompute, free, in order; and its simulator.

A program is data: names, bytes and an order. ``simulate`` works on it alone; an engine runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from lowtide.errors import PlanError
from lowtide.sizes import format_size


class Kind(StrEnum):
    """Kind of an instruction."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    RETURN_GRAD = "return_grad"  # a gradient to autograd, which takes it as it is or copies it
    FREE = "free"
    OFFLOAD = "offload"  # copy to the host's memory
    FETCH = "fetch"  # and back
    ENCODE = "encode"  # a few bits for each element of an activation's input
    DECODE = "decode"  # the activation's backward from these


class Role(StrEnum):
    """Relation of a value to its op."""

    RESULT = ""
    STATE = "state"  # of the generator, before a random op that is recomputed
    HOST = "host"  # a copy of the result there
    GRAD = "grad"  # the input's gradient, as autograd gets it
    STORED = "stored"  # the result, as the model stores it on itself
    BEFORE = "before"  # the result that the model stored in the step before
    ARRAY = "array"  # an input that the step makes from a numpy array
    CODES = "codes"  # a few bits for each element of the result


class Value(NamedTuple):
    """Result of one run of an op, one part of it, or a tensor beside it.

    >>> str(Value("relu", run=1)), Value("split", part=2).name, Value("primals_1", role=Role.GRAD).name
    ('relu (run 2)', 'split[2]', 'primals_1.grad')
    """

    op: str
    run: int = 0
    role: Role = Role.RESULT
    part: int | None = None  # of an op with several results

    @property
    def is_state(self) -> bool:
        """Whether it is a generator's state."""
        return self.role is Role.STATE

    @property
    def on_host(self) -> bool:
        """Whether it is a copy in the host's memory."""
        return self.role is Role.HOST

    @property
    def name(self) -> str:
        """The value without its run."""
        part = "" if self.part is None else f"[{self.part}]"
        return f"{self.op}{part}.{self.role}" if self.role else f"{self.op}{part}"

    def __str__(self) -> str:
        return f"{self.name} (run {self.run + 1})" if self.run else self.name


@dataclass(frozen=True, slots=True)
class Instruction:
    """One op with its inputs, one complete gradient, or one cell that is copied or freed."""

    kind: Kind
    value: Value
    reads: tuple[Value, ...] = ()
    into: Value | None = None  # one of those it reads, for the last time, and writes over

    def __str__(self) -> str:
        what = f"{self.kind:9} {self.value}"
        what += f" from {', '.join(map(str, self.reads))}" if self.reads else ""
        return what if self.into is None else f"{what}, in place of {self.into}"


@dataclass(frozen=True)
class Program:
    """Instructions of both passes, and the bytes of their storages."""

    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    kept: tuple[Value, ...]  # by forward for backward; parameters and inputs too
    gradients: tuple[Value | None, ...]
    storages: Mapping[Value, tuple[Value, ...]]  # of views and of several results; any other cell has one of its own
    bytes: Mapping[Value, int]  # of each storage; none for parameters and inputs

    def __str__(self) -> str:
        shown = [f"{i:5} {instruction}" for i, instruction in enumerate((*self.forward, *self.backward))]
        storages = {storage for cell in self.kept for storage in self.held(cell)}
        size = sum(self.bytes.get(storage, 0) for storage in storages)
        border = f"      -- {len(self.kept)} results, {format_size(size)}, go to backward --"
        return "\n".join([*shown[: len(self.forward)], border, *shown[len(self.forward) :]])

    def held(self, cell: Value) -> tuple[Value, ...]:
        """The storages that live as long as a cell does."""
        return self.storages.get(cell, (cell,))

    @property
    def recomputed(self) -> int:
        """Number of recomputed ops."""
        return sum(instruction.kind is Kind.RECOMPUTE for instruction in self.backward)


def check_program(program: Program) -> None:
    """Raise ``PlanError`` if an instruction reads a value that is not live, or writes in place of one it does not read.

    Values that no instruction makes are parameters and inputs. Backward starts with the kept values alone.
    """
    computed = {each.value for each in (*program.forward, *program.backward) if each.kind is not Kind.FREE}
    used = {cell for each in (*program.forward, *program.backward) for cell in (each.value, *each.reads)}
    inputs = {cell for cell in (*used, *program.kept) if cell not in computed and cell == Value(cell.op)}
    live = set(inputs)
    for number, each in enumerate((*program.forward, *program.backward)):
        if number == len(program.forward):
            if not live.issuperset(program.kept):
                raise PlanError("The program keeps values that forward does not leave", hint="Plan again.")
            live = set(program.kept)
        if each.kind is Kind.FREE:
            live.discard(each.value)
            continue
        overwrites = each.into is None or each.into in each.reads
        if not live.issuperset(each.reads) or not overwrites or not _holds_well(each, program):
            raise PlanError(f"Instruction {number} of the program cannot run: {each}", hint="Plan again.")
        live.add(each.value)
    if not {cell for cell in program.gradients if cell is not None} <= computed | inputs:
        raise PlanError("The program returns gradients that it does not compute", hint="Plan again.")
    if min(program.bytes.values(), default=0) < 0:
        raise PlanError("The program has sizes below zero", hint="Plan again.")


def _holds_well(each: Instruction, program: Program) -> bool:
    """Whether copies go from the device to the host or back, as large as their source, and codes are where they may."""
    codes = [cell for cell in each.reads if cell.role is Role.CODES]
    if each.kind is Kind.ENCODE:
        return each.value.role is Role.CODES and [cell.op for cell in each.reads] == [each.value.op] and not codes
    if each.value.role is Role.CODES or len(codes) != (each.kind is Kind.DECODE):
        return False
    if each.kind not in (Kind.OFFLOAD, Kind.FETCH):
        return not each.value.on_host and not any(cell.on_host for cell in each.reads)
    if len(each.reads) != 1:
        return False
    (source,) = each.reads
    device, host = (source, each.value) if each.kind is Kind.OFFLOAD else (each.value, source)
    sizes = {program.bytes.get(storage) for cell in (device, host) for storage in program.held(cell)}
    return host == Value(device.op, role=Role.HOST) and not device.role and len(sizes) == 1


class Simulation(NamedTuple):
    """Bytes after each instruction, without parameters, inputs and returned gradients; and total seconds."""

    live_bytes: tuple[int, ...]  # of storages
    during_bytes: tuple[int, ...]  # the same with what the op allocates inside itself
    host_bytes: tuple[int, ...]  # of copies on the host
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """Storage peak."""
        return max(self.live_bytes, default=0)


class Cost(NamedTuple):
    """Seconds and workspace of an instruction."""

    seconds: float = 0.0
    workspace_bytes: int = 0


def simulate(program: Program, cost: Callable[[Instruction], Cost] = lambda _: Cost()) -> Simulation:
    """Run a program over sizes alone."""
    holders: dict[Value, int] = {}  # by storage: how many cells hold it
    live, host, seconds = 0, 0, 0.0
    lives, during, hosts = list[int](), list[int](), list[int]()
    for instruction in (*program.forward, *program.backward):
        change = -1 if instruction.kind is Kind.FREE else 1
        for storage in program.held(instruction.value):
            before = holders.get(storage, 0)
            holders[storage] = before + change
            if not before or not holders[storage]:
                size = change * program.bytes.get(storage, 0)
                live, host = (live, host + size) if storage.on_host else (live + size, host)
        taken = Cost() if instruction.kind is Kind.FREE else cost(instruction)
        seconds += taken.seconds
        lives.append(live)
        during.append(live + taken.workspace_bytes)
        hosts.append(host)
    return Simulation(tuple(lives), tuple(during), tuple(hosts), seconds)
