"""Bits for each layer's activations under a budget of bytes: the least expected variance of the gradients.

Values are rounded at random to one of 2^b levels over the range R of their group. On average that has one sixth of the
variance R² / (2^b - 1)². A linear layer's weight gradient dYᵀX multiplies it by the squared norm of dY's row. So a
layer costs variance / (2^b - 1)², with one number that ``measure_layers`` reads off one step. Dynamic programming over
the points that are not dominated chooses bits exactly (ActNN, Chen et al., 2021, allocates greedily).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lowtide.compat.tensors import storage_id
from lowtide.errors import LowtideError
from lowtide.kernels.compress import BITS, GROUP, buffer_bytes, check
from lowtide.nn.compress import Hooks, sensitive
from lowtide.nn.rebuild import SavedTensor
from lowtide.nn.scopes import may_open
from lowtide.sizes import format_size
from lowtide.workload import Workload

KEPT = 0  # bits of an uncompressed layer
_POINTS = 1 << 15  # of the frontier that are followed: far more than layers of a few sizes ever have


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Saved bytes of a module, plain and in 2, 4 and 8 bits, and the cost of rounding them."""

    path: str
    kept_bytes: int
    stored_bytes: tuple[int, int, int]  # in 2, 4 and 8 bits
    variance: float = 1.0  # of the gradients, were its values rounded to one of two levels

    @classmethod
    def of(
        cls, path: str, tensors: Sequence[tuple[int, torch.dtype]], *, group: int = GROUP, variance: float | None = None
    ) -> LayerCosts:
        """A module that saves tensors of these lengths; without a variance, all values matter the same."""
        two, four, eight = (sum(buffer_bytes(numel, bits, group, dtype) for numel, dtype in tensors) for bits in BITS)
        whole = sum(numel * dtype.itemsize for numel, dtype in tensors)
        values = float(sum(numel for numel, _ in tensors))
        return cls(path, whole, (two, four, eight), values if variance is None else variance)

    def bytes(self, bits: int) -> int:
        """Bytes saved for backward."""
        return self.kept_bytes if bits == KEPT else self.stored_bytes[BITS.index(bits)]

    def cost(self, bits: int) -> float:
        """The expected variance that it adds to the gradients."""
        return 0.0 if bits == KEPT else self.variance / ((1 << bits) - 1) ** 2


def allocate_bits(
    layers: Sequence[LayerCosts], budget_bytes: int, *, choices: Sequence[int] = (*BITS, KEPT)
) -> tuple[int, ...]:
    """Bits for each layer, 0 for no compression: the least variance whose bytes fit the budget.

    >>> layers = [LayerCosts("a", 4096, (272, 528, 1040), 9.0), LayerCosts("b", 4096, (272, 528, 1040), 1.0)]
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
        points = np.flatnonzero(all_sizes <= budget_bytes - least)
        points = points[_frontier(all_sizes[points], all_costs[points])]
        steps.append((points // len(choices), points % len(choices)))
        sizes, costs = all_sizes[points], all_costs[points]
    at = int(np.argmin(costs))
    bits: list[int] = []
    for before, choice in reversed(steps):
        bits.append(choices[int(choice[at])])
        at = int(before[at])
    return tuple(reversed(bits))


def measure_layers(work: Workload, paths: Sequence[str], *, group: int = GROUP) -> list[LayerCosts]:
    """Measure the cost of rounding in each of these modules, from one forward and backward pass.

    Gradients and parameters are afterwards as they were; buffers such as running statistics have seen the step.
    """
    check(BITS[-1], group)
    seen: set[_Key] = set()
    modules = {path: _MeasuredModule(seen, group) for path in paths}
    before = [(parameter, parameter.grad) for parameter in work.model.parameters()]
    try:
        with ExitStack() as stack:
            for path, measured in modules.items():
                measured.watch(work.model.get_submodule(path), stack)
            for parameter, _ in before:
                parameter.grad = None
            work.compute_loss().backward()
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
    return [measured.layer(path) for path, measured in modules.items()]


def _frontier(sizes: NDArray[np.int64], costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """The points that no other one beats in both, smallest first; a sample of them where they are very many."""
    order = np.lexsort((costs, sizes))
    best = np.minimum.accumulate(costs[order])
    better = np.concatenate([[True], best[1:] < best[:-1]])
    points = order[better]
    if len(points) > _POINTS:
        points = points[np.linspace(0, len(points) - 1, _POINTS).astype(np.int64)]
    return points


class _MeasuredModule:
    """One module while a step runs: bytes and ranges of its saved values, and its outputs' gradients."""

    def __init__(self, seen: set[_Key], group: int) -> None:
        self.group = group
        self.weight: Tensor | float = 0.0  # the mean squared norm of a row of the gradient
        self._parts: dict[_Key, _Part] = {}
        self._seen = seen  # by any of the modules: what two of them save is the first one's

    def watch(self, module: nn.Module, stack: ExitStack) -> None:
        contexts: list[ExitStack] = []

        def enter(_module: nn.Module, _args: Any) -> None:
            contexts.append(stack.enter_context(ExitStack()))  # which closes what a call that failed leaves open
            contexts[-1].enter_context(_Watching(self).open() if may_open() else nullcontext())

        def leave(_module: nn.Module, _args: Any, out: Any) -> None:
            contexts.pop().close()
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._came)

        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(module.register_forward_hook(leave).remove)

    def layer(self, path: str) -> LayerCosts:
        parts = self._parts.values()
        variance = sum(float(part.spread) for part in parts) * float(self.weight) / 6
        return LayerCosts.of(path, [(part.numel, part.dtype) for part in parts], group=self.group, variance=variance)

    def saw(self, tensor: Tensor) -> None:
        key, group = _key(tensor), self.group
        if key in self._parts:
            self._parts[key].saves += 1
        if key in self._seen:
            return
        self._seen.add(key)
        values = tensor.detach().reshape(-1)
        missing = -len(values) % group
        values = torch.cat([values, values[-1:].expand(missing)]).view(-1, group).double()
        spread = (values.amax(1) - values.amin(1)).square().sum() * group
        self._parts[key] = _Part(tensor.numel(), tensor.dtype, spread)

    def saw_not(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._parts:
            self._parts[key].saves -= 1
            if not self._parts[key].saves:
                del self._parts[key]
                self._seen.remove(key)

    def _came(self, gradient: Tensor) -> None:
        rows = max(1, gradient.numel() // gradient.shape[-1]) if gradient.dim() else 1
        self.weight = self.weight + gradient.detach().double().square().sum() / rows


class _Watching(Hooks):
    """Keeps all, and tells what would be stored."""

    def __init__(self, measured: _MeasuredModule) -> None:
        super().__init__(BITS[-1], measured.group, self._watch)
        self._measured = measured
        self._put_back: set[int] = set()  # a result may be saved by others too

    def _watch(self, tensor: Tensor) -> bool:
        if not sensitive(tensor):
            self._measured.saw(tensor)
        return True

    def save_exactly(self, packed: Any) -> None:
        if isinstance(packed, SavedTensor) and id(packed) not in self._put_back:
            self._put_back.add(id(packed))
            self._measured.saw_not(packed.tensor)


@dataclass(slots=True)
class _Part:
    """A tensor that would be stored."""

    numel: int
    dtype: torch.dtype
    spread: Tensor  # the sum of its values' squared ranges
    saves: int = 1


_Key = tuple[int, int, int]


def _key(tensor: Tensor) -> _Key:
    return storage_id(tensor.untyped_storage()), int(tensor.storage_offset()), tensor.numel()
