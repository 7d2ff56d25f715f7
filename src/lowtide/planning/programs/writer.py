"""Write an order of ops as a program: returned gradients, in-place writes, generator states and frees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx

from lowtide.planning.programs.codes import Codes, gradient_of
from lowtide.planning.programs.in_place import lies_like, written_over
from lowtide.planning.programs.program import Instruction, Kind, Program, Role, Value
from lowtide.tracing.capture.batchnorm import inputs_of
from lowtide.tracing.capture.joint import Joint, bytes_of, is_item, is_random, size_of, viewed

STATE_BYTES = torch.get_rng_state().nbytes
_PIECES = 16  # gradients leave when they make this part of all


def write(
    joint: Joint,
    backward: Sequence[tuple[fx.Node, Kind]],
    released: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
    encoded: Mapping[Codes, fx.Node] = MappingProxyType({}),
) -> Program:
    """The program that computes the forward pass in its order, and then the given ops.

    Forward's results that these read stay in memory between the passes. Results that are fetched are offloaded as soon
    as they are computed, and freed behind the forward op that ``released`` names. Codes are taken behind the op that
    ``encoded`` names.
    """
    return _Writer(joint, backward, released, encoded).program()


class _Writer:
    """Write instructions in order, then free each cell after its last use."""

    def __init__(
        self,
        joint: Joint,
        backward: Sequence[tuple[fx.Node, Kind]],
        released: Mapping[fx.Node, fx.Node],
        encoded: Mapping[Codes, fx.Node],
    ) -> None:
        self.joint, self.order, self.released, self.encoded = joint, backward, released, encoded
        self.coded = {reader: codes for codes in encoded for reader in codes.readers}
        self.replayed = {node for node, kind in backward if kind is Kind.RECOMPUTE and is_random(node)}
        self.now = {node: Value(node.name) for node in (*joint.primals, *joint.tangents)}
        self.runs: dict[fx.Node, int] = {}
        self.storages: dict[Value, tuple[Value, ...]] = {}
        self.bytes: dict[Value, int] = {}

    def held(self, cell: Value) -> tuple[Value, ...]:
        """Storages that live as long as a cell does."""
        return self.storages.get(cell, (cell,))

    def program(self) -> Program:
        forward = [self._run(node, Kind.COMPUTE) for node in self.joint.forward]
        backward = [self._run(node, kind) for node, kind in self.order]
        gradients = tuple(self.now[g] if isinstance(g, fx.Node) else None for g in self.joint.gradients)
        backward = _needed(backward, {cell for cell in gradients if cell is not None})
        backward = list(self._given(backward, gradients))
        read = {cell for each in backward for cell in each.reads}
        # Of forward, backward reads results, copies of them on the host, codes of them, and generator states.
        results = [Value(node.name) for node in (*self.joint.primals, *self.joint.forward)]
        copies = {cell: copy for cell in results if (copy := cell._replace(role=Role.HOST)) in read}
        codes = {cell: each for each in self.encoded if (cell := Value(each.source.name, role=Role.CODES)) in read}
        states = [state for cell in results if (state := cell._replace(role=Role.STATE)) in read]
        handed = [*(cell for cell in results if cell in read), *copies.values(), *codes]
        tangents = [Value(node.name) for node in self.joint.tangents]  # the engine holds them to the end
        self.bytes.update((cell, bytes_of(self.joint.nodes[cell.op])) for cell in (*copies.values(), *tangents))
        self.bytes.update((cell, each.bytes) for cell, each in codes.items())
        self.bytes.update(dict.fromkeys(states, STATE_BYTES))
        forward = list(_offloading(forward, copies))
        forward = _encoding(forward, {cell: Value(self.encoded[each].name) for cell, each in codes.items()})
        released = {cell: Value(self.released[self.joint.nodes[cell.op]].name) for cell in copies}
        stored, beside = list(self._stored()), self._held_beside()
        freed_at = {cell: self._last_use(backward, inputs) for cell, inputs in beside.items()}
        early = [cell for cell, position in freed_at.items() if position < 0]
        loss = Value(self.joint.loss.name)
        outputs = [Value(node.name) for node in self.joint.outputs if isinstance(node, fx.Node)]
        moved = [cell for cell in outputs if cell != loss]  # new values of buffers
        left = {*outputs, *handed, *copies}  # by forward, in memory
        taken = {each.value for each in (*backward, *stored) if each.kind is Kind.RETURN_GRAD} | set(tangents)
        given = [cell for cell in (*handed, *states) if cell in self.bytes or cell in self.storages]
        over: dict[Value, Value] = {}
        forward = self._in_place(forward, over, held=left)
        backward = self._in_place(backward, over, held={loss, *taken}, given=given)  # the caller reads the loss later
        for cell in {*self.storages, *over}:
            self.storages[cell] = tuple(over.get(storage, storage) for storage in self.held(cell))
        return Program(
            # New values of buffers go into them at the end, and are freed.
            forward=(
                *(Instruction(Kind.RETURN_GRAD, cell) for cell in beside),
                *_freed(forward, held=left, states=states, until=_positions(forward, released)),
                *stored,
                *_frees((*moved, *early), handed),
            ),
            backward=(
                *(Instruction(Kind.RETURN_GRAD, cell) for cell in tangents),
                *_freed(backward, given=given, held=taken, until=freed_at),
                *_frees(tangents, ()),
            ),
            kept=tuple(handed + states),
            gradients=gradients,
            storages=self.storages,
            bytes=self.bytes,
        )

    def _stored(self) -> Iterator[Instruction]:
        """Results that the model stores on itself, until the next step's forward ends."""
        for node in self.joint.stored:
            cell, given = Value(node.name, role=Role.STORED), Value(node.name)
            self.storages[cell] = self.held(given)
            yield Instruction(Kind.RETURN_GRAD, cell, (given,))

    def _held_beside(self) -> dict[Value, list[fx.Node]]:
        """Extra live tensors beside parameters, buffers and the batch, with the inputs they may alias.

        One kind are results that the model stored in the step before. This step replaces them, and may read them as an
        input of the same size. The other kind are tensors that the step makes from numpy arrays.
        """
        origins = self.joint.origins
        beside: dict[Value, list[fx.Node]] = {}
        for node in dict.fromkeys(self.joint.storages[node] for node in self.joint.stored):
            alike = [each for each in origins if origins[each] == "kept" and bytes_of(each) == bytes_of(node)]
            beside[Value(node.name, role=Role.BEFORE)] = alike
        for node in (node for node, origin in origins.items() if origin == "array"):
            beside[Value(node.name, role=Role.ARRAY)] = [node]
        self.bytes.update((value, bytes_of(self.joint.nodes[value.op])) for value in beside)
        return beside

    def _last_use(self, backward: Sequence[Instruction], inputs: Collection[fx.Node]) -> int:
        """Position at which backward frees inputs; -1 if it reads none of them.

        Each piece of a backward pass holds its inputs to its end. That of a step that keeps values is in one piece, as
        AOTAutograd runs it, which holds them no longer than it reads them.
        """
        storages, last = self.joint.storages, -1
        for position, each in enumerate(backward):
            if any(storages[self.joint.nodes[cell.op]] in inputs for cell in each.reads):
                last = position
        if last < 0 or self.joint.stored:
            return last
        gives = {position for position, each in enumerate(backward) if each.kind is Kind.RETURN_GRAD}
        return min(position for position in gives if position >= last and position + 1 not in gives)

    def _given(self, backward: list[Instruction], gradients: tuple[Value | None, ...]) -> Iterator[Instruction]:
        """Return gradients in groups during the backward pass, once a group is large enough.

        An optimizer may step the parameter at once, so its last reader must have run.
        """
        inputs: dict[Value, list[fx.Node]] = {}
        for node, cell in zip(self.joint.primals, gradients, strict=True):
            if cell is not None:
                inputs.setdefault(cell, []).append(node)
        last = {cell: position for position, each in enumerate(backward) for cell in each.reads}
        computed = {each.value for each in backward}
        in_use: dict[fx.Node, int] = {}
        for position, each in enumerate(backward):
            in_use.update(
                dict.fromkeys((self.joint.storages[self.joint.nodes[cell.op]] for cell in each.reads), position)
            )
        waiting = [cell for cell in inputs if cell not in computed]  # a gradient that nothing computes
        size = {cell: sum(map(bytes_of, nodes)) for cell, nodes in inputs.items()}
        enough = sum(size.values()) / _PIECES
        for position, each in enumerate(backward):
            yield each
            waiting += [each.value] if each.value in inputs else []
            following = self.joint.nodes[backward[position + 1].value.op] if position + 1 < len(backward) else None
            if following is not None and (is_item(following) or sum(size[cell] for cell in waiting) < enough):
                continue
            ready = [cell for cell in waiting if all(in_use.get(node, -1) <= position for node in inputs[cell])]
            if ready and (following is None or sum(size[cell] for cell in ready) >= enough):
                for cell in ready:
                    own = cell in computed and last.get(cell, -1) <= position and len(inputs[cell]) == 1
                    yield from (self._give(cell, node, own=own) for node in inputs[cell])
                waiting = [cell for cell in waiting if cell not in ready]
        yield from (self._give(cell, node, own=False) for cell in waiting for node in inputs[cell])

    def _give(self, gradient: Value, node: fx.Node, *, own: bool) -> Instruction:
        """Autograd takes a gradient that nobody else holds and that lies in memory as its parameter does."""
        cell = Value(node.name, role=Role.GRAD)
        if own and lies_like(self.joint.nodes[gradient.op].meta.get("val"), node.meta.get("val")):
            self.storages[cell] = self.held(gradient)
        else:
            self.bytes[cell] = bytes_of(node)
        return Instruction(Kind.RETURN_GRAD, cell, (gradient,))

    def _in_place(
        self,
        instructions: list[Instruction],
        over: dict[Value, Value],
        *,
        held: set[Value],
        given: Iterable[Value] = (),
    ) -> list[Instruction]:
        """Write in place where an op is the last reader of an input as large as its result.

        ``over`` maps each storage that is saved this way to the one that is overwritten.
        """
        last: dict[Value, int] = {}  # by storage: where it is last of use
        for position, each in enumerate(instructions):
            for cell in (each.value, *each.reads):
                last.update(dict.fromkeys(self.held(cell), position))
        for cell in held:
            last.update(dict.fromkeys(self.held(cell), len(instructions)))
        ours = {storage for cell in given for storage in self.held(cell)}
        written: list[Instruction] = []
        for position, each in enumerate(instructions):
            read = {storage for cell in each.reads for storage in self.held(cell)}
            dying = {storage for storage in read & ours if last[storage] == position}
            target = self._target(each, dying & self.bytes.keys())  # an input's has no bytes here, and is not ours
            if target is not None:
                (storage,) = self.held(target)
                over[each.value] = over.get(storage, storage)
            ours.update(self.held(each.value))
            written.append(each if target is None else replace(each, into=target))
        return written

    def _target(self, each: Instruction, dying: set[Value]) -> Value | None:
        """Input cell that an op may overwrite, if any."""
        node = self.joint.nodes.get(each.value.op)
        is_op = each.kind in (Kind.COMPUTE, Kind.RECOMPUTE)
        if not is_op or node is None or each.value not in self.bytes or node in self.replayed:
            return None
        read = dict(zip(inputs_of(node, again=each.kind is Kind.RECOMPUTE), each.reads, strict=False))
        shown = Counter(storage for cell in read.values() for storage in self.held(cell))
        for value in written_over(node):
            storages = self.held(read[value])
            alike = lies_like(value.meta.get("val"), node.meta.get("val"))
            if (
                alike
                and shown[storages[0]] == 1
                and set(storages) <= dying
                and self.bytes[storages[0]] == self.bytes[each.value]
            ):
                return read[value]
        return None

    def _run(self, node: fx.Node, kind: Kind) -> Instruction:
        if kind is Kind.FETCH:
            self.runs[node] = self.runs[node] + 1
            cell = self.now[node] = Value(node.name, self.runs[node])
            self.bytes[cell] = bytes_of(node)
            return Instruction(kind, cell, (Value(node.name, role=Role.HOST),))
        read = [gradient_of(node)] if kind is Kind.DECODE else inputs_of(node, again=kind is Kind.RECOMPUTE)
        reads = tuple(self.now[value] for value in read)
        if kind is Kind.DECODE:
            reads = (*reads, Value(self.coded[node].source.name, role=Role.CODES))
        if kind is Kind.RECOMPUTE and node in self.replayed:
            reads = (*reads, Value(node.name, role=Role.STATE))
        run = self.runs.get(node, -1) + 1
        cell = self.now[node] = Value(node.name, run)
        self.runs[node] = run
        self._note_storages(node, cell)
        return Instruction(kind, cell, reads)

    def _note_storages(self, node: fx.Node, cell: Value) -> None:
        values, source = node.meta.get("val"), viewed(node)
        if source is not None:  # the cell it reads: another run of that op may be the latest of the storage's own
            self.storages[cell] = self.held(self.now[source])
        elif isinstance(values, (tuple, list)):
            parts = tuple(cell._replace(part=i) for i in range(len(values)))
            self.storages[cell] = parts
            self.bytes.update(zip(parts, map(size_of, values), strict=True))
        elif is_item(node):
            op, index = node.args
            source = self.now[op]  # pyright: ignore[reportArgumentType]
            self.storages[cell] = (source._replace(part=index),)
        else:
            self.bytes[cell] = bytes_of(node)


