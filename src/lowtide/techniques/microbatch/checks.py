"""Checks of every real step in pieces: whether it still is the step for which it was found what a piece counts.

The first batch tells what a piece counts, or a proof for it does. A later batch may take another branch of the loss, or
show that the loss divides by a count of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.batches import flatten
from lowtide.compat.autograd import DIVISION_NODES, input_metadata
from lowtide.techniques.microbatch.counts import Mean, nodes_behind, saved_tensors
from lowtide.techniques.microbatch.statistics import takes_statistics
from lowtide.techniques.microbatch.weights import Proved

_MOST_NODES = 64
_COMPARED_STEPS = 3  # of a proved loss: to read divisors waits for the device
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}
_CLOSE_IN_16_BITS = 2e-2


class Checks:
    """Compares a step's pieces with the planned step and with the first batch's, and warns once."""

    def __init__(self, proved: Proved | None, batch: Any) -> None:
        self._proved = proved
        self._planned = _structure(batch)
        self._known: dict[bool, list[str]] = {}  # op names; apart for single samples, whose dimensions may be squeezed
        self._divisors: list[list[Tensor]] = []  # of this step's pieces
        self._compared = 0  # steps
        self._has_warned = False

    def start(self, batch: Any, modules: Iterable[nn.Module]) -> None:
        """Check a batch before its pieces."""
        self._divisors = []
        if self._proved is not None:
            if _structure(batch) != self._planned:
                self._warn("The batch has other parts than the planned one, for which the loss was proved")
            if any(map(takes_statistics, modules)):
                self._warn("Batch norms take statistics of each piece, which the planned step did not")

    def look(self, loss: Tensor, samples: int, means: Sequence[Mean] | None) -> None:
        """Check how the loss of a piece ends and what it counts, and keep the numbers that it is divided by."""
        if self._proved is not None and means is not None and bool(means) != (self._proved in ("counted", "several")):
            self._warn(
                f"The planned loss had {'no' if means else 'a'} cross entropy with targets to count, and this one has "
                f"{'one' if means else 'none'}"
            )
        nodes = _last_nodes(loss)
        names = [node.name() for node in nodes]
        known = self._known.setdefault(samples == 1, names)
        if names != known:
            self._warn(
                f"The loss of this batch ends in other ops ({_shown(names)}) than that of the first ({_shown(known)}), "
                "for which it was found what each piece counts"
            )
        divisions = (node for node in nodes if isinstance(node, DIVISION_NODES))
        self._divisors.append([divisor for node in divisions for divisor in _divisor(node)])

    def finish(self, shares: Sequence[Any]) -> None:
        """Check that each divisor is the same in all pieces, or grows as what a piece counts."""
        self._compared += 1
        divisors = [] if self._proved is not None and self._compared > _COMPARED_STEPS else self._divisors
        if self._has_warned or not any(divisors) or len({len(each) for each in divisors}) != 1:
            return
        weights = torch.stack([torch.as_tensor(share, dtype=torch.float64).cpu() for share in shares]).tolist()
        for column in zip(*divisors, strict=True):
            values = torch.stack([each.double() for each in column]).tolist()  # one wait for the device
            close = _CLOSE.get(column[0].dtype, _CLOSE_IN_16_BITS)
            by_weight = [value / weight for value, weight in zip(values, weights, strict=True) if weight]
            if not _are_alike(values, close) and not _are_alike(by_weight, close):
                self._warn(
                    f"The loss divides by {values[0]:g} in one piece and by {values[-1]:g} in another, which is not in "
                    "proportion to their samples"
                )

    def _warn(self, what: str) -> None:
        """Say it once: every later batch would repeat it."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{what}: the gradients of a batch in pieces are not the full batch's. Pass weight= to "
                "lowtide.microbatch, a function that counts in a batch what the loss is a mean over, or plan with such "
                "a batch.",
                RuntimeWarning,
                stacklevel=4,
            )


def _structure(batch: Any) -> str:
    """The containers and kinds of a batch, without its sizes."""
    leaves, structure = flatten(batch)
    return f"{structure} {[type(leaf).__name__ for leaf in leaves]}"


def _last_nodes(loss: Tensor) -> list[Any]:
    """The nodes of autograd's graph that make numbers, from the loss back to what has dimensions."""

    def is_number(node: Any) -> bool:
        return node is loss.grad_fn or not any(each.shape for each in input_metadata(node))

    return list(islice(filter(is_number, nodes_behind(loss, is_number)), _MOST_NODES))


def _divisor(node: Any) -> list[Tensor]:
    """The number that a division keeps, if no saved-tensor hook stands before it."""
    try:
        (divisor,) = saved_tensors(node, "other")
    except (AttributeError, RuntimeError):
        return []
    return [divisor.detach()] if divisor.ndim == 0 else []


def _are_alike(values: list[float], close: float) -> bool:
    return all(math.isclose(value, values[0], rel_tol=close) for value in values)


def _shown(names: list[str]) -> str:
    return ", ".join(name.removesuffix("0").removesuffix("Backward") for name in names[:4])
