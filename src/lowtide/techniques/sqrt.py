"""√n recomputation (Chen et al., 2016): keep what enters a segment, run the segment again in backward.

n blocks in √n segments keep O(√n) activations for one more forward pass; a second level of segments inside
the first keeps fewer for one more again. Bitwise: the same losses, gradients, buffers and random numbers as
without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from lowtide.errors import LowtideError, PlanError
from lowtide.profiling.profile import Profile
from lowtide.techniques.chain import Chain, Chains, Tree, leaves, split
from lowtide.techniques.forward import Forward, replace_forward
from lowtide.techniques.recompute import recompute
from lowtide.techniques.technique import Check, Fidelity, Kind, Knob, Option, Price, Undo
from lowtide.workload import Workload


def checkpoint_segments(
    sequential: nn.Sequential, segments: int | None = None, *, levels: int = 1, kept: int = 0
) -> Undo:
    """Recompute a ``nn.Sequential`` in segments of neighbouring blocks; √n of them if not said otherwise.

    The last ``kept`` segments are left as they are; with ``levels=2`` each segment has segments inside. The
    class, the parameters and the ``state_dict`` stay; ``undo()`` takes it back.

    >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    >>> with checkpoint_segments(model):
    ...     print(model.forward)
    Segments((0, 1, 2), (3, 4, 5), (6, 7, 8))
    """
    if not _is_called(sequential):
        raise LowtideError(
            f"A {type(sequential).__name__} with its own forward cannot be cut into segments",
            hint="Pass a nn.Sequential of blocks.",
        )
    units = _units([(i, _starts_in_place(block)) for i, block in enumerate(sequential)], joined=True)
    if not units:
        raise LowtideError("There is no block to recompute in this nn.Sequential")
    segments = round(math.sqrt(len(units))) if segments is None else segments
    if not 1 <= segments <= len(units) or levels not in (1, 2) or not 0 <= kept < segments:
        raise LowtideError(
            f"segments={segments}, levels={levels}, kept={kept} do not fit {len(units)} blocks",
            hint=f"segments is 1 to {len(units)}, levels is 1 or 2, kept is less than segments.",
        )
    tree = _segments(units, [1] * len(units), segments, levels)
    return _apply(sequential, tree[: segments - kept], path="")


class Sqrt:
    """Recomputation in segments over the chains of blocks of a model."""

    name = "sqrt"
    kind: Kind = "saved"
    needs = "a nn.Sequential or nn.ModuleList of two or more blocks"
    conflicts: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._last: Chains | None = None

    def options(self, profile: Profile) -> list[Option]:
        """From one segment per chain to one per block, in one or two levels, the last few kept or not."""
        links = [_Link.of(chain) for chain in self._chains(profile).chains]
        links = [link for link in links if link.units]
        if not links:
            return []
        found: dict[tuple[tuple[str, Tree], ...], Option] = {}
        for segments in _counts(sum(link.least for link in links), sum(len(link.units) for link in links)):
            parts = _share(segments, links)
            for levels, kept in [*((1, kept) for kept in _counts(0, segments - 1)), (2, 0), (2, 1)]:
                trees = _trees(links, parts, levels=levels, kept=kept)
                knobs: tuple[tuple[str, Knob], ...] = (
                    ("segments", segments),
                    ("levels", levels),
                    ("kept", kept),
                    ("trees", tuple(trees.values())),
                )
                if trees:
                    found.setdefault(tuple(trees.items()), Option(self.name, tuple(trees), knobs))
        return list(found.values())

    def price(self, option: Option, profile: Profile) -> Price:
        """What segments let go, from its last use until it is made again; one more forward pass of them."""
        chains = self._chains(profile)
        added, removed, seconds = chains.recompute(chains.spans(_option_trees(option)))
        return Price(
            Fidelity.BITWISE,
            added=tuple(added),
            removed=tuple(removed),
            compute_seconds=seconds,
            source="measured" if profile.seconds_source == "measured" else "modelled",
        )

    def apply(self, work: Workload, options: Sequence[Option]) -> Undo:
        """Put a segmented forward on every container; the model is untouched if one cannot take it."""
        with Undo() as undo:
            for option in options:
                for path, tree in _option_trees(option).items():
                    undo.add(_apply(_find(work.model, path), tree, path=path))
            return undo.keep()

    def check(self, option: Option) -> Check:
        """Everything equal, bit for bit."""
        return Check.EXACT

    def _chains(self, profile: Profile) -> Chains:
        if self._last is None or self._last.profile is not profile:
            self._last = Chains(profile)
        return self._last


class Segments(Forward):
    """The forward of a ``nn.Sequential`` whose blocks are recomputed as a tree says."""

    def __init__(self, module: nn.Sequential, tree: Tree, path: str = "") -> None:
        super().__init__(module)
        self.tree = tree
        self.path = path
        named = {next(leaves(node)): node for node in tree}
        inside = set(leaves(tree)) - set(named)
        self.order: Tree = tuple(named.get(i, i) for i in range(len(module)) if i not in inside)

    def __call__(self, input: Any) -> Any:
        return self._run(self.order, input)

    def _run(self, tree: Tree, value: Any) -> Any:
        blocks = children(self.module)
        for node in tree:
            if isinstance(node, int):
                value = blocks[node](value)
            else:
                positions = list(leaves(node))
                value = recompute(
                    lambda x, node=node: self._run(node, x),
                    value,
                    modules=[blocks[i] for i in positions],
                    path=f"{self.path or 'nn.Sequential'}, blocks {positions[0]} to {positions[-1]}",
                )
        return value

    def __repr__(self) -> str:
        return f"Segments({', '.join(map(str, self.tree))})"


class Again(Forward):
    """The forward of one block that is recomputed by itself, whoever calls it."""

    def __init__(self, module: nn.Module, path: str = "") -> None:
        super().__init__(module)
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return recompute(self.plain, *args, modules=[self.module], path=self.path, **kwargs)


def _apply(container: nn.Module, tree: Tree, *, path: str) -> Undo:
    """Segments on a container that is called; on any other, its named children one by one."""
    _check_tree(container, tree, path)
    if _is_called(container):
        return replace_forward(Segments(cast(nn.Sequential, container), tree, path), path=path)
    blocks = children(container)
    with Undo() as undo:
        for node in tree:
            if not isinstance(node, tuple) or len(node) != 1 or not isinstance(node[0], int):
                raise PlanError(
                    f"Blocks of a {type(container).__name__} are recomputed one by one, not as {node}",
                    where=path,
                )
            own = f"{path}.{node[0]}" if path else str(node[0])
            undo.add(replace_forward(Again(blocks[node[0]], own), path=own))
        return undo.keep()


def children(container: nn.Module) -> list[nn.Module]:
    """The blocks in their order; one that is there twice counts twice."""
    return [block for block in container._modules.values() if block is not None]


def _check_tree(container: nn.Module, tree: Tree, path: str) -> None:
    named = list(leaves(tree))
    segments = [list(leaves(node)) for node in tree if isinstance(node, tuple)]
    whole = all(s and s == list(range(s[0], s[0] + len(s))) for s in segments)
    count = len(children(container))
    if not whole or named != sorted(set(named)) or (named and not 0 <= named[0] <= named[-1] < count):
        raise PlanError(f"{tree} are not segments of {count} blocks in order", where=path or "the model")


def _find(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise PlanError(f"The model has no module {path!r}", hint="The plan is of another model.") from None


def _is_called(module: nn.Module) -> bool:
    """Whether running the children in turn is all that the module's forward does."""
    own = module.__dict__.get("forward")
    return type(module).forward is nn.Sequential.forward and (own is None or isinstance(own, Segments))


