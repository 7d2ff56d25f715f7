"""Chains of blocks in a profiled model, and the effect of recomputing spans of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lowtide.chains import Tree
from lowtide.profiling.profile import Profile
from lowtide.techniques.technique import Interval
from lowtide.tracing.graph import Graph, Op

Span = tuple[int, int]  # the blocks of a segment: the first, and one past the last

_GENERATOR_BYTES = 5056  # state of the CPU's random generator that a checkpoint keeps


@dataclass(frozen=True, slots=True)
class Block:
    """A module that runs after its neighbour."""

    path: str
    position: int  # among its container's children
    number: int  # among the blocks of all chains
    first: int  # its first op of the forward pass
    backward: int  # its first op of the backward pass
    end: int  # one past its last op
    saved_bytes: int
    glued: bool  # no segment can start with it: it writes into its input, or runs no op (nn.Flatten)


@dataclass(frozen=True)
class BlockChain:
    """Neighbouring blocks of one container."""

    container: str
    joined: bool  # the container itself is called, so that neighbours can share a segment
    blocks: tuple[Block, ...]

    @cached_property
    def units(self) -> list[tuple[int, ...]]:
        """Positions of blocks, each with the glued ones behind it; those are left out where blocks are called alone."""
        return join_glued([(block.position, block.glued) for block in self.blocks], joined=self.joined)

    @cached_property
    def weights(self) -> list[int]:
        """Saved bytes of each unit."""
        saved = {block.position: block.saved_bytes for block in self.blocks}
        return [sum(saved[i] for i in unit) for unit in self.units]

    @property
    def fewest(self) -> int:
        """Segments of a chain that is recomputed in as few as can be."""
        return 1 if self.joined else len(self.units)


def join_glued(blocks: Sequence[tuple[int, bool]], *, joined: bool) -> list[tuple[int, ...]]:
    """Positions of blocks, each with those behind it that cannot start a segment.

    >>> join_glued([(0, False), (1, True), (2, False)], joined=True)
    [(0, 1), (2,)]
    """
    units: list[tuple[int, ...]] = []
    for position, glued in blocks:
        if not glued:
            units.append((position,))
        elif joined and units:
            units[-1] += (position,)
    return units


class BlockChains:
    """The chains of a profiled model in the order in which they run, and the storages that their blocks make.

    A chain is a ``nn.Sequential`` or ``nn.ModuleList`` of two or more modules. A block's own containers are part of the
    block, unless it merely wraps a longer chain of blocks. A block that would not do the same when it runs again is in
    no chain.
    """

    @classmethod
    def of(cls, profile: Profile) -> BlockChains:
        """Chains of a profile, which holds them from then on: options and prices of several techniques read them."""
        return profile.findings.get(cls) or profile.findings.keep(cls(profile))

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        graph = profile.graph
        containers = _containers(graph.modules)
        home = _Home(path for chain in containers for path in chain.children)
        once = {home[op.module] for op in graph.ops if op.phase == "forward" and _runs_only_once(op, graph)}
        containers = [part for chain in containers for part in chain.without(once)]
        ops: dict[str, list[int]] = {}
        for op in graph.ops:
            ops.setdefault(home[op.module], []).append(op.index)
        containers = sorted((c for c in containers if any(p in ops for p in c.children)), key=lambda c: c.first_op(ops))
        number = {path: i for i, path in enumerate(path for chain in containers for path in chain.children)}
        self.block_of_op = [number.get(home[op.module], -1) for op in graph.ops]
        self._storages = BlockStorages(graph, self.block_of_op)
        self.chains = tuple(
            BlockChain(
                chain.container,
                chain.joined,
                tuple(self._block(p, i, number[p], ops.get(p, [])) for p, i in chain.children.items()),
            )
            for chain in containers
        )
        self.blocks = tuple(block for chain in self.chains for block in chain.blocks)
        self._born = [0] * (len(graph.ops) + 1)
        for storage in graph.on_device:
            self._born[storage.birth] += storage.bytes
        took = (op.seconds if op.phase == "forward" else 0.0 for op in graph.ops)
        self._elapsed = np.concatenate([[0.0], np.cumsum(np.fromiter(took, float, len(graph.ops)))])

    def _block(self, path: str, position: int, number: int, ops: list[int]) -> Block:
        graph = self.profile.graph
        forward = [i for i in ops if graph.ops[i].phase == "forward"]
        backward = [i for i in ops if graph.ops[i].phase == "backward"]
        return Block(
            path,
            position,
            number,
            first=forward[0] if forward else len(graph.ops),
            backward=backward[0] if backward else len(graph.ops),
            end=ops[-1] + 1 if ops else 0,
            saved_bytes=self._storages.saved_bytes(number),
            glued=not forward or _writes_input(graph, forward),
        )

    def spans(self, trees: dict[str, Tree]) -> list[Span]:
        """The segments of some containers' trees, outer ones before those inside."""
        spans: list[Span] = []
        for chain in self.chains:
            at = {block.position: block.number for block in chain.blocks}
            for node in trees.get(chain.container, ()):
                spans += _spans(node, at)
        return spans

    def recompute(self, spans: Sequence[Span]) -> tuple[list[Interval], list[Interval], float]:
        """Live intervals added and removed, and seconds, when these spans keep their inputs and run again."""
        storages, blocks, graph = self._storages, self.blocks, self.profile.graph
        owner = storages.owner(spans)
        removed: list[Interval] = []
        added: list[Interval] = []
        seconds = 0.0
        for index, (low, high) in enumerate(spans):
            name = _name(blocks[low:high])
            if graph.device == "cpu":
                end = max(block.end for block in blocks[low:high])
                added.append(Interval(_GENERATOR_BYTES, blocks[low].first, end, f"generator state of {name}"))
            again = min(block.backward for block in blocks[low:high])
            own = np.flatnonzero((owner == index) & (storages.death > again))
            if not len(own):
                continue
            removed += [
                Interval(int(storages.bytes[i]), int(storages.last_use[i]) + 1, again, f"recomputed in {name}")
                for i in own
            ]
            # A checkpoint stops running again as soon as it has the last value that is needed.
            stop = int(storages.written[own].max()) + 1
            inside = [i for i, (a, b) in enumerate(spans) if i > index and low <= a and b <= high]
            peak = storages.peak_while_running(low, high, stop, np.isin(owner, inside))
            more = peak - int(storages.bytes[own].sum()) - self._born[again]  # that op's outputs come after
            if more > 0:
                added.append(Interval(more, again, again + 1, f"temporaries while {name} runs again"))
            seconds += float(self._elapsed[stop] - self._elapsed[blocks[low].first])
        return added, removed, seconds


