"""The last ops of a loss, looked at in every piece: another branch, or a divisor that is not the pieces' share.

The first batch tells what a piece counts, or a proof for it does. A later batch may take another branch of the loss, or
show that the loss divides by a count of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.autograd import DIVISION_NODES, input_metadata
from lowtide.techniques.microbatch.counts import nodes_behind, saved_tensors

_MOST_NODES = 64
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}
_CLOSE_IN_16_BITS = 2e-2


class Endings:
    """Compares the losses of pieces with the first one, and warns once."""

    def __init__(self) -> None:
        self._known: dict[bool, list[str]] = {}  # op names; apart for single samples, whose dimensions may be squeezed
        self._has_warned = False

    def look(self, loss: Tensor, samples: int) -> list[Tensor]:
        """Check how a loss ends; gives the numbers that it is divided by on its way."""
        nodes = _last_nodes(loss)
        names = [node.name() for node in nodes]
        known = self._known.setdefault(samples == 1, names)
        if names != known:
            self.warn(
                f"The loss of this batch ends in other ops ({_shown(names)}) than that of the first ({_shown(known)}), "
                "for which it was found what each piece counts"
            )
        return [divisor for node in nodes if isinstance(node, DIVISION_NODES) for divisor in _divisor(node)]

    def compare(self, divisors: Sequence[Sequence[Tensor]], shares: Sequence[Any]) -> None:
        """Check that each divisor is the same in all pieces, or grows as what a piece counts."""
        if self._has_warned or len({len(each) for each in divisors}) != 1 or not divisors[0]:
            return
        weights = torch.stack([torch.as_tensor(share, dtype=torch.float64).cpu() for share in shares]).tolist()
        for column in zip(*divisors, strict=True):
            values = torch.stack([each.double() for each in column]).tolist()  # one wait for the device
            close = _CLOSE.get(column[0].dtype, _CLOSE_IN_16_BITS)
            by_weight = [value / weight for value, weight in zip(values, weights, strict=True) if weight]
            if not _are_alike(values, close) and not _are_alike(by_weight, close):
                self.warn(
                    f"The loss divides by {values[0]:g} in one piece and by {values[-1]:g} in another, which is not in "
                    "proportion to their samples"
                )

    def warn(self, what: str) -> None:
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
