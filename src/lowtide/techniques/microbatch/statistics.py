"""Batch norm over a batch in pieces: running statistics as of one batch, and normalising by the whole batch's.

Pieces with n values in a channel, mean μ and unbiased variance v give the whole (Chan, Golub and LeVeque, 1979)

    N = Σ n      M = Σ nμ / N      V = (Σ (n - 1)v + Σ n(μ - M)²) / (N - 1)

and the running statistics move towards M and V once, by the layer's own momentum, as after one full batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.compat.autograd import in_backward
from lowtide.compat.modules import BatchNormBase, InstanceNormBase, NormBase, check_input, own_buffers
from lowtide.compat.operators import foreach_add_, foreach_addcmul_, foreach_lerp_, foreach_mul, foreach_sub
from lowtide.errors import LowtideError
from lowtide.nn.batchnorm import _BatchNormAct
from lowtide.nn.functional import batch_norm_act
from lowtide.nn.renorm import _BatchRenormAct
from lowtide.nn.second_order import refuse_create_graph
from lowtide.nn.statistics import Statistics
from lowtide.undo import Undo

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def takes_statistics(module: nn.Module) -> bool:
    """Whether a layer normalises by the statistics of its batch."""
    return isinstance(module, NormBase) and not isinstance(module, InstanceNormBase) and module.training


@dataclass
class _CallMoments:
    """Moments of the input of one call of a layer."""

    count: int  # values in a channel
    mean: Tensor
    var: Tensor  # unbiased


@dataclass
class _RecordedLayer:
    """A layer while pieces run: its calls in all pieces so far and in this one, and copies for the call under way."""

    norm: NormBase
    tracked: dict[str, Tensor | None]  # the buffers of the layer itself
    pieces: list[list[_CallMoments]] = field(default_factory=list[list[_CallMoments]])
    copies: tuple[Tensor, Tensor] | None = None  # of the running statistics, for the next call to move
    plain: Callable[..., Any] | None = None  # the layer's own forward, in whose place this one is called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with statistics of its own to move; note the moments that it saw, and restore all."""
        norm, plain = self.norm, self.plain
        assert plain is not None
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        held = dict(own_buffers(norm))
        mine = all(held.get(name) is self.tracked[name] for name in _BUFFERS)  # in a recomputation they are copies
        if not (norm.training and mine and x is not None):
            return plain(*args, **kwargs)
        mean, var = self._copies(x)
        batches = held.get("num_batches_tracked")
        counts = isinstance(norm, (nn.SyncBatchNorm, _BatchRenormAct)) and batches is not None
        copy = batches.clone() if counts and batches is not None else None
        tracks, momentum = norm.track_running_stats, norm.momentum
        own_buffers(norm).update(zip(_BUFFERS, (mean, var, copy), strict=True))
        norm.track_running_stats, norm.momentum = True, 1.0
        try:
            out = plain(*args, **kwargs)
        finally:
            norm.track_running_stats, norm.momentum = tracks, momentum
            own_buffers(norm).update(held)
        # A converted layer at the end of a block is called twice, and passes its input on in the first call.
        if out is not None and out is not x and self.pieces and x.numel():
            values = x.numel() // (x.shape[1] if x.ndim > 1 else len(x)) * _processes(norm)
            self.pieces[-1].append(_CallMoments(values, mean, var))
        return out

    def open(self) -> Undo:
        """Be called in the place of the layer's forward, however that is called."""
        held = vars(self.norm)
        had = held.get("forward")
        self.plain = self.norm.forward
        held["forward"] = self
        return Undo(lambda: held.pop("forward") if had is None else held.update(forward=had))

    def _copies(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A mean and a variance to move. Not zeros: Batch Renormalization reads them."""
        if self.copies is not None:
            copies, self.copies = self.copies, None
            return copies
        if self.running is not None:
            mean, var = self.running
            return mean.clone(), var.clone()
        weight: Any = self.norm.weight
        dtype = torch.promote_types(x.dtype, torch.float32) if weight is None else weight.dtype
        return x.new_zeros(self.norm.num_features, dtype=dtype), x.new_zeros(self.norm.num_features, dtype=dtype)

    @property
    def running(self) -> tuple[Tensor, Tensor] | None:
        """The layer's own running mean and variance."""
        mean, var = self.tracked["running_mean"], self.tracked["running_var"]
        return None if mean is None or var is None else (mean, var)

    @property
    def counter(self) -> Tensor | None:
        """The number of batches so far, where the layer counts them."""
        return None if isinstance(self.norm, InstanceNormBase) else self.tracked["num_batches_tracked"]


class Recording:
    """Inside ``with``, the layers' running statistics stay; ``finish`` moves them once for all pieces."""

    def __init__(self, modules: Iterable[nn.Module], *, skip: set[int] | None = None, every: bool = False) -> None:
        self.layers = [
            _RecordedLayer(module, {name: own_buffers(module).get(name) for name in _BUFFERS})
            for module in modules
            if isinstance(module, NormBase) and module.training and id(module) not in (skip or set[int]())
            if every or (module.track_running_stats and module.running_mean is not None)
        ]
        self._undo = Undo()

    def __enter__(self) -> Self:
        for layer in self.layers:
            self._undo.add(layer.open())
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo()

    @torch.no_grad()
    def start_piece(self) -> None:
        """Begin another piece."""
        self._merge()
        running = [each for layer in self.layers for each in layer.running or ()]
        copies: Iterator[Tensor] = iter(foreach_mul(running, 1.0) if running else ())  # all in a few kernels
        for layer in self.layers:
            layer.copies = None if layer.running is None else (next(copies), next(copies))
            layer.pieces.append([])

    def _merge(self) -> None:
        """Put the moments of the last piece into those of the pieces before, so that one layer holds those of two."""
        merging = [(layer, *layer.pieces) for layer in self.layers if len(layer.pieces) == 2]
        pairs = [(layer, *pair) for layer, before, last in merging for pair in zip(before, last, strict=False)]
        moments = iter(_merged(pairs))
        for layer, before, last in merging:
            both = min(len(before), len(last))
            layer.pieces = [[*itertools.islice(moments, both), *before[both:], *last[both:]]]

    @torch.no_grad()
    def finish(self) -> None:
        """Move the running statistics towards those of all pieces together."""
        self._merge()
        moving = [layer for layer in self.layers if layer.norm.track_running_stats and layer.running is not None]
        for number in range(max((len(calls) for layer in moving for calls in layer.pieces), default=0)):
            _move([(layer, calls[number]) for layer in moving for calls in layer.pieces if number < len(calls)])


def _move(calls: list[tuple[_RecordedLayer, _CallMoments]]) -> None:
    """Move the statistics of many layers in a few kernels, without waiting for a GPU."""
    counters = [layer.counter for layer, _ in calls if layer.counter is not None]
    if counters:
        foreach_add_(counters, 1)
    moves: dict[float, list[tuple[Tensor, Tensor]]] = {}
    for layer, call in calls:
        momentum: Any = layer.norm.momentum
        pairs = list(zip(layer.running or (), (call.mean, call.var), strict=True))
        if momentum is None and layer.counter is not None:  # the average of all batches so far
            for running, new in pairs:
                running.lerp_(new, 1.0 / layer.counter.to(new.dtype))
        else:
            moves.setdefault(momentum or 0.0, []).extend(pairs)
    for momentum, pairs in moves.items():
        running, new = zip(*pairs, strict=True)
        foreach_lerp_(running, new, momentum)


def _merged(pairs: list[tuple[_RecordedLayer, _CallMoments, _CallMoments]]) -> list[_CallMoments]:
    """Moments of two calls of each layer together, in a few kernels; an instance norm's are averages.

    The numbers of values are Python's, and stay there: to bring them to a GPU would wait for all that it has to do.
    """
    if not pairs:
        return []
    layers, first, second = zip(*pairs, strict=True)
    counts = [(a.count, b.count, a.count + b.count) for a, b in zip(first, second, strict=True)]
    between = [not isinstance(layer.norm, InstanceNormBase) for layer in layers]
    apart = foreach_sub([each.mean for each in second], [each.mean for each in first])
    means = foreach_mul(apart, [b / n for _, b, n in counts])
    foreach_add_(means, [each.mean for each in first])
    shares = [
        ((a - 1) / (n - 1), (b - 1) / (n - 1), a * b / n / (n - 1)) if is_between else (a / n, b / n, 0.0)
        for (a, b, n), is_between in zip(counts, between, strict=True)
    ]
    variances = foreach_mul([each.var for each in first], [share for share, _, _ in shares])
    foreach_add_(variances, foreach_mul([each.var for each in second], [share for _, share, _ in shares]))
    foreach_addcmul_(variances, apart, apart, [share for _, _, share in shares])
    return [_CallMoments(n, mean, var) for (_, _, n), mean, var in zip(counts, means, variances, strict=True)]


def _processes(norm: nn.Module) -> int:
    """Number of processes whose batches a layer sees; all are taken to be as large as this one's."""
    if not (isinstance(norm, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(norm.process_group)


# -- the whole batch's statistics ------------------------------------------------------------------------


class WholeStatistics:
    """Inside ``with``, layers normalise a piece by the mean and the variance that a pass over the whole batch saw.

    In backward, the two are those of the piece still: their gradient is made of the piece's values alone.
    """

    def __init__(self, recording: Recording) -> None:
        called = [layer for layer in recording.layers if layer.pieces and layer.pieces[0]]
        # An instance norm has no statistics of its batch; those that it tracks have moved already.
        self._alone = [layer for layer in called if isinstance(layer.norm, InstanceNormBase)]
        self._layers = [layer for layer in called if not isinstance(layer.norm, InstanceNormBase)]
        for layer in self._layers:
            _check(layer.norm)
        self._undo = Undo()

    def __enter__(self) -> None:
        for layer in self._alone:
            self._undo.add(layer.open())
        for layer in self._layers:
            name = "_run" if isinstance(layer.norm, _BatchNormAct) else "forward"
            by_whole = _ByWhole(layer)
            vars(layer.norm)[name] = by_whole.run if name == "_run" else by_whole.forward
            self._undo.add(partial(vars(layer.norm).pop, name))

    def __exit__(self, *exception: object) -> None:
        self._undo()


def _check(norm: NormBase) -> None:
    """Refuse a layer whose forward is not known."""
    ours = isinstance(norm, _BatchNormAct) and not isinstance(norm, _BatchRenormAct) and norm._group() is None
    plain = type(norm).forward is BatchNormBase.forward and "forward" not in vars(norm)
    alone = isinstance(norm, nn.SyncBatchNorm) and _processes(norm) == 1
    if not (ours or plain or alone):
        raise LowtideError(
            f"A {type(norm).__name__} cannot normalise a piece by the statistics of the whole batch",
            hint="Leave out exact=True.",
        )


class _ByWhole:
    """Forwards of a layer by the statistics of the whole batch."""

    def __init__(self, layer: _RecordedLayer) -> None:
        self.norm: Any = layer.norm
        self.whole = [(call.mean, call.var * ((call.count - 1) / call.count)) for call in layer.pieces[0]]  # biased
        self.next = 0

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and variance for the next call. Calls are counted; a recomputation allows only one."""
        if len(self.whole) > 1 and in_backward():
            raise LowtideError(
                "A batch norm that runs several times in a step, and again in backward, has no known statistics",
                hint="Leave out exact=True, or the recomputation.",
            )
        moments = self.whole[self.next % len(self.whole)]
        self.next += 1
        return moments

    def forward(self, input: Tensor) -> Tensor:
        """Run one of torch's batch norms."""
        check_input(self.norm, input)
        return _Normalize.apply(input, self.norm.weight, self.norm.bias, *self.statistics(), self.norm.eps)

    def run(self, input: Tensor, residual: Tensor | None, activation: Any, strategy: Any) -> Tensor:
        """Run one of lowtide's batch norms, with the activation."""
        norm = self.norm
        return batch_norm_act(
            input,
            norm.weight,
            norm.bias,
            activation=activation,
            strategy="checkpoint" if strategy == "standard" else strategy,
            eps=norm.eps,
            residual=residual,
            rebuild=residual is None or norm.rebuild_joins,
            statistics=Statistics(*self.statistics(), of_input=False),
            layer=norm,
        )


class _Normalize(torch.autograd.Function):
    """γ(x - M)/√(V + ε) + β with M and V given; backward as if they were of x: γ/σ·(dy - mean(dy) - x̂·mean(dy·x̂))."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
    ) -> Tensor:
        invstd = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, var, invstd)
        ctx.eps = eps
        return torch.nn.functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_create_graph("A batch norm by the statistics of all pieces", hint="Leave out exact=True.")
        x, weight, mean, var, invstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            gradients[0], x, weight, mean, var, mean, invstd, True, ctx.eps, [needs[0], needs[1], needs[2]]
        )
        return dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None, None, None, None
