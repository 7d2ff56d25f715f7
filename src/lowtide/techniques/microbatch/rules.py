"""Rules for ATen ops: the fact about a result, from the facts about what the op reads.

An op without a rule gives nothing, and so does a rule in doubt: what is not proved counts as mixing samples. The shapes
of every result are compared between the two captures, so a rule need not look at sizes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide.compat.operators import schema_of
from lowtide.techniques.microbatch import layouts
from lowtide.techniques.microbatch.facts import (
    FIXED,
    TOTAL,
    Fact,
    PairedCall,
    Rule,
    added,
    are_plain,
    broadcast,
    constant_of,
    divided,
    is_rows,
    multiplied,
)


def find_rule(op: Any) -> Rule | None:
    """The rule of an op; None where nothing is known of it."""
    name = schema_of(op).name.removeprefix("aten::")
    if op.namespace != "aten":
        return None
    if name in RULES:
        return RULES[name]
    return pointwise if torch.Tag.pointwise in op.tags else None


# -- one element at a time -----------------------------------------------------------------------------------


def pointwise(call: PairedCall) -> Fact | None:
    """Any function of elements at the same place."""
    names = call.tensors()
    known = [call.of(name) for name in names]
    facts = [fact for fact in known if fact is not None]
    if len(facts) < len(names) or not are_plain(facts) or not call.is_same():
        return None
    return broadcast(facts, [call.shape(name) for name in names])


def add(call: PairedCall) -> Fact | None:
    if call.whole.get("alpha", 1) != call.part.get("alpha", 1):
        return None
    for one, other in (("self", "other"), ("other", "self")):
        fact = call.of(other)
        if (
            fact is not None
            and fact.kind in ("total", "counted")
            and call.of(one) == FIXED
            and is_zero(call.whole[one])
        ):
            return fact
    return _joined(call, added)


def multiply(call: PairedCall) -> Fact | None:
    return _joined(call, multiplied)


def divide(call: PairedCall) -> Fact | None:
    return _joined(call, divided) if call.whole.get("rounding_mode") is None else pointwise(call)


def _joined(call: PairedCall, join: Callable[[Fact, Fact, Fact | None], Fact | None]) -> Fact | None:
    a, b = call.of("self"), call.of("other")
    if a is None or b is None:
        return None
    return join(a, b, broadcast([a, b], [call.shape("self"), call.shape("other")]))


def linear(call: PairedCall) -> Fact | None:
    """A negative, a copy, another dtype."""
    fact = call.of("self")
    return None if fact is None else replace(fact, keys=fact.keys if fact.kind == "counted" else frozenset())


def copied(call: PairedCall) -> Fact | None:
    """The same value, so that a count stays one."""
    return call.of("self")


def is_zero(value: Any) -> bool:
    """Whether a value is the constant 0, from which a sum of losses starts."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value == 0
    name = getattr(getattr(value.target, "overloadpacket", None), "__name__", "")
    if name in ("clone", "_to_copy", "lift_fresh_copy", "expand", "view", "alias", "detach"):
        return is_zero(value.args[0])
    if value.op == "get_attr":
        return not bool(constant_of(value).any())
    return name == "zeros" or (name == "full" and is_zero(value.args[1]))


# -- along dimensions ----------------------------------------------------------------------------------------


def summed(call: PairedCall) -> Fact | None:
    """A sum or a mean: over the samples it gives a total."""
    fact, dims = call.of("self"), call.dims()
    if fact is None or not call.is_same() or fact.kind == "place":
        return None
    if not is_rows(fact):
        return replace(fact, keys=fact.keys if fact.kind == "counted" else frozenset())
    if fact.dim not in dims:
        return _without(call, fact, dims)
    if call.name == "mean":
        return Fact("total", fact.power - 1)
    is_count = len(dims) == len(call.shape("self")) and not fact.power
    return Fact("total", fact.power, keys=counted_by(call.whole["self"]) if is_count else frozenset())


def apart(dims: Callable[[PairedCall], Iterable[int]], *, differing: str = "") -> Rule:
    """Any function of the first tensor that mixes these dimensions alone; other tensors are constants.

    The argument ``differing`` may be another number for the piece.
    """

    def rule(call: PairedCall) -> Fact | None:
        first, *others = call.tensors()
        fact = call.of(first)
        if fact is None or not are_plain([fact]) or not call.is_same(differing):
            return None
        is_mixed = any(call.of(name) != FIXED for name in others) or (is_rows(fact) and fact.dim in dims(call))
        return None if is_mixed else fact

    return rule


