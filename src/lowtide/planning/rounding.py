"""Compare results of two runs of a step: equal bit for bit, or within rounding.

The error of rounding depends on the step, so it is measured. The plain step runs once more with each parameter moved by
one unit in the last place. The change of its results is the scale for other differences.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowtide.batches import with_own_containers
from lowtide.compat.autograd import gradient_hooks, tensor_hooks
from lowtide.tracing.snapshot import unchanged
from lowtide.tracing.step_state import parameters_of
from lowtide.workload import Workload

Part = Mapping[str, Tensor]  # such as gradients, by name
Parts = Mapping[str, Part]

_FACTOR = 8.0  # two ways to round can lie this many times further apart than one unit in each parameter moves them
_FLOOR = 4.0  # units in the last place that a norm may be off where parameters do not matter
_MOST = 1.2e-2  # that a whole part may be off, however coarse its numbers and however far rounding carries
_AS_NEAR = 2.0  # times the plain step's distance from an exact one
_NOTHING = 1e-6  # the share of all tensors below which one is rounding alone


def loss_and_gradients(work: Workload, *, moved_by: float = 0.0) -> Parts:
    """Run one forward and backward pass of the plain step, copy its results to the host, restore everything.

    ``moved_by`` moves each parameter by that share of itself, up or down.
    """
    with unchanged(work):
        if moved_by:
            _move(parameters_of(work), moved_by)
        loss = work.compute_loss(batch=with_own_containers(work.batch))
        loss.backward()
        return {
            "loss": {"loss": on_host(loss)},
            "gradients": {name: on_host(p.grad) for name, p in named(work).items() if p.grad is not None},
            "buffers": {name: on_host(buffer) for name, buffer in work.model.named_buffers()},
            "generators": generators(work),
        }


def named(work: Workload) -> dict[str, Tensor]:
    """The parameters of a step, each once: by its name in the model, or by a number.

    Without those that have hooks, which may change or take their gradients.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in work.model.named_parameters()}
    parameters = {names.get(parameter, str(i)): parameter for i, parameter in enumerate(parameters_of(work))}
    return {name: p for name, p in parameters.items() if not tensor_hooks(p) and not gradient_hooks(p)}


def generators(work: Workload) -> dict[str, Tensor]:
    """The states of the generators that a step draws from."""
    states = {"cpu": torch.get_rng_state()}
    if work.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(work.device)
    return states


def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory."""
    return tensor.detach().to("cpu", copy=True)


class Rounding:
    """Rounding error of a step, measured by a run with perturbed parameters beside the ``plain`` one."""

    def __init__(self, work: Workload, plain: Parts | None = None) -> None:
        plain = loss_and_gradients(work) if plain is None else plain
        unit = coarsest_unit(work)
        moved = loss_and_gradients(work, moved_by=unit)
        self._scales: dict[str, float] = {}
        self._moves: dict[tuple[str, str], float] = {}
        for what in ("loss", "gradients", "buffers"):
            part = {name: moved[what][name] for name in plain[what]}
            self._scales[what] = max(_FACTOR * distance(plain[what], part), _FLOOR * unit)
            self._moves.update({(what, name): norms(t, part[name])[1] for name, t in plain[what].items()})

    def explains(self, what: str, plain: Part, other: Part) -> bool:
        """Tell whether each tensor of a part is off by no more than rounding.

        A tensor may be off by the part's scale, relative to its own norm. A tensor that is zero but for rounding may be
        off by its own change. All together may be off by 1.2%.
        """
        if what not in self._scales or plain.keys() != other.keys():
            return parts_equal(plain, other)
        if distance(plain, other) > _MOST:
            return False
        sizes = {name: norms(tensor, other[name]) for name, tensor in plain.items()}
        nothing = _NOTHING * math.hypot(*(size for size, _ in sizes.values()))
        return all(
            off <= max(self._scales[what] * size, _FACTOR * self._moves.get((what, name), 0.0), nothing)
            for name, (size, off) in sizes.items()
        )

    def is_as_near(self, what: str, exact: Part, plain: Part, other: Part) -> bool:
        """Tell whether each tensor is at most twice as far from the exact one as the plain one is.

        Or as far as rounding carries it, within 1.2%. The exact and the plain one must be finite.
        """
        if what not in self._scales or not exact.keys() == plain.keys() == other.keys():
            return parts_equal(plain, other)
        sizes = {name: norms(tensor, other[name]) for name, tensor in exact.items()}
        nothing = _NOTHING * math.hypot(*(size for size, _ in sizes.values()))
        share = min(self._scales[what], _MOST)
        finite = all(bool(tensor.isfinite().all()) for part in (exact, plain) for tensor in part.values())
        return finite and all(
            off <= max(_AS_NEAR * norms(exact[name], plain[name])[1], share * size, nothing)
            for name, (size, off) in sizes.items()
        )


@contextmanager
def in_32_bits() -> Generator[None]:
    """Run a block without TensorFloat-32, and with PyTorch's own kernels in place of cuDNN's."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def coarsest_unit(work: Workload) -> float:
    """The unit in the last place, relative to 1, of the coarsest numbers that a step computes with."""
    dtypes = {p.dtype for p in work.model.parameters() if p.is_floating_point() or p.is_complex()}
    dtypes |= {work.autocast} if work.autocast is not None else set()
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps)
    return max(coarsest, 2**-10) if work.device.type == "cuda" else coarsest  # that of TensorFloat-32


def parts_equal(plain: Part, other: Part) -> bool:
    """Tell whether two parts have the same tensors, bit for bit."""
    return plain.keys() == other.keys() and all(is_equal(tensor, other[name]) for name, tensor in plain.items())


def is_equal(plain: Tensor, other: Tensor) -> bool:
    """Compare bit for bit; NaN at the same positions is equal."""
    plain, other = _dense(plain), _dense(other)
    if torch.equal(plain, other):
        return True
    return plain.shape == other.shape and bool(_same(plain, other).all())


def norms(plain: Tensor, other: Tensor) -> tuple[float, float]:
    """Norm of the plain tensor's finite part, and of the difference; infinite if one is NaN."""
    if plain.shape != other.shape:
        return 0.0, math.inf
    wide = torch.complex128 if plain.is_complex() else torch.float64
    exact, rounded = _dense(plain).to(wide), _dense(other).to(wide)
    off = float(torch.where(_same(exact, rounded), 0.0, rounded - exact).norm())
    return float(torch.where(exact.isfinite(), exact, 0.0).norm()), math.inf if math.isnan(off) else off


def distance(plain: Part, other: Part) -> float:
    """The relative error of all tensors together. A gradient that is zero but for noise has no relative error alone."""
    if plain.keys() != other.keys():
        return math.inf
    sizes = [norms(tensor, other[name]) for name, tensor in plain.items()]
    size, off = math.hypot(*(size for size, _ in sizes)), math.hypot(*(off for _, off in sizes))
    return off / size if size else off


def _move(parameters: list[Tensor], share: float) -> None:
    chosen: Any = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.is_floating_point() and parameter.layout is torch.strided:
                signs = torch.randint(2, parameter.shape, generator=chosen).mul_(2).sub_(1)
                parameter.mul_((1 + share * signs).to(parameter.device, parameter.dtype))


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _same(plain: Tensor, other: Tensor) -> Tensor:
    return (plain == other) | (plain.isnan() & other.isnan())