def _starts_in_place(block: nn.Module) -> bool:
    """Whether a block's first layer writes into its input."""
    for layer in block.modules():
        if not any(True for _ in layer.children()):
            return bool(getattr(layer, "inplace", False))
    return False


# -- where to cut ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Link:
    """A chain as units: blocks, each with those behind it that cannot start a segment."""

    container: str
    joined: bool
    units: list[tuple[int, ...]]
    weights: list[int]

    @classmethod
    def of(cls, chain: Chain) -> _Link:
        units = _units([(block.position, block.glued) for block in chain.blocks], joined=chain.joined)
        saved = {block.position: block.saved_bytes for block in chain.blocks}
        return cls(chain.container, chain.joined, units, [sum(saved[i] for i in unit) for unit in units])

    @property
    def least(self) -> int:
        return 1 if self.joined else len(self.units)


def _units(blocks: Sequence[tuple[int, bool]], *, joined: bool) -> list[tuple[int, ...]]:
    units: list[tuple[int, ...]] = []
    for position, glued in blocks:
        if not glued:
            units.append((position,))
        elif joined and units:
            units[-1] += (position,)
    return units


def _segments(units: list[tuple[int, ...]], weights: list[int], parts: int, levels: int) -> Tree:
    """Cut units into segments; with two levels, cut each segment of several units again."""
    tree: list[Tree] = []
    for low, high in split(weights, parts):
        if levels > 1 and high - low > 1:
            inner = max(2, round(math.sqrt(high - low)))
            tree.append(_segments(units[low:high], weights[low:high], inner, levels - 1))
        else:
            tree.append(tuple(i for unit in units[low:high] for i in unit))
    return tuple(tree)


def _share(segments: int, links: list[_Link]) -> list[int]:
    """Segments for each chain: one after the other to the one whose segments are the heaviest."""
    parts = [link.least for link in links]
    while sum(parts) < segments:
        open_ = [i for i, link in enumerate(links) if parts[i] < len(link.units)]
        parts[max(open_, key=lambda i: sum(links[i].weights) / parts[i])] += 1
    return parts


def _trees(links: list[_Link], parts: list[int], *, levels: int, kept: int) -> dict[str, Tree]:
    """The tree of each container, without the last ``kept`` segments."""
    placed = [
        (link.container, node)
        for link, count in zip(links, parts, strict=True)
        for node in _segments(link.units, link.weights, count, levels)
    ]
    trees: dict[str, Tree] = {}
    for container, node in placed[: len(placed) - kept]:
        trees[container] = (*trees.get(container, ()), node)
    return trees


def _counts(low: int, high: int) -> list[int]:
    """All counts if there are few; otherwise a dozen, closer together where they are small, with √high."""
    if high - low < 12:
        return list(range(low, high + 1))
    spread = {low + round((high - low) ** (i / 10)) for i in range(11)}
    return sorted({low, *spread, *({round(math.sqrt(high))} if high >= low**2 else ())})


def _option_trees(option: Option) -> dict[str, Tree]:
    trees = option.knob("trees", ())
    if not isinstance(trees, tuple) or len(trees) != len(option.site):
        raise PlanError(f"{option} has no tree for each of its sites")
    return {path: cast(Tree, tree) for path, tree in zip(option.site, trees, strict=True)}
