"""Ops in a fixed order, ops that run again in between, and the bytes that live meanwhile.

Nothing here knows torch: numbers in, numbers out. The solver's moves and bounds all work on this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

# Ops that run again, by the op in whose turn they do: right before it. An op reads the latest run of each source. A
# value is freed after its last read before its maker's next run. Stores and loads of holds are listed too.
Again = dict[int, frozenset[int]]


@dataclass(frozen=True)
class Hold:
    """A way to hold results of a forward op until backward: a store in ``turn``, and a load in a later one.

    Stores and loads are numbered like ops, behind all of them. A load makes the op's ``values`` again. A hold with
    ``readers`` has no load: these ops of backward then read what is stored, in place of the value.
    """

    op: int
    turn: int  # of the op behind the last forward reader
    store: int
    load: int
    values: tuple[int, ...]
    stored: int  # the value that the store makes and the load reads
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ops:
    """Ops in execution order. A value is one storage, made by one op, with all of its views.

    Ops and values are numbered. From ``backward`` on, ops may run again before others.
    """

    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]  # of values
    seconds: tuple[float, ...]
    backward: int  # the first op of the backward pass
    repeatable: frozenset[int]  # ops that may run again
    held: frozenset[int] = frozenset()  # values that live to the end
    workspace: tuple[int, ...] = ()
    over: tuple[tuple[int, ...], ...] = ()  # values that an op may write its result over
    holds: tuple[Hold, ...] = ()  # their stores and loads stand at the end of the tuples of ops

    def __len__(self) -> int:
        return len(self.reads) - 2 * len(self.holds)

    @cached_property
    def op_of(self) -> tuple[int, ...]:
        """By run: the op that it stands for. A load stands for the op whose results it makes, a store for itself."""
        return (*range(len(self)), *(run for hold in self.holds for run in (hold.store, hold.op)))

    @cached_property
    def holds_of(self) -> dict[int, list[Hold]]:
        holds: dict[int, list[Hold]] = {}
        for hold in self.holds:
            holds.setdefault(hold.op, []).append(hold)
        return holds

    def loads_of(self, value: int) -> list[Hold]:
        """Holds whose loads make a value."""
        if not self.holds:
            return []
        holds = self.holds_of.get(self.maker[value], ())
        return [hold for hold in holds if value in hold.values and not hold.readers]

    @cached_property
    def stores(self) -> dict[int, Hold]:
        return {hold.store: hold for hold in self.holds}

    @cached_property
    def loads(self) -> dict[int, Hold]:
        return {hold.load: hold for hold in self.holds}

    @cached_property
    def maker(self) -> tuple[int, ...]:
        """The op that makes each value."""
        makers = [0] * len(self.bytes)
        for op, values in enumerate(self.makes):
            for value in values if op not in self.loads else ():
                makers[value] = op
        return tuple(makers)

    @cached_property
    def size(self) -> tuple[int, ...]:
        """Bytes that each op makes."""
        return tuple(sum(self.bytes[value] for value in values) for values in self.makes)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """The ops whose results each op reads."""
        maker = self.maker
        return tuple(tuple(dict.fromkeys(maker[value] for value in values)) for values in self.reads)

    @cached_property
    def last_forward_reads(self) -> list[int]:
        """By op of the forward pass: its last reader there, or itself."""
        last = list(range(self.backward))
        for reader in range(self.backward):
            for source in self.sources[reader]:
                last[source] = reader
        return last

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each value."""
        return np.array(self.bytes, np.int64)

    @cached_property
    def workspaces(self) -> NDArray[np.int64]:
        """Workspace bytes of each op."""
        return np.array(self.workspace or (0,) * len(self.reads), np.int64)


