"""Randomized linear layers as a technique: which layers alone hold their inputs, and what a sketch of those would save.

A linear layer needs its input for the weight's gradient only. Where nobody else keeps that input for backward, a random
sketch of it can be kept instead. A ReLU or an attention before the layer keeps its own output: there a sketch would
come on top, and is not offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.kernels.reference.randomized import KINDS, Sketch, SketchKind
from lowtide.nn.hidden_writes import CheckedCalls
from lowtide.nn.randomized import randomized_linear
from lowtide.profiling.devices import find_device
from lowtide.profiling.profile import Profile
from lowtide.techniques.replaced_forward import Forward, apply_at_sites, module_at, replace_forward, runs_as
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Kind, Option, Price, Technique
from lowtide.tracing.graph import Graph, Op, TensorView, kernel_of
from lowtide.undo import Applied, Undo
from lowtide.workload import Workload

RATIOS = (0.5, 0.2, 0.1)


def randomize(
    model: nn.Module,
    paths: Sequence[str] | None = None,
    *,
    ratio: float = 0.2,
    sketch: SketchKind = "rademacher",
    block: int | None = 128,
) -> Undo:
    """Have the ``nn.Linear``s of a model keep sketches of their inputs, all of them or those at ``paths``.

    The class, the parameters and the ``state_dict`` stay; ``undo()`` restores the forwards.

    >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with randomize(model, ratio=0.5):
    ...     print(model[2].forward)
    Randomized(ratio=0.5, sketch='rademacher')
    """
    how = Sketch(sketch, ratio, block)
    if paths is None:
        paths = [path for path, module in model.named_modules() if runs_as(module, nn.Linear)]
        if not paths:
            raise LowtideError("The model has no nn.Linear that could be randomized")
    with Undo() as undo:
        for path in paths:
            undo.add(_put(how, module_at(model, path), path))
        return undo.keep()


class Randomized(Forward):
    """The forward of a ``nn.Linear`` that keeps a sketch of its input."""

    def __init__(self, module: nn.Module, sketch: Sketch) -> None:
        super().__init__(module)
        self.sketch, self.calls = sketch, CheckedCalls()

    def __call__(self, input: Tensor) -> Tensor:
        layer: nn.Linear = self.module  # pyright: ignore[reportAssignmentType]
        return randomized_linear(input, layer.weight, layer.bias, self.sketch, self.calls, training=layer.training)

    def __repr__(self) -> str:
        return f"Randomized(ratio={self.sketch.ratio}, sketch={self.sketch.kind!r})"


@dataclass(frozen=True)
class RandomizedConfig(Config):
    """The share of the input's rows that a sketch keeps, and the kind of sketch."""

    ratio: float = 0.2
    sketch: SketchKind = "rademacher"

    def __post_init__(self) -> None:
        self.require("ratio", float, above=0)
        self.require_one_of("sketch", KINDS)
        if self.ratio > 1:
            self.refuse("ratio", "is more than all rows")


class RandomizedLinears(Technique):
    """Linear layers that keep a random sketch of their input: ``ratio`` times its bytes, and an unbiased gradient."""

    name = "randomized"
    kind: Kind = "module"
    config: type[Config] = RandomizedConfig
    needs = "a nn.Linear whose input nobody else keeps for backward"

    def options(self, profile: Profile) -> list[Option]:
        """All layers whose input would be freed, for each ratio."""
        inputs = _Inputs(profile.graph)
        sites = {ratio: inputs.worthwhile(Sketch(ratio=ratio)) for ratio in RATIOS}
        return [Option(self.name, site, RandomizedConfig(ratio)) for ratio, site in sites.items() if site]

    def price(self, option: Option, profile: Profile) -> Price:
        """Inputs are freed after the forward pass; sketches stay, one for all layers that read the same tensor."""
        inputs = _Inputs(profile.graph)
        sketch, sites = _sketch(option), set(option.site)
        last_use, freed = inputs.graph.last_forward_use, [inputs.graph.storages[id] for id in inputs.freed(sites)]
        removed = [Interval(s.bytes, last_use[s.id] + 1, s.death, "sketched instead") for s in freed]
        return Price(
            Fidelity.UNBIASED,
            added=tuple(inputs.added(sites, sketch)),
            removed=tuple(removed),
            compute_seconds=inputs.seconds(sites, sketch),
        )

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Put a randomized forward on every layer; the model is untouched if one cannot take it."""
        return apply_at_sites(work, options, lambda module, path, option: _put(_sketch(option), module, path))

    def check(self, option: Option) -> Check:
        """The loss and all other gradients as they are; weights' gradients right on average."""
        return Check(Fidelity.UNBIASED)


def _sketch(option: Option) -> Sketch:
    config = option.config_as(RandomizedConfig)
    return Sketch(config.sketch, config.ratio)


def _put(sketch: Sketch, module: nn.Module, path: str) -> Undo:
    return replace_forward(Randomized(module, sketch), path=path, instead_of=nn.Linear)