def _offloading(forward: Iterable[Instruction], copies: Mapping[Value, Value]) -> Iterator[Instruction]:
    """Copy results to the host as soon as they are computed."""
    for each in forward:
        yield each
        if each.value in copies:
            yield Instruction(Kind.OFFLOAD, copies[each.value], (each.value,))


def _encoding(forward: Sequence[Instruction], behind: Mapping[Value, Value]) -> list[Instruction]:
    """Take codes behind an op, and behind the op or the view that they are of."""
    computed = {each.value: position for position, each in enumerate(forward)}
    taken: dict[int, list[Instruction]] = {}
    for codes, end in behind.items():
        source = Value(codes.op)
        position = max(computed[end], computed[source])
        taken.setdefault(position, []).append(Instruction(Kind.ENCODE, codes, (source,)))
    return [each for position, first in enumerate(forward) for each in (first, *taken.get(position, ()))]


def _positions(forward: Sequence[Instruction], released: Mapping[Value, Value]) -> dict[Value, int]:
    """Positions at which offloaded values are freed: behind an op, and behind all that reads them."""
    ends = set(released.values())
    computed: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for position, each in enumerate(forward):
        if each.value in ends:
            computed[each.value] = position
        last.update((value, position) for value in each.reads if value in released)
    return {value: max(computed[end], last[value]) for value, end in released.items()}


