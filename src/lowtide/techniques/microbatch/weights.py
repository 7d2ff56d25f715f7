"""Weight of each piece in the loss of the whole: by samples, by counted targets, or as the caller says.

A wrong guess would give wrong gradients, so a guess is tried once, on two pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lowtide.compat.modules import BatchNormBase, DropoutBase, NormBase, own_buffers, own_parameters
from lowtide.errors import WorkloadError
from lowtide.techniques.microbatch.counts import Counting, is_mixed
from lowtide.techniques.microbatch.pieces import Batch

Reduction = Literal["auto", "mean", "sum"]
Proved = Literal["mean", "sum", "counted", "several"]  # see ``Proof``
REDUCTIONS: tuple[Proved, ...] = ("mean", "sum", "counted", "several")
Weight: TypeAlias = "Callable[[Any], float | Tensor]"

# The share of a loss by which two ways to compute it may differ: batches of other sizes take other kernels.
_CLOSE = {torch.float64: 1e-7, torch.float32: 1e-3}
_CLOSE_IN_16_BITS = 3e-2
_MOST_TRIED = 8  # samples of a piece


def find_reduction(
    loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, modules: list[nn.Module], batch: Batch, size: int
) -> Literal["mean", "sum"]:
    """Find the reduction of a loss by a trial on two pieces of the batch; it leaves nothing behind.

    An error where it is neither, and where its values tell nothing.
    """
    trial = _Trial(loss, model, batch)
    try:
        with _quiet(modules, lambda _: True):
            return trial.on_pieces(size)
    except (WorkloadError, torch.OutOfMemoryError):
        raise
    except Exception:  # some models return something else in evaluation mode
        with _quiet(modules, lambda module: isinstance(module, (DropoutBase, NormBase))):
            return trial.on_pieces(size)


@dataclass(frozen=True)
class _Trial:
    """A loss that is tried on samples of a batch."""

    loss: Callable[[nn.Module, Any], Tensor]
    model: nn.Module
    batch: Batch

    def on_pieces(self, size: int) -> Literal["mean", "sum"]:
        tried = _spread(self.batch.samples, 2 * min(size, _MOST_TRIED))
        parts = [tried[::2], tried[1::2]]
        seen = [self._seen(part) for part in parts]
        if not all(weight for _, weight in seen):  # where nothing counts, any function of a mean is a mean
            samples = _spread(self.batch.samples, 2 * _MOST_TRIED)
            counting = [sample for sample in samples if self._seen([sample])[1]][: len(tried)]
            if len(counting) < 2:
                raise WorkloadError(
                    "All targets of the samples that were tried are ignored, but for one sample's: that tells no mean "
                    "from a sum",
                    hint="Say reduction='mean' or reduction='sum', or try with another first batch.",
                )
            parts = [counting[::2], counting[1::2]]
            seen = [self._seen(part) for part in parts]
        before = _generators(self.batch)
        whole = self._value(parts[0] + parts[1])
        if not all(torch.equal(was, now) for was, now in zip(before, _generators(self.batch), strict=True)):
            raise WorkloadError(
                "The loss draws random numbers in evaluation mode too, so its reduction cannot be found by trying",
                hint="Say reduction='mean' or reduction='sum'.",
            )
        values, weights = [float(value) for value, _ in seen], [weight for _, weight in seen]
        close = _closeness(seen[0][0])
        whole = float(whole)
        mean = sum(v * w for v, w in zip(values, weights, strict=True) if w) / max(sum(weights), 1e-30)
        total = sum(values)
        apart = close * max([1e-3, *(abs(v) for v in values if math.isfinite(v))])  # the parts may cancel
        is_mean, is_sum = (math.isclose(each, whole, rel_tol=close, abs_tol=apart) for each in (mean, total))
        if (is_mean and is_sum) or not math.isfinite(whole):
            return self._on_one_twice(close)
        if is_mean or is_sum:
            return "mean" if is_mean else "sum"
        raise WorkloadError(
            f"The loss of {sum(map(len, parts))} samples is {whole:.6g}. Two pieces of them have the mean {mean:.6g} "
            f"and the sum {total:.6g}: it is neither of them",
            hint="If it is a mean over what the samples have (tokens that are not padding), pass weight=, a function "
            "that counts them in a batch. If samples see each other, the batch cannot be split.",
        )

    def _seen(self, part: list[int]) -> tuple[Tensor, float]:
        """The loss of some samples, and what it is a mean over, if it is one."""
        with Counting() as counting:
            value = self.loss(self.model, self.batch.chosen(part))
        means = counting.means(value)
        weight = float(len(part)) if not means or is_mixed(value, means) else float(means[0].total)
        return value.detach(), weight

    def _on_one_twice(self, close: float) -> Literal["mean", "sum"]:
        """Try one sample given twice: a sum doubles, whatever the other samples add."""
        for sample in _spread(self.batch.samples, 2 * _MOST_TRIED):
            once = float(self._value([sample]))
            if once == 0 or not math.isfinite(once):
                continue
            twice = float(self._value([sample, sample]))
            if math.isclose(once, twice, rel_tol=close):
                return "mean"
            if math.isclose(2 * once, twice, rel_tol=close):
                return "sum"
        raise WorkloadError(
            "The loss is 0, not finite or rounding alone where it was tried, which tells no mean from a sum",
            hint="Say reduction='mean' or reduction='sum'.",
        )

    def _value(self, samples: list[int]) -> Tensor:
        """The loss of some samples, without a graph unless it takes gradients itself."""
        batch = self.batch.chosen(samples)
        try:
            with torch.no_grad():
                return self.loss(self.model, batch)
        except RuntimeError:  # it may take gradients itself; another error comes again
            return self.loss(self.model, batch).detach()


def _spread(samples: int, count: int) -> list[int]:
    """At most so many samples, over all of the batch: what is padded may lie at its end."""
    count = min(count, samples)
    return [i * samples // count for i in range(count)]


def _closeness(loss: Tensor) -> float:
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return _CLOSE_IN_16_BITS
    return _CLOSE.get(loss.dtype, _CLOSE_IN_16_BITS)


def _generators(batch: Batch) -> list[Tensor]:
    devices = {leaf.device for leaf in batch.leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _give_statistics(norm: BatchNormBase, modules: list[nn.Module]) -> None:
    """Some, so that in evaluation a layer that keeps none does not take its batch's."""
    tensors = (p for module in (norm, *modules) for p in own_parameters(module).values() if p is not None)
    like = next((p.detach() for p in tensors if p.is_floating_point()), torch.empty(0))
    own_buffers(norm)["running_mean"] = like.new_zeros(norm.num_features)
    own_buffers(norm)["running_var"] = like.new_ones(norm.num_features)


@contextmanager
def _quiet(modules: list[nn.Module], which: Callable[[nn.Module], bool]) -> Generator[None]:
    """Some modules in evaluation mode, every buffer a copy, generators restored: a trial leaves nothing behind."""
    modes = [(module, module.training) for module in modules]
    # Buffers of TorchScript modules cannot be replaced, and stay as they are in evaluation mode.
    buffers = [(own_buffers(m), dict(own_buffers(m))) for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    devices = {b.device for _, held in buffers for b in held.values() if b is not None and b.is_cuda}
    devices |= {p.device for module in modules for p in own_parameters(module).values() if p is not None and p.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            for module, _ in modes:
                module.training = module.training and not which(module)
            for now, held in buffers:
                now.update({name: None if b is None else b.clone() for name, b in held.items()})
            for module in modules:
                if isinstance(module, BatchNormBase) and which(module) and module.running_mean is None:
                    _give_statistics(module, modules)
            yield
    finally:
        for module, training in modes:
            module.training = training
        for now, held in buffers:
            now.update(held)
