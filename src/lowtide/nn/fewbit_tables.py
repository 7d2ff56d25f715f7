"""The best few slopes for an activation, and the inputs that share each.

Dynamic programming over a grid finds the step function q with K steps that minimises ∫(f'−q)²w (Novikov et al., 2022,
https://arxiv.org/abs/2202.00441). The density of the input is w:

    D(j, k) = min over i < j of D(i, k−1) + T(i, j)      T(i, j) = ∫f'²w − (∫f'w)²/∫w, from point i to point j

Dynamic programming then moves all boundaries off the grid at once, each to one of a few points near it, over ever
smaller distances. The first and the last step reach to infinity.

Tables for the standard normal density are shipped in ``fewbit_tables.json``, which this program writes:

    python -m lowtide.nn.fewbit_tables
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lowtide.errors import LowtideError
from lowtide.kernels.activations import CURVES, Activation

DATA = Path(__file__).with_name("fewbit_tables.json")
BITS = range(1, 9)

_Array = NDArray[np.float64]
_CELLS = 1600
_ROUNDS = 30  # each halves the distances


@dataclass(frozen=True)
class Table:
    """A step function: ``levels[i]`` from ``boundaries[i-1]`` on, up to ``boundaries[i]``."""

    boundaries: tuple[float, ...]
    levels: tuple[float, ...]
    rmse: float  # √∫(f'−q)²w


class Density(Protocol):
    """A density of inputs: it knows the integrals of w, f'w and f'²w from −∞."""

    def grid(self, curve: Activation) -> _Array:
        """Points among which the boundaries are sought first, in order."""
        ...

    def integrals(self, curve: Activation) -> Callable[[_Array], _Array]:
        """A function of points that gives the three integrals up to each, as rows, at ±∞ too."""
        ...


@dataclass(frozen=True)
class Normal:
    """Inputs as a normal distribution gives them."""

    mean: float = 0.0
    deviation: float = 1.0

    def grid(self, curve: Activation) -> _Array:
        return _spread(curve, self.mean - 8 * self.deviation, self.mean + 8 * self.deviation, self._density)

    def integrals(self, curve: Activation) -> Callable[[_Array], _Array]:
        # Beyond 39 deviations the density is 0 in float64.
        ends = self.mean - 39 * self.deviation, self.mean + 39 * self.deviation
        return _quadrature(curve, *ends, self._density, self._mass)

    def _density(self, x: _Array) -> _Array:
        z = (x - self.mean) / self.deviation
        return np.exp(-0.5 * z * z) / (self.deviation * math.sqrt(2 * math.pi))

    def _mass(self, x: _Array) -> _Array:
        return torch.special.ndtr(torch.from_numpy((x - self.mean) / self.deviation)).numpy()


@dataclass(frozen=True)
class Uniform:
    """Inputs anywhere between two points with equal chance."""

    low: float = -5.0
    high: float = 5.0

    def grid(self, curve: Activation) -> _Array:
        return _spread(curve, self.low, self.high, self._density)

    def integrals(self, curve: Activation) -> Callable[[_Array], _Array]:
        return _quadrature(curve, self.low, self.high, self._density, self._mass)

    def _density(self, x: _Array) -> _Array:
        return np.full_like(x, 1 / (self.high - self.low))

    def _mass(self, x: _Array) -> _Array:
        return np.clip((x - self.low) / (self.high - self.low), 0.0, 1.0)


class Samples:
    """Inputs as they were seen: the sums over them are exact."""

    def __init__(self, values: torch.Tensor | Sequence[float]) -> None:
        flat = np.asarray(torch.as_tensor(values).detach().double().cpu().flatten().numpy(), np.float64)
        self._values: _Array = np.sort(flat[np.isfinite(flat)])
        if not self._values.size:
            raise LowtideError("There is no finite number among the samples", hint="Give some inputs of the layer.")

    @property
    def values(self) -> torch.Tensor:
        """The finite ones, in order."""
        return torch.from_numpy(self._values.copy())

    def grid(self, curve: Activation) -> _Array:
        distinct = np.unique(self._values)
        points = (distinct[1:] + distinct[:-1]) / 2
        if points.size > _CELLS:
            points = points[np.linspace(0, points.size - 1, _CELLS).astype(int)]
        return points

    def integrals(self, curve: Activation) -> Callable[[_Array], _Array]:
        slopes = _slope(curve, self._values)
        sums = np.zeros((3, self._values.size + 1))
        np.cumsum(np.stack([np.ones_like(slopes), slopes, slopes**2]) / slopes.size, axis=1, out=sums[:, 1:])
        return lambda points: sums[:, np.searchsorted(self._values, points)]


def find_table(curve: Activation, bits: int, density: Density) -> Table:
    """Compute the best table.

    >>> round(find_table(Activation.pointwise("gelu"), 3, Normal()).rmse, 4)
    0.0437
    """
    return find_tables(curve, [bits], density)[0]


def find_tables(curve: Activation, bits: Sequence[int], density: Density) -> list[Table]:
    """Tables of several sizes, for hardly more than the largest takes."""
    integrals = density.integrals(curve)
    grid = density.grid(curve)
    points = np.concatenate([[-np.inf], grid, [np.inf]])
    before = _programme(integrals(points), max(2**b for b in bits))
    tables: list[Table] = []
    for wanted in bits:
        at, chosen = points.size - 1, list[int]()
        for k in range(2**wanted - 1, 0, -1):
            at = int(before[k, at])
            chosen.append(at)
        # Few samples need no more steps: those left over are empty, and go to the end.
        inner = points[[i for i in reversed(chosen) if i > 0]]
        boundaries = _refined(inner, grid, integrals) if inner.size else inner
        boundaries = np.concatenate([boundaries, np.full(2**wanted - 1 - boundaries.size, np.inf)])
        tables.append(_table(boundaries, integrals))
    return tables


def table_of(curve: Activation, bits: int, density: str | Density | torch.Tensor = "normal") -> Table:
    """Return the table for an activation: a shipped one, or one computed now and cached."""
    if bits not in BITS:
        raise LowtideError(f"bits={bits!r} is not a number of bits", hint="Few-bit backward has 1 to 8.")
    if isinstance(density, torch.Tensor):
        return find_table(curve, bits, Samples(density))
    if isinstance(density, str):
        if density not in _DENSITIES:
            raise LowtideError(
                f"Unknown density {density!r}", hint="Use 'normal', 'uniform', Normal(...), Uniform(...), or samples."
            )
        density = _DENSITIES[density]
    if density == Normal() and curve.name in CURVES and curve == Activation.pointwise(curve.name):
        return _shipped()[f"{curve.name}/{bits}"]
    return _remembered(curve, bits, density)


_DENSITIES: dict[str, Density] = {"normal": Normal(), "uniform": Uniform()}


_remembered = lru_cache(maxsize=256)(find_table)


@cache
def _shipped() -> dict[str, Table]:
    stored = json.loads(DATA.read_text())
    return {key: Table(tuple(t["boundaries"]), tuple(t["levels"]), t["rmse"]) for key, t in stored.items()}


# -- dynamic programming ---------------------------------------------------------------------------------


def _programme(sums: _Array, levels: int) -> NDArray[np.int16]:
    """For k steps that end at point j: where the last of them begins.

    T is of no shape that would allow a search in less than all pairs: f' may rise and fall. All pairs are one array.
    """
    mass, first, second = sums
    count = mass.size
    cost = _cost(*(row[None, :] - row[:, None] for row in (mass, first, second)))
    cost[np.tril_indices(count, -1)] = np.inf  # a step may be empty
    # By destination: minima are then over rows, which are contiguous. Single precision halves the time, and what it
    # may miss is far below what moving off the grid gains.
    cost = np.ascontiguousarray(cost.T.astype(np.float32))
    before = np.zeros((levels, count), np.int16)
    best = cost[:, 0].copy()
    total = np.empty_like(cost)
    for k in range(1, levels):
        np.add(cost, best[None, :], out=total)
        before[k] = total.argmin(1)
        best = total[np.arange(count), before[k]]
    return before


def _cost(mass: _Array, first: _Array, second: _Array) -> _Array:
    """T from the three integrals over a step; 0 where there is no mass."""
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = second - np.where(mass > 0, first * first / mass, 0.0)
    return np.maximum(cost, 0.0)


def _refined(boundaries: _Array, grid: _Array, integrals: Callable[[_Array], _Array]) -> _Array:
    """Boundaries off the grid: every one moves to the best of nine points near it, all at once, time and again."""
    place = np.searchsorted(grid, boundaries)
    wide = np.concatenate([grid[:1], grid, grid[-1:]])
    reach = np.maximum(wide[place + 2] - wide[place + 1], wide[place + 1] - wide[place])
    offsets = np.linspace(-1, 1, 9)
    start, end = (integrals(np.array([point])) for point in (-np.inf, np.inf))
    for _ in range(_ROUNDS):
        near = boundaries[:, None] + reach[:, None] * offsets
        sums = integrals(near.ravel()).reshape(3, *near.shape)
        best = _cost(*(sums[:, 0] - start))
        came = np.zeros(near.shape, np.intp)
        for i in range(1, len(near)):
            cost = _cost(*(sums[:, i, None, :] - sums[:, i - 1, :, None]))
            cost[near[i][None, :] < near[i - 1][:, None]] = np.inf
            total = best[:, None] + cost
            came[i] = total.argmin(0)
            best = total.min(0)
        at = int((best + _cost(*(end - sums[:, -1]))).argmin())
        moved = np.empty_like(boundaries)
        for i in range(len(near) - 1, -1, -1):
            moved[i] = near[i, at]
            at = int(came[i, at])
        boundaries, reach = moved, reach / 2
    return boundaries


def _table(boundaries: _Array, integrals: Callable[[_Array], _Array]) -> Table:
    """The best levels for some boundaries: f' averaged over each step."""
    sums = integrals(np.concatenate([[-np.inf], boundaries, [np.inf]]))
    mass, first, second = np.diff(sums, axis=1)
    levels = np.divide(first, mass, out=np.zeros_like(first), where=mass > 0)
    for i in np.flatnonzero(mass <= 0):  # nothing falls there: as its neighbour
        levels[i] = levels[i - 1] if i else levels[np.argmax(mass > 0)]
    error = math.sqrt(float(_cost(mass, first, second).sum()))
    return Table(tuple(boundaries.tolist()), tuple(levels.tolist()), error)


