"""The way from a linear layer's product to the softmax of a loss, and the way of its gradient back.

Models reshape and cast their logits, and slice sequences. Gemma caps them, cap·tanh(z/cap), and BART adds a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.techniques.rewrites.nodes import ALIASES, behind, readers

_aten: Any = torch.ops.aten
_RESHAPES = (
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten._to_copy.default,
    _aten.clone.default,
)
_SLICE, _SLICE_BACKWARD = _aten.slice.Tensor, _aten.slice_backward.default  # of sequences: logits[:, :-1]
_DTYPES = (torch.float32, torch.bfloat16)  # in float16, gradients need a scale of their own


@dataclass(frozen=True)
class Slice:
    """A range of positions in each sequence that has logits in the loss. The others get a target that is ignored."""

    sequences: int
    length: int
    left_out: tuple[int, int]  # positions before and after


@dataclass(frozen=True)
class Logits:
    """A linear layer's product, the softmax's input that is made of it alone, and the product's gradient."""

    product: fx.Node
    gradient: fx.Node
    slice: Slice | None
    cap: float  # 0 for none
    bias: fx.Node | None  # added to the product
    nodes: tuple[fx.Node, ...]  # forward and backward


@dataclass
class _Path:
    """Nodes from the softmax's input back to the product."""

    nodes: list[Any]
    slices: list[fx.Node]
    cap: float = 0.0
    tanh: fx.Node | None = None
    bias: fx.Node | None = None


def logits_of(given: Any, slope: fx.Node) -> Logits | None:
    """The linear layer behind a softmax's input, whose gradient is ``slope``; None where anything else is between."""
    way = _inward(given)
    product = way.nodes[-1]
    if not _is_linear(product) or len(product.users) != 1:
        return None
    outward = _outward(slope, way)
    back = [node for node in outward if node.target is _SLICE_BACKWARD]
    cut = _slice(way.slices, back, product)
    rows, classes = product.meta["val"].shape
    used = rows if cut is None else cut.sequences * cut.length
    if bool(way.slices) != (cut is not None) or given.meta["val"].shape != (used, classes):
        return None  # such as several losses for each row, of a part of it each
    if outward[-1].meta["val"].shape != (rows, classes):
        return None
    if way.tanh is not None and not any(node.target is _aten.tanh_backward.default for node in outward):
        return None
    if way.bias is not None and way.bias.meta["val"].numel() != classes:
        return None
    return Logits(product, outward[-1], cut, way.cap, way.bias, (*way.nodes, *_copies(way.tanh), *outward))


def _copies(tanh: fx.Node | None) -> Sequence[fx.Node]:
    """Aliases of a tanh, which its backward reads."""
    return [] if tanh is None else [node for node in readers(tanh) if node.target in ALIASES]


def _is_linear(node: Any) -> bool:
    """Tell whether it is a linear layer's product, in a dtype of the op: with a bias for each class, or without."""
    if node.target not in (_aten.mm.default, _aten.addmm.default) or node.kwargs:
        return False
    *bias, x, _ = (value.meta["val"] for value in node.args)
    product = node.meta["val"]
    fits = all(each.shape == product.shape[1:] for each in bias)
    return fits and product.dtype in _DTYPES and x.dtype == product.dtype


def _inward(node: Any) -> _Path:
    """Follow the softmax's input back: reshapes and slices, one cap, and behind it one bias."""
    way = _Path([node], [])
    while len((node := way.nodes[-1]).users) == 1:
        capped = _capped(node) if way.tanh is way.bias is None else None
        biased = _biased(node) if way.bias is None else None
        if node.target in _RESHAPES:
            way.nodes.append(node.args[0])
        elif node.target is _SLICE:
            way.slices.append(node)
            way.nodes.append(node.args[0])
        elif capped is not None:
            way.cap, way.tanh, divided = capped
            way.nodes += [way.tanh, divided, divided.args[0]]
        elif biased is not None:
            way.bias, inner = biased
            way.nodes.append(inner)
        else:
            break
    return way


def _capped(node: fx.Node) -> tuple[float, fx.Node, fx.Node] | None:
    """The cap, the tanh and the division of cap·tanh(z/cap)."""
    tanh: Any = node.args[0] if node.args else None
    if node.target is not _aten.mul.Tensor or not isinstance(tanh, fx.Node) or tanh.target is not _aten.tanh.default:
        return None
    divided: Any = tanh.args[0]
    if divided.target is not _aten.div.Tensor or len(divided.users) != 1 or divided.args[1] != node.args[1]:
        return None
    cap = node.args[1]
    return (float(cap), tanh, divided) if isinstance(cap, int | float) and cap > 0 else None


def _biased(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The bias of each class, and the term that it is added to."""
    terms: Any = node.args
    if node.target is not _aten.add.Tensor or node.kwargs or not all(isinstance(each, fx.Node) for each in terms):
        return None
    inner, bias = terms
    shape = bias.meta["val"].shape
    return (bias, inner) if shape.numel() == shape[-1:].numel() else None


def _outward(node: fx.Node, way: _Path) -> list[fx.Node]:
    """From the softmax's gradient on to the gradient of the product, through one reader at a time."""
    path, capped = [node], way.tanh is None
    while len(path[-1].users) == 1:
        user = next(iter(path[-1].users))
        if user.target in (*_RESHAPES, _SLICE_BACKWARD):
            path.append(user)
        elif not capped and (slopes := _slopes(user, way)) is not None:
            capped = True
            path += slopes
        else:
            break
    return path


def _slopes(scaled: fx.Node, way: _Path) -> list[fx.Node] | None:
    """The gradient's way through the cap: times it, through the tanh, divided by it."""
    if scaled.target is not _aten.mul.Tensor or scaled.args[1] != way.cap or len(scaled.users) != 1:
        return None
    slope = next(iter(scaled.users))
    if slope.target is not _aten.tanh_backward.default or slope.args[0] is not scaled or len(slope.users) != 1:
        return None
    divided = next(iter(slope.users))
    if behind(slope.args[1], ALIASES) is not way.tanh or divided.target is not _aten.div.Tensor:
        return None
    return [scaled, slope, divided] if divided.args == (slope, way.cap) else None


def _slice(slices: list[fx.Node], backward: list[fx.Node], product: fx.Node) -> Slice | None:
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
    return Slice(shape[0], last - first, (first, shape[1] - last)) if last > first else None