# -- the inputs of linear layers in a traced step ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Read:
    """One call of a linear layer, and the input that it keeps."""

    path: str
    op: int
    x: TensorView
    features: int  # of the output
    source: int  # the storage that the layer was given: that of x, or what autocast made x of


class _Inputs:
    """Inputs that the linear layers of a traced step read and save."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._products: dict[tuple[str, int], Op] = {}  # of the backward pass, by layer and storage of x
        linears = {path for path, kind in graph.modules if kind == "Linear"}
        casts: dict[tuple[str, int], int] = {}
        reads: list[_Read] = []
        for op in graph.ops:
            if op.phase == "forward":
                if op.module in linears and op.kernel == "aten._to_copy":
                    casts[op.module, op.outputs[0].storage] = op.inputs[0].storage
                if op.module in linears and op.kernel in _PRODUCTS:
                    x = op.inputs[-2]
                    source = casts.get((op.module, x.storage), x.storage)
                    reads.append(_Read(op.module, op.index, x, op.outputs[0].shape[-1], source))
            elif op.phase == "backward" and op.module in linears and op.kernel in _PRODUCTS:
                for value in op.inputs:
                    self._products.setdefault((op.module, value.storage), op)
        savers: dict[int, set[tuple[str, bool]]] = {}
        for saved in graph.saved:
            savers.setdefault(saved.storage, set()).add((saved.needed_in, kernel_of(saved.needed_by) in _PRODUCTS))
        # A layer whose weight has no gradient keeps no input.
        self._reads = [r for r in reads if (r.path, True) in savers.get(r.x.storage, ())]
        activations = {s.id for s in graph.on_device if s.category == "activation"}
        self._savers = {
            r.x.storage: {path for path, _ in savers[r.x.storage]}
            for r in self._reads
            if r.x.storage in activations and all(path in linears and product for path, product in savers[r.x.storage])
        }

    def freed(self, sites: set[str]) -> list[int]:
        """The storages that only these layers keep."""
        return [storage for storage, keepers in self._savers.items() if keepers <= sites]

    def worthwhile(self, sketch: Sketch) -> tuple[str, ...]:
        """The layers that let more go than their sketches take, in the model's order."""
        freed = set(self.freed({path for path, _ in self.graph.modules}))
        paths: set[str] = set()
        for group in self._groups({r.path for r in self._reads}):
            freed_bytes = sum(self.graph.storages[s].bytes for s in {r.x.storage for r in group} & freed)
            if freed_bytes > _bytes(group[0].x, sketch):
                paths |= {r.path for r in group if r.x.storage in freed}
        return tuple(path for path, _ in self.graph.modules if path in paths)

    def added(self, sites: set[str], sketch: Sketch) -> Iterator[Interval]:
        """A sketch for each input that is read, and that of the output's gradient while the weight's is computed."""
        for group in self._groups(sites):
            first, x = group[0], group[0].x
            if sketch.sketch_rows(x.shape[0]) >= x.shape[0]:
                continue
            products = [self._products.get((r.path, r.x.storage)) for r in group]
            ends = [product.index + 1 for product in products if product is not None]
            if ends:
                yield Interval(_bytes(x, sketch), first.op, max(ends), f"sketch of the input of {first.path}")
                yield Interval(_SEED_BYTES, first.op, max(ends), f"seed of {first.path}")
            for read, product in zip(group, products, strict=True):
                if product is not None:
                    size = _bytes(x, sketch) // max(1, x.shape[1]) * read.features
                    yield Interval(size, product.index, product.index + 1, f"sketch of a gradient in {read.path}")

    def seconds(self, sites: set[str], sketch: Sketch) -> float:
        """Seconds of sketching, by a roofline, less the seconds that the smaller product for the weight saves."""
        device = find_device(self.graph.device)
        total = 0.0
        for group in self._groups(sites):
            x = group[0].x
            rows, sketch_rows = x.shape[0], sketch.sketch_rows(x.shape[0])
            rate = device.rates.get(x.dtype, device.rates["float32"])
            block = rows / sketch.blocks(rows) if rows else 0
            for columns in (x.shape[1], *(read.features for read in group)):
                moved = (rows + sketch_rows) * columns * (x.bytes // max(1, rows * x.shape[1]))
                total += device.launch_seconds + max(moved / device.bandwidth, 2 * sketch_rows * block * columns / rate)
            for read in group:
                product = self._products.get((read.path, read.x.storage))
                if product is not None:
                    total -= (1 - sketch_rows / max(1, rows)) * product.seconds
        return total

    def _groups(self, sites: set[str]) -> list[list[_Read]]:
        """Reads of the same tensor one after the other, which share a sketch."""
        reads = [read for read in self._reads if read.path in sites]
        return [list(group) for _, group in groupby(reads, lambda read: (read.source, read.x.shape, read.x.dtype))]


_SEED_BYTES = 8
_PRODUCTS = ("aten.addmm", "aten.mm")


def _bytes(x: TensorView, sketch: Sketch) -> int:
    rows = x.shape[0]
    return x.bytes // rows * sketch.sketch_rows(rows) if rows else 0
