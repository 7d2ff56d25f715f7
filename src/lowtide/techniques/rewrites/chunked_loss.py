"""A linear layer and the cross entropy of its result as one op, in which the logits are never whole.

The pattern is matched in the graph, so it may stand anywhere. Models of Hugging Face compute their loss inside, cast
the logits to 32 bits and ignore -100. The op gives the gradients too, up to the factor that backward brings.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.nn import chunked_loss
from lowtide.techniques.rewrites.nodes import ALIASES, behind, called, readers
from lowtide.tracing.capture.joint import size_of

_aten: Any = torch.ops.aten
_OP: Any = getattr(torch.ops.lowtide, chunked_loss.OP).default
_RESHAPES = (
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten._to_copy.default,
    _aten.clone.default,
)
_SLICE, _SLICE_BACKWARD = _aten.slice.Tensor, _aten.slice_backward.default  # of sequences: logits[:, :-1]
_SAME = (*ALIASES, _aten._to_copy.default)  # on a GPU, autocast casts between the softmax and the loss
_DTYPES = (torch.float32, torch.bfloat16)  # in float16, gradients need a scale of their own
_LEAST_BYTES = 2**26  # of logits: smaller ones gain nothing


@dataclass(frozen=True)
class _Slice:
    """A range of positions in each sequence that has logits in the loss. The others get a target that is ignored."""

    sequences: int
    length: int
    left_out: tuple[int, int]  # positions before and after


@dataclass(frozen=True)
class _Match:
    """One loss: its nodes in the graph."""

    x: fx.Node
    weight: fx.Node  # as the product takes it: transposed
    bias: fx.Node | None
    target: fx.Node
    slice: _Slice | None
    reduction: int
    ignore_index: int
    loss: fx.Node
    tangent: fx.Node
    dx: tuple[fx.Node, ...]
    dweight: tuple[fx.Node, ...]
    dbias: tuple[fx.Node, ...]
    replaced: tuple[fx.Node, ...]


def chunk_losses(graph: fx.Graph, *, least_bytes: int | None = None) -> int:
    """Replace each linear layer whose result goes to a cross entropy alone; return how many."""
    matches = list(_matches(graph, _LEAST_BYTES if least_bytes is None else least_bytes))
    for match in matches:
        _replace(graph, match)
    return len(matches)


def _matches(graph: fx.Graph, least_bytes: int) -> Iterator[_Match]:
    for forward in graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        match = _match(forward)
        if match is not None and size_of(match.replaced[0].meta["val"]) >= least_bytes:
            yield match


def _match(forward: fx.Node) -> _Match | None:
    arguments: Any = forward.args
    given, target, class_weight, reduction, ignore_index = arguments
    softmax = behind(given, _SAME)
    is_plain = class_weight is None and reduction in (1, 2)
    if not is_plain or softmax.target is not _aten._log_softmax.default or softmax.args[1] not in (1, -1):
        return None
    users = [user for user in readers(softmax, _SAME) if user.target not in _SAME]
    by_target = {user.target: user for user in users}
    backward = by_target.get(_aten.nll_loss_backward.default)
    gradient = by_target.get(_aten._log_softmax_backward_data.default)
    if len(users) != 3 or backward is None or gradient is None or behind(gradient.args[0], _SAME) is not backward:
        return None
    inward = _inward(softmax.args[0])
    outward = _outward(gradient)
    product, logits_gradient = inward[-1], outward[-1]
    if not _is_linear(product) or len(product.users) != 1:
        return None
    slices = [node for node in inward if node.target is _SLICE]
    cut = _slice(slices, [node for node in outward if node.target is _SLICE_BACKWARD], product)
    rows, classes = product.meta["val"].shape
    used = rows if cut is None else cut.sequences * cut.length
    if bool(slices) != (cut is not None) or softmax.meta["val"].shape != (used, classes):
        return None  # such as several losses for each row, of a part of it each
    if logits_gradient.meta["val"].shape != (rows, classes):
        return None
    inputs: Any = product.args
    *bias, x, weight = inputs
    uses = _uses(logits_gradient, x)
    loss = next((user for user in forward.users if user.args[1] == 0), None)
    if uses is None or loss is None:
        return None
    dx, dweight, dbias, between = uses
    tangent: Any = backward.args[0]
    return _Match(
        x,
        weight,
        bias[0] if bias else None,
        target,
        cut,
        reduction,
        ignore_index,
        loss,
        tangent,
        tuple(dx),
        tuple(dweight),
        tuple(dbias),
        (product, *inward[:-1], softmax, *readers(softmax, _SAME), *forward.users, *readers(backward, _SAME), backward,
         *outward, *between, *dx, *dweight, *dbias),
    )  # fmt: skip


def _is_linear(node: fx.Node) -> bool:
    """Whether it is the product of a linear layer, in a dtype of the op: with no bias, or one for each class."""
    if node.target not in (_aten.mm.default, _aten.addmm.default) or node.kwargs:
        return False
    inputs: Any = node.args
    *bias, x, _ = (value.meta["val"] for value in inputs)
    product = node.meta["val"]
    fits = all(each.shape == product.shape[1:] for each in bias)
    return fits and product.dtype in _DTYPES and x.dtype == product.dtype


def _inward(node: Any) -> list[fx.Node]:
    """Follow reshapes with one reader from the softmax's input back to the product."""
    path: list[Any] = [node]
    while path[-1].target in (*_RESHAPES, _SLICE) and len(path[-1].users) == 1:
        path.append(path[-1].args[0])
    return path