# -- integrals -------------------------------------------------------------------------------------------

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def _slope(curve: Activation, x: _Array) -> _Array:
    return curve.slope(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def _spread(curve: Activation, low: float, high: float, density: Callable[[_Array], _Array]) -> _Array:
    """Points for the boundaries: half of them evenly, half where many steps will be, which is as (f''²w)^⅓ says."""
    x = np.linspace(low, high, 20001)
    rate = np.cbrt(np.gradient(_slope(curve, x), x) ** 2 * density(x)) + 1e-12
    share = np.cumsum(rate / rate.sum() + 1 / x.size)
    points = np.interp(np.linspace(share[0], share[-1], _CELLS), share, x)
    bends = [bend for bend in curve.bends if low < bend < high]
    return np.unique(np.concatenate([points, bends]))


def _quadrature(
    curve: Activation, low: float, high: float, density: Callable[[_Array], _Array], mass: Callable[[_Array], _Array]
) -> Callable[[_Array], _Array]:
    """∫w by its formula, ∫f'w and ∫f'²w by Gauss's rule between knots, of which bends are some."""
    bends = [bend for bend in curve.bends if low < bend < high]
    knots = np.unique(np.concatenate([np.linspace(low, high, 1561), bends]))

    def between(left: _Array, right: _Array) -> _Array:
        half = (right - left)[:, None] / 2
        x = left[:, None] + half * (1 + _NODES)
        slope = _slope(curve, x.ravel()).reshape(x.shape)
        weighted = density(x) * _WEIGHTS * half
        return np.stack([(slope * weighted).sum(1), (slope * slope * weighted).sum(1)])

    up_to = np.zeros((2, knots.size))
    np.cumsum(between(knots[:-1], knots[1:]), axis=1, out=up_to[:, 1:])

    def integrals(points: _Array) -> _Array:
        inside = np.clip(points, low, high)
        left = np.clip(np.searchsorted(knots, inside, side="right") - 1, 0, knots.size - 1)
        return np.concatenate([mass(points)[None], up_to[:, left] + between(knots[left], inside)])

    return integrals


def write() -> None:
    """Write the shipped tables: all curves, 1 to 8 bits, the standard normal density."""
    stored: dict[str, Any] = {}
    for name in CURVES:
        for bits, table in zip(BITS, find_tables(Activation.pointwise(name), list(BITS), Normal()), strict=True):
            stored[f"{name}/{bits}"] = {
                "rmse": float(f"{table.rmse:.7g}"),
                "boundaries": [_short(value) for value in table.boundaries],
                "levels": [_short(value) for value in table.levels],
            }
            print(f"{name:<12}{bits} bits  RMSE {table.rmse:.5f}")
    lines = [f'"{key}": {json.dumps(value)}' for key, value in stored.items()]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _short(value: float) -> float:
    """To seven places, of which 0 is one: an optimum is flat, and float32 holds no more."""
    return round(value, 7) + 0.0


if __name__ == "__main__":
    write()