def _last(count: int) -> Callable[[PairedCall], Iterable[int]]:
    return lambda call: range(_ndim(call) - count, _ndim(call))


def _ndim(call: PairedCall) -> int:
    return len(call.shape(call.tensors()[0]))


def _named(call: PairedCall) -> Iterable[int]:
    return call.dims("dims" if "dims" in call.whole else "dim")


def _padded(call: PairedCall) -> Iterable[int]:
    pads: list[int] = call.whole.get("pad", call.whole.get("padding", ()))  # of the last dimension first
    return [_ndim(call) - 1 - place // 2 for place, pad in enumerate(pads) if pad]


def _all_but_first(call: PairedCall) -> Iterable[int]:
    return range(1, _ndim(call))


def reduced(call: PairedCall) -> Fact | None:
    """Any function of whole dimensions without samples."""
    fact = apart(_named)(call)
    return None if fact is None or len(call.tensors()) > 1 else _without(call, fact, call.dims())


def _without(call: PairedCall, fact: Fact, dims: list[int]) -> Fact:
    gone = 0 if call.whole.get("keepdim") else sum(dim < fact.dim for dim in dims)
    return fact.at(fact.dim - gone)


def counted_by(node: fx.Node) -> frozenset[Any]:
    """The key of a sum's elements where they say of each target whether it counts."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name in ("_to_copy", "clone"):
        return counted_by(node.args[0])  # pyright: ignore
    if name in ("bitwise_not", "logical_not"):
        node = node.args[0]  # pyright: ignore
        name = {"eq": "ne"}.get(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""), "")
    if name != "ne" or isinstance(node.args[1], fx.Node):
        return frozenset()
    return frozenset({(node.args[0], None, node.args[1])})


# -- products ------------------------------------------------------------------------------------------------


def product(*labels: str) -> Rule:
    """A matrix product, as ``einsum`` writes it: over the samples it gives a total."""

    def rule(call: PairedCall) -> Fact | None:
        names = [
            name for name in call.whole if name in ("self", "mat1", "mat2", "batch1", "batch2", "mat", "vec", "tensor")
        ][-2:]
        a, b = (call.of(name) for name in names)
        if a is None or b is None:
            return None
        contracted = _contracted(a, b, *labels)
        if contracted is None or "beta" not in call.whole:
            return contracted
        bias = call.of("self")
        if bias is None or not call.is_same():
            return None
        return added(bias, contracted, broadcast([bias, contracted], [call.shape("self"), call.shapes[0]]))

    return rule


def _contracted(a: Fact, b: Fact, first: str, second: str, out: str) -> Fact | None:
    power = a.power + b.power
    rows = [(fact, labels[fact.dim]) for fact, labels in ((a, first), (b, second)) if is_rows(fact)]
    if not rows:
        return multiplied(a, b, FIXED)
    (one, label), (other, second_label) = rows[0], rows[-1]
    if not {a.kind, b.kind} <= {"rows", "fixed"} or label != second_label or not one.agrees_with(other):
        return None
    if label in out:
        return replace(one, power=power, dim=out.index(label))
    return replace(TOTAL, power=power) if len(rows) == 2 else None


def attention(call: PairedCall) -> Fact | None:
    """Each sample attends to itself alone."""
    names = call.tensors()
    facts = [call.of(name) for name in names]
    rows = [fact for fact in facts if fact is not None and fact.kind == "rows"]
    biases = [fact for name, fact in zip(names, facts, strict=True) if name not in ("query", "key", "value")]
    if len(rows) + sum(fact == FIXED for fact in biases) < len(names) or not call.is_same():
        return None
    is_first = all(fact.dim == 0 and fact == rows[0] and not fact.power for fact in rows)
    ndims = {
        len(call.shape(name)) for name, fact in zip(names, facts, strict=True) if fact is not None and is_rows(fact)
    }
    return rows[0] if is_first and ndims == {4} else None


# -- layers --------------------------------------------------------------------------------------------------


def batch_norm(call: PairedCall) -> Fact | None:
    """In evaluation; in training where samples are channels, as instance norm has them."""
    if not call.whole.get("training", call.whole.get("train", False)):
        return apart(lambda _: [1])(call)
    first, *others = call.tensors()
    fact = call.of(first)
    if fact is None or not is_rows(fact) or fact.power or not call.is_same():
        return None
    return fact if fact.dim == 1 and all(call.of(name) == fact.at(0) for name in others) else None


# -- losses --------------------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = 0, 1, 2


def negative_log_likelihood(call: PairedCall) -> Fact | None:
    """A mean over the targets that are not ignored, by their class weights."""
    fact, target, weight = call.of("self"), call.of("target"), call.whole.get("weight")
    ndim = 4 if "2d" in call.name else 2
    if fact is None or fact != target or not is_rows(fact) or fact.dim or fact.power:
        return None
    if len(call.shape("self")) != ndim or (weight is not None and call.of("weight") != FIXED) or not call.is_same():
        return None
    if call.whole["reduction"] == _NONE:
        return fact
    key = (call.whole["target"], weight, call.whole["ignore_index"])
    return Fact("counted", keys=frozenset({key})) if call.whole["reduction"] == _MEAN else TOTAL


def elementwise_loss(call: PairedCall) -> Fact | None:
    """A loss of each element, reduced or not."""
    fact = pointwise(call)
    reduction = call.whole.get("reduction", _MEAN)
    if fact is None or not is_rows(fact) or reduction == _NONE:
        return fact
    return Fact("total", -1 if reduction == _MEAN else 0)


_GROUPS: list[tuple[Rule, str]] = [
    (add, "add sub rsub"),
    (pointwise, "copy masked_fill where"),
    (multiply, "mul"),
    (divide, "div"),
    (linear, "neg"),
    (copied, "_to_copy clone detach alias lift_fresh lift_fresh_copy contiguous positive"),
    (apart(lambda _: ()), "native_dropout bernoulli rand_like randn_like"),
    (layouts.view, "view _unsafe_view reshape _reshape_alias view_as"),
    (layouts.expand, "expand"),
    (layouts.repeat, "repeat"),
    (layouts.permute, "permute transpose t"),
    (layouts.unsqueeze, "unsqueeze"),
    (layouts.squeeze, "squeeze"),
    (layouts.sliced, "slice"),
    (layouts.parted, "select split split_with_sizes unbind"),
    (layouts.concatenate, "cat stack"),
    (apart(_padded), "constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d"),
    (summed, "sum mean"),
    (
        reduced,
        "amax amin all any argmax argmin max min logsumexp prod var std var_mean std_mean linalg_vector_norm",
    ),
    (apart(_named), "_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort topk flip roll glu"),
    (product("mk", "kn", "mn"), "mm addmm"),
    (product("bmk", "bkn", "bmn"), "bmm baddbmm"),
    (product("mk", "k", "m"), "mv addmv"),
    (product("k", "k", ""), "dot"),
    (apart(_all_but_first), "convolution"),
    (apart(lambda call: _last(len(call.whole["normalized_shape"]))(call)), "native_layer_norm _fused_rms_norm"),
    (apart(_all_but_first, differing="N"), "native_group_norm"),
    (
        batch_norm,
        "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training",
    ),
    (batch_norm, "native_batch_norm cudnn_batch_norm"),
    (apart(_last(1)), "_adaptive_avg_pool1d avg_pool1d upsample_linear1d upsample_nearest1d"),
    (apart(_last(2)), "_adaptive_avg_pool2d avg_pool2d max_pool2d_with_indices upsample_bilinear2d upsample_nearest2d"),
    (apart(_last(2)), "adaptive_max_pool2d upsample_bicubic2d tril triu"),
    (apart(_last(3)), "_adaptive_avg_pool3d avg_pool3d max_pool3d_with_indices upsample_trilinear3d pixel_shuffle"),
    (apart(_last(3)), "upsample_nearest3d pixel_unshuffle"),
    (layouts.embedding, "embedding"),
    (layouts.gather, "gather"),
    (layouts.index_select, "index_select"),
    (layouts.scatter, "scatter scatter_add"),
    (layouts.slice_scatter, "slice_scatter select_scatter"),
    (layouts.indexed, "index _unsafe_index"),
    (layouts.index_put, "index_put _unsafe_index_put"),
    (layouts.filled, "full zeros ones empty new_zeros new_ones new_full new_empty full_like zeros_like fill"),
    (layouts.filled, "ones_like empty_like scalar_tensor rand randn randint"),
    (layouts.counted_up, "arange"),
    (negative_log_likelihood, "nll_loss_forward nll_loss2d_forward"),
    (elementwise_loss, "mse_loss smooth_l1_loss huber_loss soft_margin_loss"),
    (elementwise_loss, "binary_cross_entropy binary_cross_entropy_with_logits"),
    (attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"),
    (attention, "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
    (attention, "_scaled_dot_product_attention_math"),
]

RULES: dict[str, Rule] = {name: rule for rule, names in _GROUPS for name in names.split()}