def _outward(node: fx.Node) -> list[fx.Node]:
    """From the softmax's gradient on to the gradient of the product, through reshapes with one reader."""
    path = [node]
    while len(path[-1].users) == 1 and (user := next(iter(path[-1].users))).target in (*_RESHAPES, _SLICE_BACKWARD):
        path.append(user)
    return path


def _slice(slices: list[fx.Node], backward: list[fx.Node], product: fx.Node) -> _Slice | None:
    """The positions that one slice takes of sequences of rows; None for any other slice, and for none."""
    if len(slices) != 1 or len(backward) != 1:
        return None
    arguments: Any = slices[0].args
    whole, dim, *bounds = arguments
    shape = list(whole.meta["val"].shape)
    rows, classes = product.meta["val"].shape
    start, end, step = (*bounds, *(None, None, 1)[len(bounds) :])
    if len(shape) != 3 or dim not in (1, -2) or shape[2] != classes or shape[0] * shape[1] != rows or step != 1:
        return None
    if list(backward[0].args[1:]) != [shape, dim, start, end, step]:
        return None
    first, last, _ = slice(start, end).indices(shape[1])
    return _Slice(shape[0], last - first, (first, shape[1] - last)) if last > first else None


def _uses(gradient: fx.Node, x: fx.Node) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node], list[fx.Node]] | None:
    """Gradients of input, weight and bias that are read off the logits' gradient, and nodes between; None if others."""
    dx: list[fx.Node] = []
    dweight: list[fx.Node] = []
    dbias: list[fx.Node] = []
    between: list[fx.Node] = []
    for user in gradient.users:
        if user.target is _aten.mm.default and user.args[0] is gradient:
            dx.append(user)
        elif user.target is _aten.sum.dim_IntList and user.args[1:] == ([0], True) and not user.kwargs:
            dbias.append(user)
        elif user.target is _aten.t.default and all(
            each.target is _aten.mm.default and each.args[0] is user and each.args[1] is x for each in user.users
        ):
            between.append(user)
            dweight += user.users
        else:
            return None
    return dx, dweight, dbias, between


def _replace(graph: fx.Graph, match: _Match) -> None:
    forward = match.loss.args[0]
    logits = match.replaced[0].meta["val"]
    with graph.inserting_before(forward), logits.fake_mode:  # pyright: ignore[reportArgumentType]
        weight = called(graph, _aten.t.default, match.weight)
        target = match.target
        if match.slice is not None:
            target = called(graph, _aten.view.default, target, [match.slice.sequences, match.slice.length])
            target = called(
                graph, _aten.constant_pad_nd.default, target, list(match.slice.left_out), match.ignore_index
            )
            target = called(graph, _aten.view.default, target, [-1])
        needs = [bool(match.dx), bool(match.dweight), bool(match.dbias)]
        fused = called(graph, _OP, match.x, weight, match.bias, target, match.ignore_index, match.reduction == 1, needs)
        loss, *gradients = (called(graph, operator.getitem, fused, place) for place in range(4))
        if match.loss.meta["val"].dtype != loss.meta["val"].dtype:
            loss = called(graph, _aten._to_copy.default, loss, dtype=match.loss.meta["val"].dtype)
    match.loss.replace_all_uses_with(loss)
    for gradient, nodes in zip(gradients, (match.dx, match.dweight, match.dbias), strict=True):
        for node in nodes:
            with graph.inserting_before(node), logits.fake_mode:
                scaled = called(graph, _aten.mul.Tensor, gradient, match.tangent)
                if scaled.meta["val"].shape != node.meta["val"].shape:  # of the bias, whose sum keeps its dimension
                    scaled = called(graph, _aten.view.default, scaled, list(node.meta["val"].shape))
            scaled.meta = {**node.meta, "val": scaled.meta["val"]}
            node.replace_all_uses_with(scaled)
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in sorted(set(match.replaced), key=lambda node: -order[node]):
        assert not node.users, node
        graph.erase_node(node)
