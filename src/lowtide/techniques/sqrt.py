"""√n recomputation (Chen et al., 2016): keep what enters a segment, run the segment again in backward.

n blocks in √n segments keep O(√n) activations for one more forward pass. A second level inside them keeps fewer for
another pass. Bitwise: the same losses, gradients, buffers and random numbers as without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from lowtide.chains import Tree
from lowtide.errors import LowtideError
from lowtide.profiling.profile import Profile
from lowtide.techniques.block_chains import BlockChain, BlockChains, split
from lowtide.techniques.segments import SegmentConfig, SegmentTechnique, apply_tree, sequential_units
from lowtide.techniques.technique import Config, Option
from lowtide.undo import Undo


def checkpoint_segments(
    sequential: nn.Sequential, segments: int | None = None, *, levels: int = 1, kept: int = 0
) -> Undo:
    """Recompute a ``nn.Sequential`` in segments of neighbouring blocks; √n of them if not said otherwise.

    The last ``kept`` segments are left as they are; with ``levels=2`` each segment has segments inside. The
    class, the parameters and the ``state_dict`` stay; ``undo()`` restores the forward.

    >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    >>> with checkpoint_segments(model):
    ...     print(model.forward)
    Segments((0, 1, 2), (3, 4, 5), (6, 7, 8))
    """
    units = sequential_units(sequential)
    segments = round(math.sqrt(len(units))) if segments is None else segments
    if not 1 <= segments <= len(units) or levels not in (1, 2) or not 0 <= kept < segments:
        raise LowtideError(
            f"segments={segments}, levels={levels}, kept={kept} do not fit {len(units)} blocks",
            hint=f"segments is 1 to {len(units)}, levels is 1 or 2, kept is less than segments.",
        )
    tree = _segments(units, [1] * len(units), segments, levels)
    return apply_tree(sequential, tree[: segments - kept], path="")


@dataclass(frozen=True)
class SqrtConfig(SegmentConfig):
    """Segments of equal weight, of which the last ``kept`` are not recomputed."""

    kept: int = 0

    def __post_init__(self) -> None:
        SegmentConfig.__post_init__(self)
        self.require("kept", int, least=0)

    @property
    def segments(self) -> int:
        """The outermost segments, the kept ones included."""
        return sum(map(len, self.trees)) + self.kept

    def __str__(self) -> str:
        return f"{SegmentConfig.__str__(self)}, kept {self.kept}"


class Sqrt(SegmentTechnique):
    """Recomputation in segments over the chains of blocks of a model."""

    name = "sqrt"
    config: type[Config] = SqrtConfig

    def options(self, profile: Profile) -> list[Option]:
        """From one segment per chain to one per block, in one or two levels, the last few kept or not."""
        chains = [chain for chain in BlockChains.of(profile).chains if chain.units]
        if not chains:
            return []
        options: dict[tuple[tuple[str, Tree], ...], Option] = {}
        for segments in _counts(sum(chain.fewest for chain in chains), sum(len(chain.units) for chain in chains)):
            parts = _share(segments, chains)
            for levels, kept in [*((1, kept) for kept in _counts(0, segments - 1)), (2, 0), (2, 1)]:
                trees = _trees(chains, parts, levels=levels, kept=kept)
                if trees:
                    option = Option(self.name, tuple(trees), SqrtConfig(tuple(trees.values()), kept))
                    options.setdefault(tuple(trees.items()), option)
        return list(options.values())


# -- where to cut ----------------------------------------------------------------------------------------


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


def _share(segments: int, chains: list[BlockChain]) -> list[int]:
    """Segments for each chain: one after the other to the one whose segments are the heaviest."""
    parts = [chain.fewest for chain in chains]
    while sum(parts) < segments:
        open_ = [i for i, chain in enumerate(chains) if parts[i] < len(chain.units)]
        parts[max(open_, key=lambda i: sum(chains[i].weights) / parts[i])] += 1
    return parts


def _trees(chains: list[BlockChain], parts: list[int], *, levels: int, kept: int) -> dict[str, Tree]:
    """The tree of each container, without the last ``kept`` segments."""
    placed = [
        (chain.container, node)
        for chain, count in zip(chains, parts, strict=True)
        for node in _segments(chain.units, chain.weights, count, levels)
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
