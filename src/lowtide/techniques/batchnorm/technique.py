"""Batch norm + activation as a technique: the bytes that each pair would free, read from a profile alone.

In a plain step the batch norm keeps its input x, and the readers of the output z keep z. Activations such as SiLU also
keep y between the two. The pair as one layer needs one of them: y and z are recomputed from x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.errors import PlanError
from lowtide.kernels.activations import POINTWISE
from lowtide.profiling.profile import Profile
from lowtide.techniques.batchnorm.convert import convert
from lowtide.techniques.replaced_forward import module_at
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Kind, Option, Price, Technique
from lowtide.tracing.graph import Graph, Op, kernel_of
from lowtide.undo import Applied
from lowtide.workload import Workload


@dataclass(frozen=True)
class BatchNormConfig(Config):
    """``joins`` is ``convert``'s: 1 keeps the output of every residual block, k > 1 of every k-th."""

    joins: int = 1

    def __post_init__(self) -> None:
        self.require("joins", int, least=1)


class BatchNorm(Technique):
    """Batch norm and what follows it as one layer, with one buffer kept instead of two or three."""

    name = "batchnorm"
    kind: Kind = "module"
    config: type[Config] = BatchNormConfig
    needs = "a batch norm followed by an activation"

    def options(self, profile: Profile) -> list[Option]:
        """All batch norms that would save something; once more for each spacing of the joins that are kept."""
        steps = _TracedPairs(profile.graph)
        options: list[Option] = []
        for spacing in _spacings(sum(pair.is_join for pair in steps.pairs)):
            site = tuple(pair.path for pair in steps.pairs if steps.frees(pair, spacing))
            if site:
                options.append(Option(self.name, site, BatchNormConfig(spacing)))
        return options

    def price(self, option: Option, profile: Profile) -> Price:
        """Storages are freed from their last use in forward until they are recomputed, by batch norm and activation."""
        steps = _TracedPairs(profile.graph)
        spacing, sites = option.config_as(BatchNormConfig).joins, set(option.site)
        pairs = [pair for pair in steps.pairs if pair.path in sites]
        needs = steps.first_needs(pairs, spacing)
        removed = [
            Interval(steps.bytes(storage), steps.last_use[storage] + 1, again, f"recomputed in {path}")
            for storage, (path, again) in needs.items()
        ]
        added = [interval for pair in pairs for interval in steps.added(pair, needs, spacing)]
        seconds = sum(steps.seconds(pairs, needs, spacing).values())
        for pool, again in steps.pools():
            places = pool.outputs[1].storage
            removed.append(Interval(steps.bytes(places), pool.index + 1, again, f"found again in {pool.module}"))
            seconds += pool.seconds
        return Price(Fidelity.ROUNDOFF, added=tuple(added), removed=tuple(removed), compute_seconds=seconds)

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Convert the model; refused where the options are of another one, or where nothing can be converted.

        What a profile cannot see, such as a forward that ``torch.fx`` cannot trace, leaves its batch norms as they are.
        """
        sites = [path for option in options for path in option.site]
        for path in sites:
            module_at(work.model, path)
        joins = max((option.config_as(BatchNormConfig).joins for option in options), default=1)
        conversion = convert(work.model, joins=joins)
        if not {change.path for change in conversion.changed} & set(sites):
            conversion.undo()
            reasons = [f"{left.path}: {left.why}" for left in conversion.left if left.path in sites]
            raise PlanError("No batch norm of the plan can be converted", where=next(iter(reasons), "the model"))
        return Applied(work, conversion.undo)

    def check(self, option: Option) -> Check:
        """The same mathematics: loss, gradients and statistics to a few roundings."""
        return Check(Fidelity.ROUNDOFF, rtol=_RTOL, atol=_ATOL)


# For float32, in the norm of each gradient; a ReLU whose input is near 0 may fall to the other side. The gradient of a
# bias before a batch norm is 0, of which only rounding is left: hence atol.
_RTOL = 1e-3
_ATOL = 1e-5


# -- the pairs in a traced step --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TracedPair:
    """A batch norm and what follows it, as ops and storages of a traced step."""

    path: str
    ops: tuple[int, ...]  # of the forward pass: batch norm, addition, activation
    backward: int  # the batch norm's op of the backward pass
    x: int
    results: tuple[int, ...]  # y, the sum and z, each storage once; z last
    activation: str  # "" where a convolution follows
    in_place: bool  # "auto" inverts the activation: z is kept, and x need not be
    residual: int | None
    shortcut: int | None  # the op of the batch norm that gives the residual
    second: bool  # whether y is the second operand of the sum with the residual
    join: int = 0  # number of joins up to this one, since one whose residual is a batch norm's

    @property
    def is_join(self) -> bool:
        return self.residual is not None

    def rebuilds(self, spacing: int) -> bool:
        """Tell whether z is recomputed for its readers."""
        return not self.in_place and (not self.is_join or self.join % spacing != 0)

    def drops(self, spacing: int) -> tuple[int, ...]:
        """The storages that need not be kept."""
        if self.in_place:
            return (self.x, *self.results[:-1])
        return self.results if self.rebuilds(spacing) else self.results[:-1]

    def keeps(self, spacing: int) -> tuple[int, ...]:
        """The storages that are kept, whoever keeps them in the plain step."""
        if self.in_place:
            return self.results[-1:]
        by_sign = not self.rebuilds(spacing) and self.activation in ("relu", "leaky_relu")
        return () if self.residual is None or by_sign else (self.residual,)


_Needs = dict[int, tuple[str, int]]


class _TracedPairs:
    """The pairs of a traced step in the order of the model's modules, and when their storages are used."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.last_use, self.first_need = graph.last_forward_use, graph.first_backward_use
        self._readers: dict[int, list[Op]] = {}
        self._backward: dict[str, int] = {}
        self._norms: dict[int, int] = {}  # by the storage of y: the op of the forward pass
        self._writes: dict[int, list[int]] = {}  # by storage: the ops of the forward pass that give it
        for op in graph.ops:
            if op.phase == "forward":
                for value in op.outputs:
                    self._writes.setdefault(value.storage, []).append(op.index)
                for storage in dict.fromkeys(value.storage for value in op.inputs):
                    self._readers.setdefault(storage, []).append(op)
            elif op.phase == "backward" and op.kernel in _NORMS:
                self._backward.setdefault(op.module, op.index)
        self._on_device = {storage.id for storage in graph.on_device}
        self.pairs = tuple(self._numbered())

    def bytes(self, storage: int) -> int:
        return self.graph.storages[storage].bytes

    def death(self, storage: int) -> int:
        return self.graph.storages[storage].death

    def frees(self, pair: _TracedPair, spacing: int) -> bool:
        """Tell whether the plain step keeps something for backward that the pair does not."""
        return any(self._is_kept(storage) for storage in self._dropped(pair, spacing))

    def first_needs(self, pairs: Sequence[_TracedPair], spacing: int) -> _Needs:
        """For each freed storage: the pair that frees it, and the op of the backward pass that first needs it."""
        needs: _Needs = {}
        for pair in pairs:
            for storage in filter(self._is_kept, self._dropped(pair, spacing)):
                needs[storage] = pair.path, self.first_need.get(storage, self.death(storage))
        for pair in pairs:
            for storage in pair.keeps(spacing):
                if storage in needs:
                    path, first = needs[storage]
                    needs[storage] = path, min(first, self._start(pair))
        return needs

    def added(self, pair: _TracedPair, needs: _Needs, spacing: int) -> Iterator[Interval]:
        """Storages that live longer than before: for a while, or because nobody else keeps them."""
        for storage in pair.keeps(spacing):
            size, alone = self.bytes(storage), self.death(storage)
            if storage not in needs and alone <= pair.backward:
                # A batch norm that gives the residual of a join that is rebuilt is one of the layers too.
                first = self._start(pair) if spacing > 1 and pair.shortcut is not None else alone
                yield Interval(size, first, pair.backward + 1, f"the residual of {pair.path}")
            if pair.results[-1] in needs and storage in needs:
                first = needs[pair.results[-1]][1]
                if first < needs[storage][1]:
                    yield Interval(size, first, first + 1, f"residual while {pair.path} is recomputed")
        # While torch's backward of batch norm runs, the gradient of z is still there.
        size = self.bytes(pair.results[-1])
        yield Interval(size, pair.backward, pair.backward + 1, f"a gradient in the backward of {pair.path}")

    def seconds(self, pairs: Sequence[_TracedPair], needs: _Needs, spacing: int) -> dict[str, float]:
        """Seconds to recompute each pair: a join with all joins before it, back to the last that is kept."""
        took: dict[str, float] = {}
        for pair in sorted(pairs, key=lambda pair: pair.ops[0]):
            before = needs[pair.residual][0] if pair.rebuilds(spacing) and pair.residual in needs else ""
            ops = [*pair.ops, *([pair.shortcut] if spacing > 1 and pair.shortcut is not None else [])]
            took[pair.path] = sum(self.graph.ops[i].seconds for i in ops) + took.get(before, 0.0)
        return took

    def _start(self, pair: _TracedPair) -> int:
        """The op of the backward pass that the layer's own begins at: that of the activation."""
        gradient = self.graph.ops[pair.backward].inputs[0].storage
        return self.graph.storages[gradient].birth

    def _dropped(self, pair: _TracedPair, spacing: int) -> Iterator[int]:
        for storage in pair.drops(spacing):
            if storage != pair.x or self.graph.savers.get(storage) == {pair.path}:
                yield storage

    def _is_kept(self, storage: int) -> bool:
        is_made = self.graph.storages[storage].category == "activation" and storage in self._on_device
        return is_made and self.death(storage) > self.last_use[storage] + 1

    def pools(self) -> Iterator[tuple[Op, int]]:
        """The max poolings that ``convert`` changes, each with the op of the backward pass that needs its places."""
        kinds = dict(self.graph.modules)
        for op in self.graph.ops:
            if op.kernel in _POOLS and kinds.get(op.module) in ("MaxPool2d", "MaxPool3d") and op.phase == "forward":
                again = self.first_need.get(op.outputs[1].storage)
                if again is not None:
                    yield op, again

    def _numbered(self) -> Iterator[_TracedPair]:
        """In the order of the model's modules, in which ``convert`` counts the joins."""
        kinds = dict(self.graph.modules)
        calls: dict[str, list[Op]] = {path: [] for path, kind in kinds.items() if kind in _CLASSES}
        for op in self.graph.ops:
            if op.phase == "forward" and op.module in calls and op.kernel in _NORMS:
                calls[op.module].append(op)
                self._norms[op.outputs[0].storage] = op.index
        candidates = [self._pair(ops[0]) for path, ops in calls.items() if len(ops) == 1 and path in self._backward]
        # ``convert`` takes the first operand where two batch norms are added.
        by_end: dict[int, _TracedPair] = {}
        pairs = [pair for pair in candidates if pair is not None]
        for pair in sorted(pairs, key=lambda pair: pair.second):
            by_end.setdefault(pair.ops[-1], pair)
        joins = 0
        for pair in pairs:
            if by_end[pair.ops[-1]] is pair:
                joins = (0 if pair.shortcut is not None else joins) + pair.is_join
                yield replace(pair, join=joins)

    def _pair(self, norm: Op) -> _TracedPair | None:
        """A batch norm with what follows it; None where that is not for a layer to do."""
        x, y = norm.inputs[0], norm.outputs[0].storage
        ops, results, residual = [norm], [y], None
        readers = self._after(y, norm)
        if readers and readers[0].kernel == "aten.add":
            addition = readers[0]
            total = addition.outputs[0].storage
            residual = _other(addition, y)
            if residual is None or total == residual or (total != y and len(readers) > 1):
                return None
            ops, results, readers = [norm, addition], [y, total], self._after(total, addition)
        activation = ""
        if readers and readers[0].kernel in _ACTIVATIONS:
            activation, z = _ACTIVATIONS[readers[0].kernel], readers[0].outputs[0].storage
            if z != results[-1] and len(readers) > 1:
                return None
            ops, results = [*ops, readers[0]], [*results, z]
        elif residual is not None or not readers or not all(reader.kernel in _KEEPERS for reader in readers):
            return None
        return _TracedPair(
            norm.module,
            tuple(op.index for op in ops),
            self._backward[norm.module],
            x.storage,
            (*dict.fromkeys(storage for storage in results if storage != results[-1]), results[-1]),
            activation,
            # As "auto" decides: nn.strategies.resolve.
            in_place=self._is_fast(x.dtype) and activation == "leaky_relu" and residual is None,
            residual=residual,
            shortcut=None if residual is None else self._norm_that_gives(residual, ops[1].index),
            second=residual is not None and ops[1].inputs[0].storage != y,
        )

    def _norm_that_gives(self, storage: int, before: int) -> int | None:
        """The batch norm that was the last to write a storage; a sum in place may have written over its result."""
        last = max((index for index in self._writes.get(storage, []) if index < before), default=None)
        return last if last is not None and last == self._norms.get(storage) else None

    def _is_fast(self, dtype: str) -> bool:
        return self.graph.tensor_device == "cuda" and dtype == "float32"

    def _after(self, storage: int, op: Op) -> list[Op]:
        return [reader for reader in self._readers.get(storage, []) if reader.index > op.index]


_CLASSES = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
_POOLS = ("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices")
_KEEPERS = ("aten.convolution", "aten.mm", "aten.addmm")  # of what they read
_NORMS = frozenset(f"aten.{op}" for op in (
    "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm",
    "native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward",
))  # fmt: skip
_ACTIVATIONS = {kernel_of(str(row.op)): name for name, row in POINTWISE.items() if row.op is not None}
_ACTIVATIONS["aten._prelu_kernel"] = "prelu"


def _other(addition: Op, storage: int) -> int | None:
    others = [value.storage for value in addition.inputs if value.storage != storage]
    return others[0] if len(addition.inputs) == 2 and len(others) == 1 else None


def _spacings(joins: int) -> list[int]:
    """1, 2, 4 and so on, as far as there are joins between those that are kept."""
    return [2**i for i in range(max(joins, 1).bit_length())]
