"""The module tree in a few lines, for the terminal."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lowtide.profiling.profile import ModuleUsage, Usage


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the tree. ``usage`` covers its modules and all below them."""

    depth: int
    name: str
    type: str  # "" for the line of folded siblings
    usage: Usage


def outline(modules: Sequence[ModuleUsage], *, limit: int = 16, breadth: int = 6) -> list[Line]:
    """Outline the module tree in about ``limit`` lines.

    Siblings of the same structure share a line (``0 … 23``, ``24 × Block``). The heaviest branches are opened.
    Beyond ``breadth`` siblings, the lightest are folded.
    """
    tree = _Tree(modules)
    if tree.root is None:
        return []
    opened: set[_Group] = set()
    count = 1
    queue = [(0, 0, tree.root)]  # heaviest first; the second number breaks ties in the model's order
    while queue and count < limit:
        *_, group = heapq.heappop(queue)
        shown, folded = tree.below(group, breadth)
        if shown:
            opened.add(group)
            for below in shown:
                count += 1
                heapq.heappush(queue, (-below.weight, count, below))
            count += bool(folded)

    lines: list[Line] = []

    def write(group: _Group, depth: int) -> None:
        lines.append(Line(depth, group.name, group.type, group.usage))
        if group in opened:
            shown, folded = tree.below(group, breadth)
            for below in shown:
                write(below, depth + 1)
            if folded:
                rest = sum(len(g.members) for g in folded)
                lines.append(Line(depth + 1, f"… {rest} more", "", sum((g.usage for g in folded), Usage())))

    write(tree.root, 0)
    return lines


@dataclass(frozen=True, slots=True)
class _Group:
    """A module, or several of the same structure."""

    name: str
    members: tuple[ModuleUsage, ...]

    @property
    def type(self) -> str:
        kind = self.members[0].type
        return kind if len(self.members) == 1 else f"{len(self.members)} × {kind}"

    @property
    def usage(self) -> Usage:
        return sum((m.total for m in self.members), Usage())

    @property
    def weight(self) -> int:
        """Bytes at the peak, or bytes saved for the backward pass if these are more."""
        return max(self.usage.peak_bytes, self.usage.saved_bytes)


class _Tree:
    def __init__(self, modules: Sequence[ModuleUsage]) -> None:
        self.by_path = {m.path: m for m in modules}
        self.children: dict[str, list[ModuleUsage]] = {}
        for module in modules:
            if module.path and module.total != Usage():
                self.children.setdefault(self.parent(module.path), []).append(module)
        self.root = _Group("(model)", (self.by_path[""],)) if "" in self.by_path else None

    def parent(self, path: str) -> str:
        """The nearest module above a path that the model lists."""
        while path:
            path = path.rpartition(".")[0]
            if path in self.by_path:
                break
        return path

    def structure(self, path: str) -> tuple[object, ...]:
        """The structure of a module: its class, its parameters, and the modules below."""
        module = self.by_path[path]
        below = tuple((m.path[len(path) :], self.structure(m.path)) for m in self.children.get(path, ()))
        return module.type, module.total.parameter_bytes, below

    def below(self, group: _Group, breadth: int) -> tuple[list[_Group], list[_Group]]:
        """The groups inside a group: first those with a line, then the folded ones."""
        first = group.members[0].path
        groups: list[_Group] = []
        for _, run in groupby(self.children.get(first, ()), key=lambda m: self.structure(m.path)):
            ends = [m.path[len(first) :] for m in run]
            names = [end.removeprefix(".") for end in ends]
            members = tuple(self.by_path[m.path + end] for end in ends for m in group.members)
            groups.append(_Group(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", members))
        if len(groups) <= breadth + 1:
            return groups, []
        heavy = sorted(groups, key=lambda g: g.weight, reverse=True)[:breadth]
        return [g for g in groups if g in heavy], [g for g in groups if g not in heavy]
