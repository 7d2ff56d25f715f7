"""Side effects of a captured graph: batch-norm statistics, counters and other buffers.

A captured batch norm is an op of PyTorch's own kernels that returns new running statistics, copied to the buffers
later. This file replaces it by the plain step's op, which updates the statistics itself: cuDNN's where PyTorch would
choose that. Its backward in training no longer reads the running statistics, which it does not use.

Other inputs that the step writes to get their new values at the end of forward. Ops that read the old values later, in
backward or when recomputed, read a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from lowtide.compat.cuda import batchnorm_reserve_bytes, takes_cudnn_batchnorm
from lowtide.compat.dynamo import inputs_written
from lowtide.compat.operators import suggest_memory_format
from lowtide.kernels.batchnorm_ops import STATISTICS

_aten: Any = torch.ops.aten
_FUNCTIONAL = _aten._native_batch_norm_legit_functional.default
_OWN, _OWN_AGAIN = _aten._native_batch_norm_legit.default, _aten._native_batch_norm_legit.no_stats
_CUDNN = _aten.cudnn_batch_norm.default
_BACKWARD = _aten.native_batch_norm_backward.default


def is_batch_norm(node: fx.Node) -> bool:
    """Tell whether the op also updates running statistics, or returns new ones."""
    if node.target is STATISTICS:
        return node.args[1] is not None
    return node.target in (_OWN, _CUDNN) or (node.target is _FUNCTIONAL and bool(node.args[5]))


def is_left_batch_norm(node: fx.Node) -> bool:
    """Tell whether it is a batch norm that stays as captured, with PyTorch's own kernel."""
    return node.target in (_FUNCTIONAL, _OWN_AGAIN)


