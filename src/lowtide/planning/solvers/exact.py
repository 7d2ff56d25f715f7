"""The fewest seconds within a budget, exactly, for small graphs: an integer program, solved by HiGHS.

Checkmate's program (Jain et al., 2020) over a fixed order: which ops run again before each op, which values are held
from one op to the next, and which are freed within.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from lowtide.planning.solvers.runs import Again, Ops

_NODES = 2000  # of the search tree: a limit in seconds would depend on the machine


def fastest(ops: Ops, budget_bytes: int) -> Again | None:
    """Runs with the fewest seconds whose peak, without writes in place, is within a budget; None if none were found."""
    return _Program(ops).solve(budget_bytes)


class _Program:
    """Variables and constraints. A run is an op before or at another: the later one's number is the stage."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.cost: list[float] = []
        self.rows: list[tuple[dict[int, float], float]] = []  # coefficients, and the least value of the sum
        self.over_budget: list[tuple[dict[int, float], int]] = []  # bytes of variables, and bytes beside them
        self.again: dict[tuple[int, int], int] = {}  # by stage and op
        self.held: dict[tuple[int, int], int] = {}  # by stage and value that lives when it begins
        for stage in range(len(ops)):
            self._add_variables(stage)
        for stage in range(len(ops)):
            self._add_reads(stage)
            self._add_bytes(stage)

    def solve(self, budget_bytes: int) -> Again | None:
        least: Any = [low for _, low in self.rows] + [beside - budget_bytes for _, beside in self.over_budget]
        entries = [row for row, _ in self.rows]
        entries += [{variable: -size for variable, size in row.items()} for row, _ in self.over_budget]
        places = [(place, variable, value) for place, row in enumerate(entries) for variable, value in row.items()]
        rows, columns, values = zip(*places, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(entries), len(self.cost)))
        result = milp(
            np.array(self.cost),
            integrality=np.ones(len(self.cost)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, lb=least),
            options={"node_limit": _NODES},
        )
        if result.x is None:
            return None
        chosen = [run for run, variable in self.again.items() if result.x[variable] > 0.5]
        return {stage: frozenset(op for at, op in chosen if at == stage) for stage in {at for at, _ in chosen}}

    def _variable(self, cost: float = 0.0) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def _add_variables(self, stage: int) -> None:
        for op in range(stage):
            for value in self.ops.makes[op]:
                self.held[stage, value] = self._variable()
            if stage >= self.ops.backward and op in self.ops.repeatable:
                self.again[stage, op] = self._variable(self.ops.seconds[op])

    def _present(self, stage: int, value: int) -> dict[int, float]:
        """Variables, of which one is set if a value is there for a reader in a stage."""
        variables = [self.held[stage, value], self.again.get((stage, self.ops.maker[value]))]
        return {variable: 1.0 for variable in variables if variable is not None}

    def _runs(self, stage: int) -> list[int]:
        return [*(op for op in range(stage) if (stage, op) in self.again), stage]

    def _add_reads(self, stage: int) -> None:
        for value in self.ops.reads[stage]:
            self.rows.append((self._present(stage, value), 1.0))
        for op in self._runs(stage)[:-1]:
            for value in self.ops.reads[op]:
                self.rows.append(({**self._present(stage, value), self.again[stage, op]: -1.0}, 0.0))
        if stage:
            for op in range(stage - 1):
                for value in self.ops.makes[op]:
                    row = {**self._present(stage - 1, value), self.held[stage, value]: -1.0}
                    self.rows.append((row, 0.0))
        for value in self.ops.held:
            if (stage, value) in self.held:
                self.rows.append(({self.held[stage, value]: 1.0}, 1.0))

    def _add_bytes(self, stage: int) -> None:
        """Bytes at each run of a stage: values from before that are still read or held on, and results of its runs."""
        ops, runs = self.ops, self._runs(stage)
        readers: dict[int, list[int]] = {}
        for place, run in enumerate(runs):
            for value in ops.reads[run]:
                readers.setdefault(value, []).append(place)
        for place, run in enumerate(runs):
            beside = ops.size[run] if run == stage else 0
            row: dict[int, float] = {} if run == stage else {self.again[stage, run]: float(ops.size[run])}
            for op in range(stage):
                for value in ops.makes[op]:
                    if op != run and ops.bytes[value]:
                        live = self._live(stage, value, [runs[at] for at in readers.get(value, ()) if at >= place],
                                          from_before=op not in runs[:place])  # fmt: skip
                        if live is not None:
                            row[live] = float(ops.bytes[value])
            beside += ops.workspace[run] if ops.workspace and run == stage else 0
            self.over_budget.append((row, beside))

    def _live(self, stage: int, value: int, readers: Iterable[int], *, from_before: bool) -> int | None:
        """A variable that is set if a value lives at a run: it is there, and a later run or stage reads it."""
        there = [self.held[stage, value]]
        if not from_before:
            there.append(self.again[stage, self.ops.maker[value]])
        uses = [self.again[stage, reader] for reader in readers if reader != stage]
        uses += [self.held[stage + 1, value]] if (stage + 1, value) in self.held else []
        always = stage in readers
        if not always and not uses:
            return None
        live = self._variable()
        for source in there:
            for use in uses:
                self.rows.append(({live: 1.0, source: -1.0, use: -1.0}, -1.0))
            if always:
                self.rows.append(({live: 1.0, source: -1.0}, 0.0))
        return live
