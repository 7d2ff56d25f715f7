"""Targets that the cross entropies of a loss count: those that are not ignored, with their class weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.compat.autograd import (
    LOG_SOFTMAX_NODES,
    NLL_NODES,
    input_metadata,
    next_sequence_number,
    raw_saved,
    saved_value,
    sequence_number,
)
from lowtide.compat.dispatch import TorchDispatchMode
from lowtide.compat.dynamo import skip_code
from lowtide.errors import WorkloadError


class Mean(NamedTuple):
    """A cross entropy's mean: over how many targets it was (weighted, without ignored ones), and of how many."""

    node: Any
    total: Tensor
    targets: int


class Counting(TorchFunctionMode):
    """Inside ``with``, torch's cross entropies are seen as they run; ``means`` then finds those of a loss.

    Their nodes keep the counts too, but saved-tensor hooks may stand before them: a checkpoint would run again. To see
    them takes 2 µs for each function of torch's, so it is done where it is ``needed`` alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = False  # hooks stand before what a node keeps
        self._seen: dict[int, tuple[Tensor, int]] = {}  # by the number of the node in the graph

        # Compiled functions inline this one. It is not compiled on its own for functions that they leave to Python.
        skip_code(Counting.__torch_function__.__code__)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _CROSS_ENTROPIES or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        with _Totals(self._seen):
            return func(*args, **(kwargs or {}))

    def means(self, loss: Tensor) -> list[Mean]:
        """The cross entropies behind a loss that are means: torch's own and lowtide's in chunks.

        An error where one of them has a count that nobody has seen.
        """
        nodes = list(nodes_behind(loss, lambda node: not _is_mean(node) and _is_small(node)))
        return [self._mean(node) for node in nodes if _is_mean(node)]

    def _mean(self, node: Any) -> Mean:
        if (counted := getattr(node, "counted", None)) is not None:
            return Mean(node, *counted)
        try:
            total, target = saved_tensors(node, "total_weight", "target")
        except RuntimeError as error:  # there are hooks
            self.needed = True
            seen = self._seen.get(sequence_number(node))
            if seen is None:
                raise WorkloadError(
                    "The targets that the loss's cross entropy counts cannot be seen: it is not F.cross_entropy, and "
                    "has a checkpoint or another saved-tensor hook around it",
                    hint="Pass weight=, a function that counts in a batch what the loss is a mean over.",
                ) from error
            return Mean(node, *seen)
        return Mean(node, total, target.numel())


# A mean is one number, and what is made of it on the way to the loss is small: behind large tensors there is none.
_FEW = 1024

_CROSS_ENTROPIES = frozenset({F.cross_entropy, F.nll_loss})
NLL_LOSSES = frozenset({torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default})


def nodes_behind(loss: Tensor, goes_on: Callable[[Any], bool] = lambda _: True) -> Iterator[Any]:
    """Nodes of a loss's graph, the nearest first, as far back as ``goes_on`` says."""
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    known = set(nodes)
    for node in nodes:
        yield node
        for edge, _ in node.next_functions if goes_on(node) else ():
            if edge is not None and edge not in known:
                known.add(edge)
                nodes.append(edge)


def _is_mean(node: Any) -> bool:
    is_torchs = isinstance(node, NLL_NODES) and saved_value(node, "reduction") == 1
    return is_torchs or getattr(node, "counted", None) is not None


def _is_small(node: Any) -> bool:
    return min((math.prod(each.shape) for each in input_metadata(node)), default=0) <= _FEW


class _Totals(TorchDispatchMode):
    """Notes the second result of torch's op: the sum of the weights of what counts."""

    def __init__(self, seen: dict[int, tuple[Tensor, int]]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in NLL_LOSSES:
            # The newest node is this op's. Without a graph it is an older one, which has its count already.
            self._seen.setdefault(next_sequence_number() - 1, (result[1], args[1].numel()))
        return result


def is_mixed(loss: Tensor, means: list[Mean]) -> bool:
    """Whether a loss is more than one mean: then no weight of a piece is right for all of it, but where all count.

    It is one where everything behind it goes through the mean's own log-softmax, as with label smoothing.
    """
    if len(means) != 1:
        return len(means) > 1
    behind = [edge for edge, _ in means[0].node.next_functions if edge is not None]
    ends = {means[0].node, *(node for node in behind if isinstance(node, LOG_SOFTMAX_NODES))}
    return any(hasattr(node, "variable") for node in nodes_behind(loss, lambda node: node not in ends))


def saved_tensors(node: Any, *names: str) -> list[Tensor]:
    """Tensors that a node of autograd's graph saved; RuntimeError where a saved-tensor hook stands before one."""
    saved: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for name in names:
        raw_saved(node, name).register_hooks(see, lambda tensor: tensor)
    return saved
