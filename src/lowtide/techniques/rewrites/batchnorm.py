"""Batch norm in training as statistics and an elementwise op, which takes the residual and the activation with it.

A plain step keeps the input x of a batch norm for its gradient, and the activation's result z for the next layer's.
After this rewrite z is one elementwise pass over x, so a program may free it and compute it again. In the captured
graph that would repeat the statistics too. The backward pass stays, but an input y of an activation that it reads is
computed from x there.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.compat.dynamo import is_tangent
from lowtide.compat.operators import suggest_memory_format
from lowtide.kernels.activations import FUSED, Activation
from lowtide.kernels.batchnorm_ops import ACTIVATION, STATISTICS
from lowtide.techniques.rewrites.nodes import ALIASES, called, readers
from lowtide.tracing.capture.batchnorm import descendants

_aten: Any = torch.ops.aten
_MOVING, _STILL = _aten._native_batch_norm_legit_functional.default, _aten._native_batch_norm_legit.no_stats
_IDENTITY = Activation("identity")


@dataclass(frozen=True)
class _Norm:
    node: fx.Node
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    running: tuple[fx.Node | None, fx.Node | None]
    momentum: float
    eps: float
    results: Mapping[int, fx.Node]


def split_batch_norms(graph: fx.Graph) -> int:
    """Split each batch norm in training, and fuse what follows it; return how many."""
    waiting = descendants(filter(is_tangent, graph.find_nodes(op="placeholder")))
    nodes = [node for target in (_MOVING, _STILL) for node in graph.find_nodes(op="call_function", target=target)]
    count = 0
    for node in nodes:  # one by one: a batch norm may read what another was fused with
        norm = _norm(node)
        if norm is not None:
            _split(graph, norm, waiting)
            count += 1
    return count


def _norm(node: fx.Node) -> _Norm | None:
    args: Any = node.args
    if node.target is _STILL:
        args = (*args[:3], None, None, *args[3:])
    x, weight, bias, mean, var, is_training, momentum, eps = args
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    value, wide = x.meta["val"], torch.promote_types(x.meta["val"].dtype, torch.float32)
    kept = [results[index] for index in (1, 2, 3, 4) if index in results]
    vectors = [each.meta["val"].dtype for each in (*kept, mean, var) if each is not None]
    is_plain = is_training and isinstance(momentum, float) and (mean is None) == (var is None)
    is_dense = value.is_contiguous(memory_format=suggest_memory_format(value))
    moved = (user for index in (3, 4) if index in results for user in results[index].users)
    is_plain = is_plain and not any(map(_reads_values, moved))
    if not is_plain or 0 not in results or not is_dense or any(dtype != wide for dtype in vectors):
        return None
    if not _lies_as(results[0], x):
        return None
    return _Norm(node, x, weight, bias, (mean, var), momentum, eps, results)  # pyright: ignore[reportArgumentType]


def _reads_values(user: fx.Node) -> bool:
    """Tell whether a reader of moved running statistics needs them: statistics that run again move none.

    The buffers get those of the first run, and the gradient of a batch norm in training ignores them.
    """
    in_training = user.target is _aten.native_batch_norm_backward.default and user.args[7]
    return user.op != "output" and not in_training


def _split(graph: fx.Graph, norm: _Norm, waiting: set[fx.Node]) -> None:
    mode = norm.x.meta["val"].fake_mode
    with graph.inserting_before(norm.node), mode:
        both = called(graph, STATISTICS, norm.x, *norm.running, norm.momentum, norm.eps, like=norm.node)
        vectors = [called(graph, operator.getitem, both, place, like=norm.node) for place in range(4)]
    for index, vector in enumerate(vectors, start=1):
        if index in norm.results:
            norm.results[index].replace_all_uses_with(vector)
            graph.erase_node(norm.results[index])

    def insert(before: fx.Node, residual: fx.Node | None, activation: Activation) -> fx.Node:
        """Insert the elementwise op."""
        inputs = (norm.x, *vectors[:2], norm.weight, norm.bias, residual)
        with graph.inserting_before(before), mode:
            return called(graph, ACTIVATION, *inputs, activation.name, list(activation.numbers), like=before)

    # The batch norm's own result, a sum with a residual, and the activation's result, as far as they follow.
    y = norm.results[0]
    chain: list[tuple[fx.Node, fx.Node | None, Activation]] = [(y, None, _IDENTITY)]
    reader = _only_reader(y, waiting)
    residual = None if reader is None else _residual(reader, y)
    if reader is not None and residual is not None:
        chain.append((reader, residual, _IDENTITY))
        reader = _only_reader(reader, waiting)
    activation = None if reader is None else _activation(reader)
    if reader is not None and activation is not None:
        chain.append((reader, residual, activation))
    for replaced, added, function in reversed(chain):
        if replaced.users:
            replaced.replace_all_uses_with(insert(replaced, added, function))
        graph.erase_node(replaced)
    graph.erase_node(norm.node)


def _only_reader(node: fx.Node, waiting: set[fx.Node]) -> fx.Node | None:
    """The only op that reads a result without waiting for a gradient, if it reads the result itself."""
    every = [user for user in readers(node) if user.target not in ALIASES and user not in waiting]
    return every[0] if len(every) == 1 and every[0] in node.users else None


def _residual(node: fx.Node, y: fx.Node) -> fx.Node | None:
    """The other term of a sum with y, if it is laid out as y."""
    if node.target is not _aten.add.Tensor or node.kwargs:
        return None
    terms = [value for value in node.args if value is not y]
    if len(terms) != 1 or not isinstance(terms[0], fx.Node) or not _lies_as(terms[0], y) or not _lies_as(node, y):
        return None
    return terms[0]


def _lies_as(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    alike = isinstance(one, Tensor) and one.dtype == two.dtype and one.shape == two.shape
    return alike and one.stride() == two.stride()


def _activation(node: fx.Node) -> Activation | None:
    """An activation that the kernels know."""
    known = Activation.of_op(node.target, node.args, node.kwargs, gradient=False)
    if known is None or known.name not in FUSED or (known.name in ("elu", "celu") and known.numbers[0] <= 0):
        return None
    return known
