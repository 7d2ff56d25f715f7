"""A linear layer and the cross entropy of its result as one op, in which the logits are never whole.

The pattern is matched in the graph, so it may stand anywhere. Models of Hugging Face compute their loss inside, cast
the logits to 32 bits and ignore -100. The op gives the gradients too, up to the factor that backward brings.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from lowtide.nn import chunked_loss
from lowtide.techniques.rewrites.label_smoothing import smoothing_of
from lowtide.techniques.rewrites.logits import Logits, logits_of
from lowtide.techniques.rewrites.nodes import ALIASES, behind, called, readers
from lowtide.tracing.capture.joint import size_of

_aten: Any = torch.ops.aten
_OP: Any = getattr(torch.ops.lowtide, chunked_loss.OP).default
_SAME = (*ALIASES, _aten._to_copy.default)  # on a GPU, autocast casts between the softmax and the loss
_LEAST_BYTES = 2**26  # of logits: smaller ones gain nothing


@dataclass(frozen=True)
class _Match:
    """One loss: its nodes in the graph."""

    x: fx.Node
    weight: fx.Node  # as the product takes it: transposed
    bias: fx.Node | None
    logits: Logits
    target: fx.Node
    reduction: int
    ignore_index: int
    smoothing: float
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
        if match is not None and size_of(match.logits.product.meta["val"]) >= least_bytes:
            yield match


def _match(forward: fx.Node) -> _Match | None:
    arguments: Any = forward.args
    given, target, class_weight, reduction, ignore_index = arguments
    softmax = behind(given, _SAME)
    is_plain = class_weight is None and reduction in (1, 2)
    if not is_plain or softmax.target is not _aten._log_softmax.default or softmax.args[1] not in (1, -1):
        return None
    by_target = {user.target: user for user in readers(softmax, _SAME)}
    backward = by_target.get(_aten.nll_loss_backward.default)
    gradient = by_target.get(_aten._log_softmax_backward_data.default)
    if backward is None or gradient is None:
        return None
    slope, tangent = behind(gradient.args[0], _SAME), cast(fx.Node, backward.args[0])
    loss = next((user for user in forward.users if user.args[1] == 0), None)
    smoothing = None if slope is backward else smoothing_of(softmax, forward, backward, slope)
    if smoothing is not None:
        loss, tangent = smoothing.loss, smoothing.tangent
    elif slope is not backward:
        return None
    logits = logits_of(softmax.args[0], gradient)
    if logits is None or loss is None:
        return None
    inputs: Any = logits.product.args
    *bias, x, weight = inputs
    uses = _uses(logits.gradient, x)
    if uses is None:
        return None
    dx, dweight, dbias, between = uses
    replaced = (*logits.nodes, softmax, *readers(softmax, _SAME), *forward.users, *readers(backward, _SAME), backward,
                *(() if smoothing is None else smoothing.nodes), *between, *dx, *dweight, *dbias)  # fmt: skip
    results = {loss, *dx, *dweight, *dbias}
    if any(user not in replaced for node in {*replaced} - results for user in node.users):
        return None  # another reader
    epsilon = 0.0 if smoothing is None else smoothing.epsilon
    own_bias = bias[0] if bias else None
    gradients = tuple(dx), tuple(dweight), tuple(dbias)
    return _Match(
        x, weight, own_bias, logits, target, reduction, ignore_index, epsilon, loss, tangent, *gradients, replaced
    )


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
    value, mode = match.loss.meta["val"], match.logits.product.meta["val"].fake_mode
    with graph.inserting_before(match.loss), mode:
        weight = called(graph, _aten.t.default, match.weight)
        numbers = (match.ignore_index, match.smoothing, match.logits.cap, match.reduction == 1)
        needs = [bool(match.dx), bool(match.dweight), bool(match.dbias)]
        fused = called(graph, _OP, match.x, weight, _bias(graph, match), _target(graph, match), *numbers, needs)
        loss, *gradients = (called(graph, operator.getitem, fused, place) for place in range(4))
        if value.dtype != loss.meta["val"].dtype:
            loss = called(graph, _aten._to_copy.default, loss, dtype=value.dtype)
    match.loss.replace_all_uses_with(loss)
    for gradient, nodes in zip(gradients, (match.dx, match.dweight, match.dbias), strict=True):
        for node in nodes:
            with graph.inserting_before(node), mode:
                scaled = called(graph, _aten.mul.Tensor, gradient, match.tangent)
                if scaled.meta["val"].shape != node.meta["val"].shape:  # of the bias, whose sum keeps its dimension
                    scaled = called(graph, _aten.view.default, scaled, list(node.meta["val"].shape))
            scaled.meta = {**node.meta, "val": scaled.meta["val"]}
            node.replace_all_uses_with(scaled)
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in sorted(set(match.replaced), key=lambda node: -order[node]):
        assert not node.users, node
        graph.erase_node(node)


def _target(graph: fx.Graph, match: _Match) -> fx.Node:
    """A target for each row of the product: those without logits in the loss are ignored."""
    cut, target = match.logits.slice, match.target
    if cut is None:
        return target
    whole = called(graph, _aten.view.default, target, [cut.sequences, cut.length])
    whole = called(graph, _aten.constant_pad_nd.default, whole, list(cut.left_out), match.ignore_index)
    return called(graph, _aten.view.default, whole, [-1])


def _bias(graph: fx.Graph, match: _Match) -> fx.Node | None:
    """The bias of the linear layer, and the one that is added to its result."""
    if match.logits.bias is None:
        return match.bias
    added = called(graph, _aten.view.default, match.logits.bias, [-1])
    return added if match.bias is None else called(graph, _aten.add.Tensor, match.bias, added)