def _frees(cells: Iterable[Value], held: Iterable[Value]) -> Iterator[Instruction]:
    return (Instruction(Kind.FREE, cell) for cell in dict.fromkeys(cells) if cell not in held)


def _needed(instructions: Sequence[Instruction], wanted: set[Value]) -> list[Instruction]:
    """Drop instructions whose results nobody reads."""
    needed: list[Instruction] = []
    for instruction in reversed(instructions):
        if instruction.value in wanted:
            needed.append(instruction)
            wanted |= set(instruction.reads)
    return needed[::-1]


def _freed(
    instructions: Sequence[Instruction],
    *,
    given: Iterable[Value] = (),
    held: set[Value],
    states: Iterable[Value] = (),
    until: Mapping[Value, int] = MappingProxyType({}),
) -> Iterator[Instruction]:
    """Free each cell right after its last use. ``states`` appear with their ops.

    ``until`` gives the position at which to free other cells.
    """
    last: dict[Value, int] = dict.fromkeys(given, -1)
    state_of = {state.op: state for state in states}
    for position, instruction in enumerate(instructions):
        last[instruction.value] = position
        for cell in instruction.reads:
            if cell in last:
                last[cell] = position
    ends: dict[int, list[Value]] = {}
    for cell, position in last.items():
        if cell not in held:
            ends.setdefault(position, []).append(cell)
    for cell, position in until.items():
        if position >= 0:
            ends.setdefault(position, []).append(cell)
    yield from _frees(ends.get(-1, []), ())
    for position, instruction in enumerate(instructions):
        yield instruction
        if instruction.value.op in state_of and instruction.kind is Kind.COMPUTE:
            yield Instruction(Kind.COMPUTE, state_of[instruction.value.op])
        yield from _frees(ends.get(position, []), ())