class RunTimeline:
    """Runs in order, without those whose results nobody reads; the spans of values and the bytes at each run."""

    def __init__(self, ops: Ops, again: Again) -> None:
        self.ops, self.asked = ops, again
        self.coded = [hold for hold in ops.holds if hold.readers and hold.store in again.get(hold.turn, ())]
        self.reads = _reads(ops, self.coded)
        runs, before = list[int](), list[int]()  # the op of each run, and the op right before which it happens
        for op in range(len(ops)):
            if op in again:
                for repeated in sorted(again[op], key=lambda run: (run < len(ops), run)):  # loads first
                    runs.append(repeated)
                    before.append(op)
            runs.append(op)
            before.append(op)
        self._walk(runs, before)

    def _walk(self, runs: list[int], before: list[int]) -> None:
        """From the last run to the first: drop runs that nobody reads, and note where each value dies."""
        reads, makes, held, loads = self.reads, self.ops.makes, self.ops.held, self.ops.loads
        last: dict[int, int] = {}  # by value that is read later on: its last read, counted from the end
        self.runs, self.before = list[int](), list[int]()
        spans: list[tuple[int, int, int]] = []
        place = 0
        for run, turn in zip(reversed(runs), reversed(before), strict=True):
            made = makes[run]
            if run != turn and last.keys().isdisjoint(made):
                continue
            for value in made:
                if value not in last and run in loads:
                    continue
                spans.append((value, place, 0 if value in held else last.pop(value, place)))
            for value in reads[run]:
                if value not in last:
                    last[value] = place
            self.runs.append(run)
            self.before.append(turn)
            place += 1
        self.runs.reverse()
        self.before.reverse()
        end = place - 1
        # Each value from the run that makes it to its last read: value, born, dies.
        self.spans = [(value, end - born, end - dies) for value, born, dies in reversed(spans)]

    @cached_property
    def again(self) -> Again:
        """Ops that run again and whose results are read."""
        by_turn: dict[int, list[int]] = {}
        for run, turn in zip(self.runs, self.before, strict=True):
            if run != turn:
                by_turn.setdefault(turn, []).append(run)
        return {turn: frozenset(runs) for turn, runs in by_turn.items()}

    @cached_property
    def seconds(self) -> float:
        """Seconds of ops that run again."""
        pairs = zip(self.runs, self.before, strict=True)
        return sum(self.ops.seconds[run] for run, turn in pairs if run != turn)

    @cached_property
    def overwritten(self) -> dict[int, int]:
        """By run that writes its result over a value: that value."""
        ops, over = self.ops, self.ops.over
        values: dict[int, int] = {}
        coded = {reader for hold in self.coded for reader in hold.readers}
        for value, born, dies in self.spans if over else ():
            run = self.runs[dies]
            if (
                dies > born
                and run < len(ops)
                and run not in coded
                and value in over[run]
                and value not in ops.held
                and ops.bytes[value] == ops.size[run]
            ):
                values[dies] = value
        return values

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """Bytes during each run, with its results and its workspace."""
        spans = np.array(self.spans, np.int64).reshape(-1, 3)
        sizes = self.ops.sizes[spans[:, 0]]
        change = np.zeros(len(self.runs) + 1, np.int64)
        np.add.at(change, spans[:, 1], sizes)
        np.add.at(change, spans[:, 2] + 1, -sizes)
        live = np.cumsum(change[:-1]) + self.ops.workspaces[self.runs]
        for place, value in self.overwritten.items():
            live[place] -= self.ops.bytes[value]
        return live

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that live at once."""
        return int(self.live.max(initial=0))

    @cached_property
    def is_read(self) -> dict[tuple[int, int], list[int]]:
        """By value and the run that made it: the runs that read it, in order."""
        now: dict[int, int] = {}
        readers: dict[tuple[int, int], list[int]] = {}
        for place, run in enumerate(self.runs):
            for value in self.reads[run]:
                readers[value, now[value]].append(place)
            for value in self.ops.makes[run]:
                now[value] = place
                readers[value, place] = []
        return readers

    @cached_property
    def spans_of(self) -> dict[int, tuple[list[int], list[int]]]:
        """By value: where its spans are born, and where they die."""
        spans: dict[int, tuple[list[int], list[int]]] = {}
        for value, born, dies in self.spans:
            if value in spans:
                births, deaths = spans[value]
                births.append(born)
                deaths.append(dies)
            else:
                spans[value] = [born], [dies]
        return spans

    @cached_property
    def turns_of(self) -> dict[int, list[int]]:
        """By op: the ops before which it runs again."""
        turns: dict[int, list[int]] = {}
        for run, turn in zip(self.runs, self.before, strict=True):
            if run != turn:
                turns.setdefault(run, []).append(turn)
        return turns

    @cached_property
    def starts(self) -> list[int]:
        """Place of the first run before each op."""
        starts = [0] * len(self.ops)
        for place in range(len(self.runs) - 1, -1, -1):
            starts[self.before[place]] = place
        return starts


def _reads(ops: Ops, coded: Iterable[Hold]) -> Sequence[tuple[int, ...]]:
    """Values that each op reads, with codes in place of the values that they stand for."""
    changed = {
        reader: tuple(hold.stored if value in hold.values else value for value in ops.reads[reader])
        for hold in coded
        for reader in hold.readers
    }
    return [changed.get(op, values) for op, values in enumerate(ops.reads)] if changed else ops.reads


def with_runs(again: Again, runs: Iterable[tuple[int, int]]) -> Again:
    """Add runs, each as the op right before which it happens and the op that runs again."""
    changed: dict[int, set[int]] = {}
    for turn, op in runs:
        changed.setdefault(turn, set()).add(op)
    return again | {turn: again.get(turn, frozenset()) | ops for turn, ops in changed.items()}


def without_runs(again: Again, runs: Iterable[tuple[int, int]]) -> Again:
    changed: dict[int, set[int]] = {}
    for turn, op in runs:
        changed.setdefault(turn, set()).add(op)
    return again | {turn: again.get(turn, frozenset()) - ops for turn, ops in changed.items()}
