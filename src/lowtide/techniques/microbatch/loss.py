"""``microbatch``: a step whose loss runs piece by piece, forward and backward, and is one loss to everybody else."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.compat.dispatch import active_modes
from lowtide.compat.dynamo import disable_dynamo
from lowtide.compat.modules import own_parameters
from lowtide.errors import LowtideError, WorkloadError
from lowtide.techniques.microbatch.checks import Checks
from lowtide.techniques.microbatch.counts import Counting, Mean, is_mixed, nodes_behind
from lowtide.techniques.microbatch.gradients import Gradients
from lowtide.techniques.microbatch.pieces import Batch, Split
from lowtide.techniques.microbatch.statistics import Recording, WholeStatistics, takes_statistics
from lowtide.techniques.microbatch.weights import Proved, Reduction, Weight, find_reduction
from lowtide.tracing.compiled import compiled_modules
from lowtide.tracing.step_state import modules_of
from lowtide.workload import Workload


def microbatch(
    work: Workload,
    size: int,
    *,
    reduction: Reduction = "auto",
    weight: Weight | None = None,
    split: Split = None,
    exact: bool = False,
) -> Workload:
    """The same step with its batch in pieces of ``size`` samples: only one piece's activations live at a time.

    The model is not touched: the workload has another loss, which is called as before. It runs each piece forward and
    backward and sums the gradients. Its own ``backward()`` hands them to the parameters once: hooks, clipping, gradient
    accumulation, loss scaling and optimizers are as before. A batch of at most ``size`` samples, or one under
    ``torch.no_grad()``, runs as it is.

    ``reduction`` says what the loss is over its samples; "auto" tries it once on two pieces, and counts what a
    cross entropy does not ignore. For other means over tokens, ``weight(batch)`` counts them. ``split`` names the keys
    or positions of the batch that have a row for each sample, where others have not. Batch norm normalises by its
    piece; ``exact=True`` takes one more forward pass, without a graph, to normalise by the whole batch.

    >>> model = nn.Linear(4, 3)
    >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    >>> work = microbatch(Workload(model, loss, (torch.randn(10, 4), torch.randint(3, (10,)))), size=4)
    >>> work.compute_loss().backward()  # pieces of 4, 4 and 2
    """
    if not exact and any(map(takes_statistics, work.model.modules())):
        warnings.warn(
            "The model has batch norms in training: each piece is normalised by itself, which gives other gradients "
            "than the full batch's. Pass exact=True to normalise by the whole batch, which is nearer.",
            UserWarning,
            stacklevel=2,
        )
    return replace(work, loss=MicrobatchLoss(work, size, reduction=reduction, weight=weight, split=split, exact=exact))


class MicrobatchLoss:
    """A loss in pieces. ``__wrapped__`` is the loss of one piece."""

    def __init__(
        self,
        work: Workload,
        size: int,
        *,
        reduction: Reduction = "auto",
        weight: Weight | None = None,
        split: Split = None,
        exact: bool = False,
        proved: Proved | None = None,
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise LowtideError(f"size={size!r} is not a number of samples", hint="Write for example size=8.")
        if reduction not in ("auto", "mean", "sum"):
            raise LowtideError(f"Unknown reduction {reduction!r}", hint="Write 'auto', 'mean' or 'sum'.")
        if weight is not None and reduction == "sum":
            raise LowtideError("A sum has no weights", hint="Leave out weight= or reduction='sum'.")
        if in_pieces(work.loss) is not None:
            raise LowtideError(
                "The loss is already computed in pieces", hint="Change the size of the first one instead."
            )
        Batch.of(work.batch, split)  # or say now why it cannot be split
        self.__wrapped__ = work.loss
        self.size = size
        self.weight = weight
        self.split = split
        self.exact = exact
        self.reduction: Literal["mean", "sum"] | None = None if reduction == "auto" else reduction
        if proved is not None:
            self.reduction = "sum" if proved == "sum" else "mean"
        self.compiled = compiled_modules(work)
        self.counts = True  # whether cross entropies must be seen as they run; known after the first real step
        self.mixed: bool | None = {"counted": False, "several": True}.get(proved or "")  # more than one mean
        self.extra: list[Tensor] | None = None  # what else the loss trains; known after the first step
        self.scale: Tensor | None = None  # the last gradient that came back to the loss
        self.checks = Checks(proved, work.batch)
        self.skips_alike = False  # where peaks alone are wanted: seconds and sums are then too small
        self._optimizer = work.optimizer
        own = set(work.model.modules())
        self._held = [module for module in modules_of(work) if module not in own]  # a criterion of the loss's own

    @disable_dynamo
    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, with a graph that ends in the parameters."""
        if not torch.is_grad_enabled():
            return self.__wrapped__(model, batch)
        whole = Batch.of(batch, self.split)
        if whole.samples <= self.size:
            return self.__wrapped__(model, batch)
        modules = self.modules(model)
        _refuse_sharded(modules)
        is_traced = bool(active_modes())
        if not is_traced:
            self.checks.start(batch, modules)
            if self.reduction is None and self.weight is None:
                self.reduction = find_reduction(self.__wrapped__, model, modules, whole, self.size)
        return _PiecewiseRun(self, model, whole, is_traced=is_traced)()

    def for_peaks(self) -> MicrobatchLoss:
        """A loss with the same peaks, for a trace that needs nothing else: it skips pieces with equal bytes."""
        loss = copy.copy(self)
        loss.skips_alike = True
        return loss

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """All that the loss may run."""
        return list(dict.fromkeys([*model.modules(), *self._held]))

    def parameters(self, modules: Iterable[nn.Module]) -> Iterator[Tensor]:
        """All that the loss may train."""
        parameters = dict.fromkeys(p for module in modules for p in own_parameters(module).values() if p is not None)
        if self._optimizer is not None:
            parameters |= dict.fromkeys(p for group in self._optimizer.param_groups for p in group["params"])
        parameters |= dict.fromkeys(self.extra or ())
        return (parameter for parameter in parameters if parameter.requires_grad)

    def remember(self, gradient: Tensor) -> None:
        """Note what came back to the loss: where that is a loss scale, the next step's pieces take it."""
        usable = torch.isfinite(gradient) & (gradient > 0)
        self.scale = torch.where(usable, gradient, 1).float()


