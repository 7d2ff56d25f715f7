"""Chunked loss: a head and its cross entropy that never hold all logits, without changes to the model's code.

A plain step holds the logits three to five times: in the head's dtype, as float32, after the log-softmax, and twice as
gradients. Here the head returns lazy logits (``lowtide.nn.lazy_logits``), which cross entropy takes chunk by chunk.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from lowtide.kernels import chunked_loss as kernels
from lowtide.nn.chunked_loss import chunk_rows
from lowtide.nn.lazy_logits import lazy_logits
from lowtide.profiling.profile import Profile
from lowtide.techniques.replaced_forward import Forward, apply_at_sites, replace_forward
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Kind, Option, Price, Technique
from lowtide.tracing.graph import Graph, Op
from lowtide.undo import Applied, Undo
from lowtide.workload import Workload


def chunk_loss(head: nn.Linear, chunk: int | None = None, *, path: str = "", planned: bool = False) -> Undo:
    """Have cross entropy of this head's logits computed in chunks of ``chunk`` rows, until the undo is called.

    Any other reader gets the whole logits: right, and without a saving. With ``planned`` it warns, once.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1000))
    >>> with chunk_loss(model[2]):
    ...     loss = nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.arange(5))
    """
    return replace_forward(ChunkedHead(head, chunk, path, planned), path=path, instead_of=nn.Linear)


class ChunkedHead(Forward):
    """The forward of a ``nn.Linear`` whose logits are computed when something other than cross entropy asks."""

    def __init__(self, module: nn.Linear, chunk: int | None = None, path: str = "", planned: bool = False) -> None:
        super().__init__(module)
        self.head = module
        self.chunk = chunk
        self.path = path
        self.warns = planned

    def __call__(self, input: Tensor) -> Tensor:
        return lazy_logits(input, self.head, chunk=self.chunk, path=self.path, on_whole=self._note_whole)

    def _note_whole(self) -> None:
        if self.warns:
            self.warns = False
            warnings.warn(
                f"The logits of {self.path or 'the head'} are read by more than cross entropy, which the planned step "
                "did not do, and are computed whole: the budget is not kept. Read them under torch.no_grad()",
                RuntimeWarning,
                stacklevel=2,
            )


@dataclass(frozen=True)
class ChunkedLossConfig(Config):
    """The rows of a chunk."""

    rows: int

    def __post_init__(self) -> None:
        self.require("rows", int, least=1)


class ChunkedLoss(Technique):
    """Cross entropy in chunks for the heads whose logits go nowhere else."""

    name = "chunked_loss"
    kind: Kind = "module"
    config: type[Config] = ChunkedLossConfig
    needs = "a nn.Linear whose output goes to cross entropy alone"

    def options(self, profile: Profile) -> list[Option]:
        """Each such head, in chunks as large as is efficient, and in smaller ones."""
        options: list[Option] = []
        for head in _heads(profile.graph):
            rows = min(head.rows, chunk_rows(head.classes, head.itemsize, profile.graph.tensor_device))
            sizes = [rows, rows // 8] if rows >= 8 else [rows]
            options += [Option(self.name, (head.path,), ChunkedLossConfig(size)) for size in sizes if size]
        return options

    def price(self, option: Option, profile: Profile) -> Price:
        """All logits and their gradients gone; the gradients of input and weight there since the forward pass."""
        graph, size = profile.graph, option.config_as(ChunkedLossConfig).rows
        heads = [head for head in _heads(graph) if head.path in option.site]
        removed = [interval for head in heads for interval in head.removed(graph)]
        added = [interval for head in heads for interval in head.added(graph, size)]
        seconds = sum(head.seconds(graph, size) for head in heads)
        return Price(Fidelity.ROUNDOFF, added=tuple(added), removed=tuple(removed), compute_seconds=seconds)

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Put the lazy forward on every head; the model is untouched if one cannot take it."""

        def chunk(head: nn.Module, path: str, option: Option) -> Undo:
            return chunk_loss(cast(nn.Linear, head), option.config_as(ChunkedLossConfig).rows, path=path, planned=True)

        return apply_at_sites(work, options, chunk)

    def check(self, option: Option) -> Check:
        """The same mathematics: sums over rows in another order, each at most rounded as often as in plain PyTorch."""
        return Check(Fidelity.ROUNDOFF)


