"""Containers whose blocks run as a tree of recomputed segments: how they run, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from lowtide.chains import Tree
from lowtide.compat.modules import own_children
from lowtide.errors import LowtideError, PlanError
from lowtide.profiling.profile import Profile
from lowtide.techniques.block_chains import BlockChains, join_glued, leaves
from lowtide.techniques.recompute import recompute
from lowtide.techniques.replaced_forward import Forward, apply_at_sites, replace_forward
from lowtide.techniques.technique import Check, Config, Fidelity, Kind, Option, Price, Technique
from lowtide.undo import Applied, Undo
from lowtide.workload import Workload


@dataclass(frozen=True)
class SegmentConfig(Config):
    """For each site, the children that are recomputed together: segments, with segments inside."""

    trees: tuple[Tree, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.trees, tuple) or not all(map(_is_tree, self.trees)):
            self.refuse("trees", "is not a tuple of trees of block numbers")

    def check_site(self, site: tuple[str, ...]) -> None:
        if len(site) != len(self.trees):
            self.refuse("trees", f"is not one tree for each of {len(site)} sites")

    @property
    def segments(self) -> int:
        """The outermost segments."""
        return sum(map(len, self.trees))

    @property
    def levels(self) -> int:
        """The checkpoints around the block that has the most around it."""
        return max(map(_levels, self.trees), default=0)

    def __str__(self) -> str:
        return f"segments {self.segments}, levels {self.levels}"


class SegmentTechnique(Technique):
    """The base of techniques that recompute segments; they differ in their options."""

    kind: Kind = "hold"
    config: type[Config] = SegmentConfig
    needs = "a nn.Sequential or nn.ModuleList of two or more blocks, which draw only from torch's own generators"

    def price(self, option: Option, profile: Profile) -> Price:
        """Values are freed from their last use until they are recomputed, by one more forward pass of the segments."""
        chains = BlockChains.of(profile)
        added, removed, seconds = chains.recompute(chains.spans(_trees(option)))
        return Price(
            Fidelity.BITWISE,
            added=tuple(added),
            removed=tuple(removed),
            compute_seconds=seconds,
            source="measured" if profile.seconds_source == "measured" else "modelled",
        )

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Put a segmented forward on every container; the model is untouched if one cannot take it."""
        return apply_at_sites(work, options, lambda module, path, o: apply_tree(module, _trees(o)[path], path=path))

    def check(self, option: Option) -> Check:
        """Everything equal, bit for bit."""
        return Check.EXACT


class Segments(Forward):
    """The forward of a ``nn.Sequential`` whose blocks are recomputed as a tree says."""

    def __init__(self, module: nn.Sequential, tree: Tree, path: str = "") -> None:
        super().__init__(module)
        self.tree = tree
        self.path = path
        self.count = len(children(module))
        named = {next(leaves(node)): node for node in tree}
        inside = set(leaves(tree)) - set(named)
        self.order: Tree = tuple(named.get(i, i) for i in range(self.count) if i not in inside)

    def __call__(self, input: Any) -> Any:
        count = len(children(self.module))
        if count != self.count:
            raise LowtideError(
                f"A recomputed {type(self.module).__name__} was planned with {self.count} blocks and now has {count}",
                where=self.path,
                hint="Call undo() before adding or removing blocks, then plan again.",
            )
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


class RecomputedBlock(Forward):
    """The forward of one block that is recomputed by itself, whoever calls it."""

    def __init__(self, module: nn.Module, path: str = "") -> None:
        super().__init__(module)
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return recompute(self.plain, *args, modules=[self.module], path=self.path, **kwargs)


def apply_tree(container: nn.Module, tree: Tree, *, path: str) -> Undo:
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
            undo.add(replace_forward(RecomputedBlock(blocks[node[0]], own), path=own))
        return undo.keep()


def children(container: nn.Module) -> list[nn.Module]:
    """Blocks in their order; one that is registered twice counts twice."""
    return [block for block in own_children(container).values() if block is not None]


def _check_tree(container: nn.Module, tree: Tree, path: str) -> None:
    named = list(leaves(tree))
    segments = [list(leaves(node)) for node in tree if isinstance(node, tuple)]
    whole = all(s and s == list(range(s[0], s[0] + len(s))) for s in segments)
    count = len(children(container))
    if not whole or named != sorted(set(named)) or (named and not 0 <= named[0] <= named[-1] < count):
        raise PlanError(f"{tree} are not segments of {count} blocks in order", where=path or "the model")


def _is_called(module: nn.Module) -> bool:
    """Tell whether running the children in turn is all that the module's forward does."""
    own = module.__dict__.get("forward")
    return type(module).forward is nn.Sequential.forward and (own is None or isinstance(own, Segments))


def sequential_units(sequential: nn.Sequential) -> list[tuple[int, ...]]:
    """The positions of a ``nn.Sequential``'s blocks, each with those behind it that cannot start a segment."""
    if not _is_called(sequential):
        raise LowtideError(
            f"A {type(sequential).__name__} with its own forward cannot be cut into segments",
            hint="Pass a nn.Sequential of blocks.",
        )
    units = join_glued([(i, _starts_in_place(block)) for i, block in enumerate(sequential)], joined=True)
    if not units:
        raise LowtideError("There is no block to recompute in this nn.Sequential")
    return units


def _starts_in_place(block: nn.Module) -> bool:
    """Tell whether a block's first layer writes into its input."""
    for layer in block.modules():
        if not any(True for _ in layer.children()):
            return bool(getattr(layer, "inplace", False))
    return False


def _is_tree(tree: object) -> bool:
    """Tell whether it is a nested tuple of blocks' numbers, without an empty one."""
    return isinstance(tree, tuple) and all(
        (isinstance(node, int) and not isinstance(node, bool)) or (node != () and _is_tree(node))
        for node in cast(tuple[object, ...], tree)
    )


def _levels(tree: Tree) -> int:
    return max((1 + _levels(node) for node in tree if isinstance(node, tuple)), default=0)


def _trees(option: Option) -> dict[str, Tree]:
    return dict(zip(option.site, option.config_as(SegmentConfig).trees, strict=True))