def in_pieces(loss: Any) -> MicrobatchLoss | None:
    """The loss in pieces that a loss function is, or is wrapped around."""
    inner = inspect.unwrap(loss, stop=lambda each: isinstance(each, MicrobatchLoss))
    return inner if isinstance(inner, MicrobatchLoss) else None


class _PiecewiseRun:
    """One batch, piece by piece."""

    def __init__(self, loss: MicrobatchLoss, model: nn.Module, batch: Batch, *, is_traced: bool) -> None:
        self.loss, self.model, self.batch, self.is_traced = loss, model, batch, is_traced
        self.modules = loss.modules(model)
        parameters = list(loss.parameters(self.modules))
        self.gradients = Gradients(parameters)
        self.scale = loss.scale if _uses_half(parameters) else None
        wanted = [i for i, leaf in enumerate(batch.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for i in wanted:
            if not batch.rows[i]:
                self.gradients.follow(batch.leaves[i])
        # Each piece has its own rows of a tensor with samples; the whole's gradient is put together from theirs.
        self.rows = {i: torch.zeros_like(batch.leaves[i]) for i in wanted if batch.rows[i]}
        self.strangers: dict[Tensor, None] | None = None
        self.targets: list[float] | None = None  # of each cross entropy, for a sample of the first piece

    def __call__(self) -> Tensor:
        loss = self.loss
        pieces, shares = self._pieces()
        values: list[Tensor] = []
        sees, loss.counts = loss.counts or self.is_traced, True  # so that a step after one that failed sees
        needed = False
        with ExitStack() as stack:
            stack.enter_context(self.gradients)
            if loss.exact:
                stack.enter_context(WholeStatistics(self._whole_statistics()))
            recorded = () if loss.exact else self.modules
            recording = stack.enter_context(Recording(recorded, skip=loss.compiled))
            # Pieces between the second and the last three are alike to the byte.
            alike = range(2, len(pieces) - 3) if loss.skips_alike and not loss.exact else range(0)
            for number, (start, end) in enumerate(pieces):
                if number in alike:
                    values.append(torch.empty_like(values[-1]))
                    before = shares[number - 1]
                    shares[number] = torch.empty_like(before) if isinstance(before, Tensor) else before
                    continue
                recording.start_piece()
                with ExitStack() as around:
                    for module in self.modules:
                        if isinstance(module, DistributedDataParallel) and number < len(pieces) - 1:
                            around.enter_context(module.no_sync())  # the last piece tells DDP to expect gradients
                    counting = Counting() if shares[number] is None else None  # it holds what the piece counts
                    if counting is not None and sees:
                        around.enter_context(counting)
                    own = {i: self.batch.leaves[i].detach()[start:end].requires_grad_() for i in self.rows}
                    losses = [loss.__wrapped__(self.model, self.batch.piece(start, end, own))]
                if not isinstance(losses[0], Tensor) or losses[0].numel() != 1 or losses[0].is_complex():
                    return losses[0]  # which the workload then says
                values.append(losses[0].detach())
                means = None if counting is None else counting.means(losses[0])
                if not self.is_traced and loss.weight is None:
                    loss.checks.look(losses[0], end - start, means)
                if counting is not None and means is not None:
                    shares[number] = self._share(losses[0], means, end - start)
                    needed = needed or counting.needed
                if losses[0].requires_grad:
                    self._backward(losses, shares[number], own, (start, end))
            recording.finish()
        if not self.is_traced:
            loss.counts = needed
            loss.checks.finish(shares)
        return self._attach(values, shares)

    def _pieces(self) -> tuple[list[tuple[int, int]], list[Any]]:
        """The pieces in which something counts, and what each counts where that is known before it runs."""
        pieces = list(self.batch.pieces(self.loss.size))
        if self.loss.weight is None:
            return pieces, [1.0 if self.loss.reduction == "sum" else None] * len(pieces)
        weights = [self.loss.weight(self.batch.piece(*piece)) for piece in pieces]
        if not self.is_traced:
            weights = [float(w) if isinstance(w, Tensor) and w.device.type == "cpu" else w for w in weights]
        counting = [i for i, w in enumerate(weights) if isinstance(w, Tensor) or w]
        if not counting:  # 0 / 0, as without pieces
            return pieces[:1], [1.0]
        total = sum(weights)
        return [pieces[i] for i in counting], [weights[i] / total for i in counting]

    def _share(self, loss: Tensor, means: list[Mean], samples: int) -> Any:
        """Weight of a piece: a number, or a tensor where a cross entropy has counted."""
        share = samples / self.batch.samples
        if not means:
            return share
        if self.loss.mixed is None:  # what a loss is made of stays
            self.loss.mixed = is_mixed(loss, means)
        if self.targets is None:
            self.targets = [mean.targets / samples for mean in means]
        if not self.loss.mixed:
            return means[0].total / (self.batch.samples * (self.targets[0] or 1))
        if not self.is_traced and [float(mean.total) / samples for mean in means] != self.targets:
            raise WorkloadError(
                "The loss adds a mean over counted targets to something else, and its pieces count different numbers: "
                "no one weight of a piece is right",
                hint="Pass weight=, a function that counts in a batch what the whole loss is a mean over.",
            )
        return share

    def _backward(self, losses: list[Tensor], share: Any, own: dict[int, Tensor], piece: tuple[int, int]) -> None:
        value = losses[0].detach()
        if self.loss.extra is None and not self.is_traced:
            self._look_for_strangers(losses[0])
        weight = torch.full_like(value, share) if isinstance(share, float) else share.to(value.dtype).expand_as(value)
        if self.scale is not None:
            weight = weight * self.scale
        of_own = self.gradients.add(losses, weight, own.values())
        for i, gradient in zip(own, of_own, strict=True):
            if gradient is not None:
                self.rows[i][slice(*piece)] = gradient

    def _look_for_strangers(self, loss: Tensor) -> None:
        """Find what the loss trains that is in no module and no optimizer: in the graphs of two pieces alike."""
        trained = (getattr(node, "variable", None) for node in nodes_behind(loss))
        leaves = dict.fromkeys(leaf for leaf in trained if leaf is not None and leaf not in self.gradients)
        if self.strangers is None:
            self.strangers = leaves
            for leaf in leaves:
                self.gradients.follow(leaf)
            return
        self.loss.extra = [leaf for leaf in self.strangers if leaf in leaves or leaf in self.gradients]

    def _attach(self, values: list[Tensor], shares: list[Any]) -> Tensor:
        """The loss of the whole, with its gradients."""
        total: Tensor | None = None
        for value, share in zip(values, shares, strict=True):
            part = value * share
            if isinstance(share, Tensor):
                part = torch.where(share > 0, part, 0)  # the mean over nothing is nan
            total = part if total is None else total.add_(part)
        assert total is not None
        factor: Tensor | None = None
        if self.loss.weight is None and any(isinstance(share, Tensor) for share in shares):
            counted_in_all = torch.stack([torch.as_tensor(share).to(total) for share in shares]).sum()
            total = total / counted_in_all
            factor = torch.where(counted_in_all > 0, 1 / counted_in_all, 0)
        if self.scale is not None:
            factor = 1 / self.scale if factor is None else factor / self.scale
        rows = {self.batch.leaves[i]: gradient for i, gradient in self.rows.items()}
        tell = None if self.is_traced else self.loss.remember
        return self.gradients.attach(total.to(values[0].dtype), factor, rows, tell)

    def _whole_statistics(self) -> Recording:
        """A forward pass of the whole batch, for what its batch norms see; their running statistics follow."""
        with torch.no_grad(), Recording(self.modules, every=True) as recording:
            recording.start_piece()
            self.loss.__wrapped__(self.model, self.batch.piece(0, self.batch.samples))
        recording.finish()
        return recording


def _uses_half(parameters: Iterable[Tensor]) -> bool:
    """Whether gradients may be in float16, where small ones vanish without a scaled loss."""
    casts = any(
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16 for kind in ("cpu", "cuda")
    )
    return casts or any(parameter.dtype is torch.float16 for parameter in parameters)


def _refuse_sharded(modules: Iterable[nn.Module]) -> None:
    if dist.is_available() and dist.is_initialized():
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        if any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in modules):
            raise LowtideError(
                "FSDP shards gradients itself, which a batch in pieces cannot hand on",
                hint="Accumulate in a loop, with model.set_requires_gradient_sync(False) for all pieces but the last.",
            )