# -- the heads of a traced step ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Head:
    """A linear layer and the cross entropy of its output, as ops and storages of a traced step."""

    path: str
    rows: int
    features: int
    classes: int
    itemsize: int  # of the logits
    product: int  # the op that computes the logits
    casts: bool  # whether the weight is copied to another dtype
    loss: int  # the op that has the losses of all rows
    storages: tuple[int, ...]  # the storages with the logits in any form, and their gradients
    others: tuple[int, ...]  # the ops of the loss, forward and backward, other than matrix products
    input: int | None  # the storage that is kept for the head's backward alone
    back: int  # the first op of the backward pass that computes a gradient of the head's input or parameters
    end: int  # after the last one

    def removed(self, graph: Graph) -> Iterator[Interval]:
        for index in self.storages:
            storage = graph.storages[index]
            yield Interval(storage.bytes, storage.birth, storage.death, f"{storage.label} of {self.path}")
        workspace = graph.ops[self.product].workspace_bytes
        yield Interval(workspace, self.product, self.product + 1, f"the workspace of {self.path}")
        if self.input is not None:
            storage = graph.storages[self.input]
            yield Interval(storage.bytes, self.loss + 1, storage.death, f"the input of {self.path}")

    def added(self, graph: Graph, chunk: int) -> Iterator[Interval]:
        rows, wide = min(chunk, self.rows), max(self.itemsize, 4)
        padding = kernels.padding(self.classes, graph.tensor_device)
        values = rows * (self.classes + padding)
        # The softmax widens 16 bits to 32 where it has no kernel for them, once the product has freed its workspace.
        widened = 4 * values if self.itemsize < 4 and graph.tensor_device == "cpu" else 0
        workspace = math.ceil(graph.ops[self.product].workspace_bytes * rows / self.rows)
        size = values * self.itemsize + max(widened, workspace)
        yield Interval(size, self.loss, self.loss + 1, f"a chunk of {self.path}")
        if padding and not self.casts:
            size = (self.classes + padding) * self.features * self.itemsize
            yield Interval(size, self.loss, self.loss + 1, f"{self.path}.weight, padded")
        inner = self.rows * self.features * self.itemsize
        yield Interval(inner, self.loss, self.end, f"the gradient of the input of {self.path}")
        yield Interval(self.classes * self.features * wide, self.loss, self.back, f"the gradient of {self.path}.weight")

    def seconds(self, graph: Graph, chunk: int) -> float:
        """Bytes over the bandwidth that the log-softmax had; never less than the sums over chunks take."""
        softmax = next(op for op in map(graph.ops.__getitem__, self.others) if op.kernel == "aten._log_softmax")
        moved = sum(value.bytes for value in (*softmax.inputs, *softmax.outputs))
        per_byte = softmax.seconds / max(moved, 1)
        sums = 2 * math.ceil(self.rows / chunk) * self.classes * self.features * max(self.itemsize, 4)
        passes = 2 if graph.tensor_device == "cuda" else 8  # over the logits: one kernel, or ATen's
        mine = (passes * self.rows * self.classes * self.itemsize + sums) * per_byte
        return max(mine - sum(graph.ops[index].seconds for index in self.others), sums * per_byte)


def _heads(graph: Graph) -> Iterator[_Head]:
    kinds = dict(graph.modules)
    calls: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.phase == "forward" and kinds.get(op.module) == "Linear" and op.kernel in _PRODUCTS:
            calls.setdefault(op.module, []).append(op)
    for path, ops in calls.items():
        head = _head(graph, path, ops[0]) if len(ops) == 1 else None
        if head is not None:
            yield head


def _head(graph: Graph, path: str, product: Op) -> _Head | None:
    """A head and its loss; None where its logits go elsewhere too."""
    logits = product.outputs[0]
    storages, after, others, loss = {logits.storage}, set[int](), list[int](), None
    for op in graph.ops[product.index + 1 :]:
        if op.phase != "forward" or not storages & {value.storage for value in op.inputs}:
            continue
        others.append(op.index)
        base, first = op.kernel, op.inputs[0].storage
        if base in _COPIES or base == "aten._log_softmax":
            storages |= {value.storage for value in op.outputs}
            after |= {value.storage for value in op.outputs} if base == "aten._log_softmax" or first in after else set()
        elif base in _LOSSES and first in after and loss is None:
            loss = op
        elif base != "aten.sum" or first not in after:  # of label smoothing
            return None
    if loss is None or len(logits.shape) != 2:
        return None
    gradients, ends = set[int](), list[Op]()
    for op in graph.ops[loss.index + 1 :]:
        read = {value.storage for value in op.inputs}
        begins = op.kernel in _BACK and bool(read & after)
        if op.phase != "backward" or not (begins or read & gradients):
            continue
        if op.kernel in (*_PRODUCTS, "aten.sum"):
            ends.append(op)
        else:
            others.append(op.index)
            gradients |= {value.storage for value in op.outputs}
    if not ends:
        return None
    matrices = [value for value in product.inputs if len(value.shape) == 2]
    read = matrices[0].storage
    is_kept_alone = graph.savers.get(read) == {path} and graph.storages[read].category == "activation"
    return _Head(
        path=path,
        rows=logits.shape[0],
        features=matrices[0].shape[1],
        classes=logits.shape[1],
        itemsize=logits.bytes // max(math.prod(logits.shape), 1),
        product=product.index,
        casts=graph.storages[matrices[1].storage].category == "activation",
        loss=loss.index,
        storages=(*sorted(storages | gradients),),
        others=(*others,),
        input=read if is_kept_alone else None,
        back=ends[0].index,
        end=ends[-1].index + 1,
    )


_PRODUCTS = ("aten.mm", "aten.addmm", "aten.linear")
_COPIES = ("aten._to_copy", "aten.clone", "aten.index", "aten._unsafe_view")
_LOSSES = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")
_BACK = ("aten.nll_loss_backward", "aten.nll_loss2d_backward")
