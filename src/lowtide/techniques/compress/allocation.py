"""Which layer's activations get how many bits, under a budget of bytes: the least expected variance of the gradients.

Rounding a value at random to one of 2^b levels over the range R of its group has the variance R²·f(1 - f) / (2^b - 1)²,
on average over the fraction f one sixth of R² / (2^b - 1)². A linear layer's weight gradient dYᵀX takes it on times the
squared norm of dY's row. So a layer costs variance / (2^b - 1)², with one number for each layer that ``measure_layers``
reads off one step. Bits are chosen exactly, by dynamic programming over what is not dominated (ActNN, Chen et al.,
2021, allocates greedily).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.kernels.compress import BITS, GROUP, buffer_bytes
from lowtide.nn.compress import compressed, sensitive
from lowtide.sizes import format_size
from lowtide.workload import Workload

KEPT = 0  # bits of what stays as it is
_POINTS = 1 << 15  # of the frontier that are followed: far more than layers of a few sizes ever have


@dataclass(frozen=True, slots=True)
class Layer:
    """What a module saves: its bytes as they are and in 2, 4 and 8 bits, and how much rounding it costs."""

    path: str
    kept_bytes: int
    stored_bytes: tuple[int, int, int]  # in 2, 4 and 8 bits
    variance: float = 1.0  # of the gradients, were its values rounded to one of two levels

    def bytes(self, bits: int) -> int:
        """Of what is kept for backward."""
        return self.kept_bytes if bits == KEPT else self.stored_bytes[BITS.index(bits)]

    def cost(self, bits: int) -> float:
        """The expected variance that it adds to the gradients."""
        return 0.0 if bits == KEPT else self.variance / ((1 << bits) - 1) ** 2


def allocate_bits(
    layers: Sequence[Layer], budget_bytes: int, *, choices: Sequence[int] = (*BITS, KEPT)
) -> tuple[int, ...]:
    """Bits for each layer, 0 for one that is kept as it is: the least variance whose bytes fit the budget.

    >>> layers = [Layer("a", 4096, (272, 528, 1040), 9.0), Layer("b", 4096, (272, 528, 1040), 1.0)]
    >>> allocate_bits(layers, 1600)
    (8, 4)
    """
    costs = np.zeros(1)
    sizes = np.zeros(1, np.int64)
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # of each point: the one before it, and the choice
    least = sum(min(layer.bytes(bits) for bits in choices) for layer in layers)
    if least > budget_bytes:
        raise LowtideError(
            f"{format_size(budget_bytes)} is below what all layers take in the fewest bits ({format_size(least)})",
            hint="Raise the budget.",
        )
    for layer in layers:
        more = np.array([layer.bytes(bits) for bits in choices], np.int64)
        worse = np.array([layer.cost(bits) for bits in choices])
        least -= int(more.min())
        all_sizes, all_costs = (sizes[:, None] + more).ravel(), (costs[:, None] + worse).ravel()
        found = np.flatnonzero(all_sizes <= budget_bytes - least)
        found = found[_frontier(all_sizes[found], all_costs[found])]
        steps.append((found // len(choices), found % len(choices)))
        sizes, costs = all_sizes[found], all_costs[found]
    at = int(np.argmin(costs))
    bits: list[int] = []
    for before, choice in reversed(steps):
        bits.append(choices[int(choice[at])])
        at = int(before[at])
    return tuple(reversed(bits))


def measure_layers(work: Workload, paths: Sequence[str], *, group: int = GROUP) -> list[Layer]:
    """What rounding would cost each of these modules, from one forward and backward pass.

    Gradients and parameters are afterwards as they were; buffers such as running statistics have seen the step.
    """
    seen: set[tuple[int, int, int]] = set()
    found = {path: _Measured(seen) for path in paths}
    before = [(parameter, parameter.grad) for parameter in work.model.parameters()]
    with ExitStack() as stack:
        for path, measured in found.items():
            stack.callback(measured.watch(work.model.get_submodule(path), group))
        for parameter, _ in before:
            parameter.grad = None
        work.compute_loss().backward()
    for parameter, gradient in before:
        parameter.grad = gradient
    return [measured.layer(path) for path, measured in found.items()]


def _frontier(sizes: NDArray[np.int64], costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """The points that no other one beats in both, smallest first; a sample of them where they are very many."""
    order = np.lexsort((costs, sizes))
    best = np.minimum.accumulate(costs[order])
    better = np.concatenate([[True], best[1:] < best[:-1]])
    kept = order[better]
    if len(kept) > _POINTS:
        kept = kept[np.linspace(0, len(kept) - 1, _POINTS).astype(np.int64)]
    return kept


class _Measured:
    """One module while a step runs: bytes and ranges of what it saves, and the gradient of what it returns."""

    def __init__(self, seen: set[tuple[int, int, int]]) -> None:
        self.kept_bytes = 0
        self.stored_bytes = [0] * len(BITS)
        self.spread: Tensor | float = 0.0  # the sum of its values' squared ranges
        self.weight: Tensor | float = 0.0  # the mean squared norm of a row of the gradient
        self._seen = seen  # by any of the modules: what two of them save is the first one's

    def watch(self, module: nn.Module, group: int) -> Any:
        contexts: list[Any] = []

        def keep(tensor: Tensor) -> bool:
            if not sensitive(tensor):
                self._saw(tensor, group)
            return True

        def enter(_module: nn.Module, _args: Any) -> None:
            contexts.append(compressed(BITS[-1], group=group, keep=keep))
            contexts[-1].__enter__()

        def leave(_module: nn.Module, _args: Any, out: Any) -> None:
            contexts.pop().__exit__(None, None, None)
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._came)

        handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        return lambda: [handle.remove() for handle in handles]

    def layer(self, path: str) -> Layer:
        variance = float(self.spread) * float(self.weight) / 6
        two, four, eight = self.stored_bytes
        return Layer(path, self.kept_bytes, (two, four, eight), variance)

    def _saw(self, tensor: Tensor, group: int) -> None:
        key = tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()
        if key in self._seen:
            return
        self._seen.add(key)
        values = tensor.detach().reshape(-1)
        missing = -len(values) % group
        values = torch.cat([values, values[-1:].expand(missing)]).view(-1, group).double()
        self.spread = self.spread + (values.amax(1) - values.amin(1)).square().sum() * group
        self.kept_bytes += tensor.numel() * tensor.itemsize
        for i, bits in enumerate(BITS):
            self.stored_bytes[i] += buffer_bytes(tensor.numel(), bits, group, tensor.dtype)

    def _came(self, gradient: Tensor) -> None:
        rows = max(1, gradient.numel() // gradient.shape[-1]) if gradient.dim() else 1
        self.weight = self.weight + gradient.detach().double().square().sum() / rows