def without_statistics(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Op and arguments of a recomputed batch norm, which does not update running statistics."""
    if target is STATISTICS:
        return target, (args[0], None, None, *args[3:])
    inputs, settings = args[:3], args[5:]
    return (target, (*inputs, None, None, *settings)) if target is _CUDNN else (_OWN_AGAIN, (*inputs, *settings))


def inputs_of(node: fx.Node, *, again: bool) -> list[fx.Node]:
    """Inputs of an op. A recomputed batch norm does not read the running statistics."""
    if again and is_batch_norm(node):
        inputs = node.args[:1] if node.target is STATISTICS else node.args[:3]
        return [value for value in inputs if isinstance(value, fx.Node)]
    return list(node.all_input_nodes)


def restore_batch_norms(module: fx.GraphModule, *, plain_kernels: bool = True) -> None:
    """Replace each batch norm of a joint graph by the plain step's op, and its backward by one without statistics."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_FUNCTIONAL):
        if plain_kernels and _alone_moves(node):
            _restore(graph, node)
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        if node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
    module.recompile()


def take_counters(module: fx.GraphModule) -> list[tuple[fx.Node, int]]:
    """Remove counters of batches from a graph, to increment them all at once."""
    (outcome,) = module.graph.find_nodes(op="output")
    outputs: list[Any] = list(outcome.args[0])  # pyright: ignore[reportArgumentType]
    counters: list[tuple[fx.Node, int]] = []
    for place, (node, written) in enumerate(zip(outputs, inputs_written(module.graph), strict=False)):
        if written is not None and isinstance(node, fx.Node) and _counts(node, written) and outputs.count(node) == 1:
            outputs[place] = written
            counters.append((written, node.args[1]))  # pyright: ignore[reportArgumentType]
            outcome.args = (tuple(outputs),)
            module.graph.erase_node(node)
    return counters


def copy_inputs_written_to(module: fx.GraphModule) -> list[fx.Node]:
    """Redirect readers of overwritten inputs to copies made first; return the copies."""
    graph = module.graph
    (outcome,) = graph.find_nodes(op="output")
    outputs: Any = outcome.args[0]
    values = list(zip(outputs, inputs_written(graph), strict=False))
    wanted = ancestors(value for value, written in values if written is None)  # more than other buffers' new values
    copies: list[fx.Node] = []
    for value, written in values:
        if written is None or value is written:
            continue
        # A batch norm reads its statistics before they change, and is recomputed without them.
        readers = [user for user in written.users if user in wanted and not is_batch_norm(user)]
        if readers:
            with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
                copy = graph.call_function(_aten.clone.default, (written,))
            with written.meta["val"].fake_mode:
                copy.meta["val"] = written.meta["val"].detach().clone()
            for user in readers:
                user.replace_input_with(written, copy)
            copies.append(copy)
    return copies


def ancestors(nodes: Iterable[Any]) -> set[fx.Node]:
    """These nodes and all their inputs, transitively."""
    return _reached(nodes, lambda node: node.all_input_nodes)


def descendants(nodes: Iterable[Any]) -> set[fx.Node]:
    """These nodes and all their users, transitively."""
    return _reached(nodes, lambda node: node.users)


def _reached(nodes: Iterable[Any], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    waiting = [node for node in nodes if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += onward(node)
    return reached


def _counts(node: fx.Node, counter: fx.Node) -> bool:
    """Tell whether an output counts: its buffer ``counter`` plus an integer, with no other reader of either."""
    return (
        node.target is _aten.add.Tensor
        and not node.kwargs
        and node.args[0] is counter
        and isinstance(node.args[1], int)
        and len(node.users) == len(counter.users) == 1
        and not counter.meta["val"].is_floating_point()
    )


def _alone_moves(node: fx.Node) -> bool:
    """Tell whether only batch norms in training read the running statistics, so that they may be updated at once."""
    if not node.args[5]:
        return False
    statistics = (value for value in node.args[3:5] if isinstance(value, fx.Node))
    return all(value.op == "placeholder" and all(map(_moves_or_ends, value.users)) for value in statistics)


def _moves_or_ends(user: fx.Node) -> bool:
    return (
        user.op == "output"
        or user.target in (_OWN, _CUDNN, _BACKWARD)
        or (user.target is _FUNCTIONAL and bool(user.args[5]))
    )


def _restore(graph: fx.Graph, node: fx.Node) -> None:
    args: Any = node.args
    means, variances = args[3:5]
    for index, moved in ((3, means), (4, variances)):
        for item in _items(node, index):
            # Statistics in half precision come back in fp32, to be rounded into the buffer; the op does that itself.
            for copy in [user for user in item.users if user.target is _aten._to_copy.default]:
                if copy.meta["val"].dtype == moved.meta["val"].dtype:
                    copy.replace_all_uses_with(moved)
                    graph.erase_node(copy)
            item.replace_all_uses_with(moved)
            graph.erase_node(item)
    node.meta["val"] = node.meta["val"][:3]
    if not _is_cudnns(args):
        node.target = _OWN
        return
    node.target = _CUDNN
    x = args[0].meta["val"]
    size = batchnorm_reserve_bytes(x)
    with x.fake_mode:
        reserve = torch.empty(size, dtype=torch.uint8, device=x.device)
    node.meta["val"] = (*node.meta["val"], reserve)
    with graph.inserting_after(node):
        item_of_reserve = graph.call_function(operator.getitem, (node, 3))
        item_of_reserve.meta["val"] = reserve
    for mean in list(_items(node, 1)):
        for user in [user for user in mean.users if user.target is _BACKWARD]:
            _restore_backward(graph, user, item_of_reserve)


def _is_cudnns(args: Any) -> bool:
    if any(value is None for value in args[:5]):
        return False  # cuDNN's wants them all
    values = [value.meta["val"] for value in args[:5]]
    return takes_cudnn_batchnorm(values, args[7])


def _restore_backward(graph: fx.Graph, node: fx.Node, reserve: fx.Node) -> None:
    args: Any = node.args
    gradient, x, weight, _, _, mean, scale, _, eps, _ = args
    wanted = suggest_memory_format(x.meta["val"])
    if not gradient.meta["val"].is_contiguous(memory_format=wanted):
        with graph.inserting_before(node), x.meta["val"].fake_mode:
            laid = graph.call_function(_aten.clone.default, (gradient,), {"memory_format": wanted})
            laid.meta["val"] = gradient.meta["val"].clone(memory_format=wanted)
            gradient = laid
    node.target = _aten.cudnn_batch_norm_backward.default
    node.args = (x, gradient, weight, None, None, mean, scale, eps, reserve)


def _items(node: fx.Node, index: int) -> Iterable[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == index]