class BlockStorages:
    """Storages that blocks make in the forward pass, as arrays: their lifetimes, and the blocks that use them.

    ``block`` has each op's, -1 for those of none.
    """

    def __init__(self, graph: Graph, block: Sequence[int]) -> None:
        users: dict[int, list[int]] = {}
        written: dict[int, int] = {}  # by which op last: a dropout mask is made empty and then filled
        for op in graph.ops:
            if op.phase == "forward":
                for value in (*op.inputs, *op.outputs):
                    users.setdefault(value.storage, []).append(op.index)
                written |= dict.fromkeys((value.storage for value in op.outputs), op.index)
        storages = [
            s
            for s in graph.on_device
            if s.category in ("activation", "temporary") and s.id in users and block[users[s.id][0]] >= 0
        ]
        self.bytes = np.array([s.bytes for s in storages], np.int64)
        self.birth = np.array([s.birth for s in storages], np.int64)
        self.death = np.array([s.death for s in storages], np.int64)
        self.written = np.array([written.get(s.id, s.birth) for s in storages], np.int64)
        self.last_use = np.array([users[s.id][-1] for s in storages], np.int64)
        self.low = np.array([min(block[i] for i in users[s.id]) for s in storages], np.int64)
        self.high = np.array([max(block[i] for i in users[s.id]) for s in storages], np.int64)
        self.maker = np.array([block[users[s.id][0]] for s in storages], np.int64)

    def saved_bytes(self, block: int) -> int:
        """Bytes that a block makes and no other block reads: the gain of recomputing it."""
        return int(self.bytes[(self.low == block) & (self.high == block) & self.saved].sum())

    @property
    def saved(self) -> NDArray[np.bool_]:
        """Mask of storages that outlive their last use in the forward pass."""
        return self.death > self.last_use + 1

    def owner(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """For each storage, the innermost span that it does not leave; -1 where it leaves all."""
        owner = np.full(len(self.bytes), -1)
        for index, (low, high) in enumerate(spans):
            owner[(self.low >= low) & (self.high < high)] = index
        return owner

    def peak_while_running(self, low: int, high: int, stop: int, dropped: NDArray[np.bool_]) -> int:
        """The most that blocks' own storages hold in forward up to an op; some go after their last use."""
        mine = (self.maker >= low) & (self.maker < high) & (self.birth < stop)
        if not mine.any():
            return 0
        death = np.where(dropped, np.minimum(self.death, self.last_use + 1), self.death)[mine]
        birth, size = self.birth[mine], self.bytes[mine]
        start, end = int(birth.min()), stop
        change = np.zeros(end - start + 1, np.int64)
        np.add.at(change, birth - start, size)
        np.subtract.at(change, np.minimum(death, end) - start, size)
        return int(np.cumsum(change)[:-1].max())


class _Home:
    """Maps a module to the path, of some, that it is at or below; "" for none."""

    def __init__(self, paths: Iterator[str]) -> None:
        self._known = {path: path for path in paths}
        self._known[""] = self._known.get("", "")

    def __getitem__(self, path: str) -> str:
        if path not in self._known:
            self._known[path] = self[path.rpartition(".")[0]]
        return self._known[path]


def split(weights: Sequence[int], parts: int) -> list[Span]:
    """Cut a sequence into parts of about the same weight, none of them empty.

    >>> split([1, 1, 1, 1, 1, 1], 3), split([9, 1, 1, 1], 2)
    ([(0, 2), (2, 4), (4, 6)], [(0, 1), (1, 4)])
    """
    total = [0, *accumulate(max(weight, 1) for weight in weights)]
    cuts = [0]
    for part in range(1, parts):
        goal = total[-1] * part / parts
        nearest = min(range(len(total)), key=lambda i: abs(total[i] - goal))
        cuts.append(min(max(nearest, cuts[-1] + 1), len(weights) - (parts - part)))
    return list(zip(cuts, [*cuts[1:], len(weights)], strict=True))


@dataclass(frozen=True, slots=True)
class _Container:
    container: str
    joined: bool
    children: dict[str, int]  # path -> position

    def without(self, paths: Collection[str]) -> list[_Container]:
        """The stretches before, between and after some children."""
        stretches: list[dict[str, int]] = [{}]
        for path, position in self.children.items():
            if path in paths:
                stretches.append({})
            else:
                stretches[-1][path] = position
        return [_Container(self.container, self.joined, stretch) for stretch in stretches if stretch]

    def first_op(self, ops: dict[str, list[int]]) -> int:
        return min(ops[path][0] for path in self.children if path in ops)


def _containers(modules: Sequence[tuple[str, str]]) -> list[_Container]:
    """Stretches of neighbouring blocks in the model's containers."""
    kind = dict(modules)
    children: dict[str, list[str]] = {path: [] for path in kind}
    for path in kind:
        if path:
            children[path.rpartition(".")[0]].append(path)

    def is_chain(path: str) -> bool:
        return kind[path] in ("Sequential", "ModuleList") and len(children[path]) > 1

    def longest(path: str) -> int:
        """Blocks in the longest chain of modules that have modules themselves, at a path or below."""
        own = sum(bool(children[child]) for child in children[path]) if is_chain(path) else 0
        return max([own, *(longest(child) for child in children[path])])

    containers: list[_Container] = []

    def visit(path: str) -> None:
        if not is_chain(path):
            for child in children[path]:
                visit(child)
            return
        stretches: list[dict[str, int]] = [{}]
        for position, child in enumerate(children[path]):
            # A stage of blocks is a chain of its own; a small chain of layers is a block of this one.
            if (is_chain(child) and longest(child) > 1) or longest(child) > len(children[path]):
                stretches.append({})
                visit(child)
            else:
                name = child.rpartition(".")[2]  # a module registered twice is listed once, under its first number
                stretches[-1][child] = int(name) if name.isdecimal() else position
        containers.extend(_Container(path, kind[path] == "Sequential", stretch) for stretch in stretches if stretch)

    visit("")
    return containers


def leaves(node: int | Tree) -> Iterator[int]:
    """The children that a tree names, in order."""
    if isinstance(node, int):
        yield node
    else:
        for child in node:
            yield from leaves(child)


def _spans(node: int | Tree, at: dict[int, int]) -> list[Span]:
    if isinstance(node, int):
        return []
    blocks = [at[i] for i in leaves(node) if i in at]
    inner = [span for child in node for span in _spans(child, at)]
    return [(min(blocks), max(blocks) + 1), *inner] if blocks else inner


def _runs_only_once(op: Op, graph: Graph) -> bool:
    """Tell whether a checkpoint could not run an op again with the same result.

    Such an op draws from a generator whose state no checkpoint keeps, or saves its noise before drawing it. A
    checkpoint stops once it has all saved tensors, before the draw; around a ``nn.RReLU`` it is told not to.
    """
    return op.own_generator or (op.kernel == "aten.rrelu_with_noise" and dict(graph.modules).get(op.module) != "RReLU")


def _writes_input(graph: Graph, ops: list[int]) -> bool:
    for index in ops:
        for value in graph.ops[index].outputs:
            storage = graph.storages[value.storage]
            if storage.birth < ops[0] and storage.category in ("activation", "temporary", "input"):
                return True
    return False


def _name(blocks: Sequence[Block]) -> str:
    first, last = blocks[0].path, blocks[-1].path
    return first if len(blocks) == 1 else f"{first} to {last}"
