"""Rules for ATen ops: the fact about a result, from the facts about what the op reads.

A rule in doubt gives up: what is not proved counts as mixing samples. The shapes of every result are compared between
the two captures, so a rule need not look at sizes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide.techniques.microbatch import layouts
from lowtide.techniques.microbatch.facts import (
    FIXED,
    Fact,
    PairedCall,
    Rule,
    UnfollowedError,
    added,
    are_plain,
    broadcast,
    constant_of,
    divided,
    multiplied,
    op_of,
    require,
)

aten: Any = torch.ops.aten


def follow(call: PairedCall, op: Any) -> Fact:
    """The fact about the result of an op."""
    rule = _SIZED.get(call.op)
    if rule is not None:
        return rule(call)
    rule = _RULES.get(call.op, pointwise if torch.Tag.pointwise in op.tags and op.namespace == "aten" else None)
    if rule is None or not call.is_same():
        raise UnfollowedError
    return rule(call)


# -- one element at a time -----------------------------------------------------------------------------------


def pointwise(call: PairedCall) -> Fact:
    """Any function of elements at the same place."""
    facts = call.tensors()
    require(are_plain(facts.values()))
    return broadcast(list(facts.values()), [call.shape(name) for name in facts])


def add(call: PairedCall) -> Fact:
    require(call.is_same("self", "other"))
    for one, other in (("self", "other"), ("other", "self")):
        fact = call.of(other)
        if fact.kind in ("total", "counted") and call.of(one) == FIXED and is_zero(call.whole[one]):
            return fact
    return _joined(call, added)


def multiply(call: PairedCall) -> Fact:
    return _joined(call, multiplied)


def divide(call: PairedCall) -> Fact:
    if call.whole.get("rounding_mode") is None:
        return _joined(call, divided)
    require(call.is_same())
    return pointwise(call)


def _joined(call: PairedCall, join: Callable[[Fact, Fact, Fact], Fact]) -> Fact:
    a, b = call.of("self"), call.of("other")
    return join(a, b, broadcast([a, b], [call.shape("self"), call.shape("other")]))


def negative(call: PairedCall) -> Fact:
    return call.of("self").uncounted()


def copied(call: PairedCall) -> Fact:
    """The same value, so that a count stays one."""
    return call.of("self")


_COPIES = (aten.clone, aten._to_copy, aten.lift_fresh_copy, aten.expand, aten.view, aten.alias, aten.detach)


def is_zero(value: Any) -> bool:
    """Whether a value is the constant 0, from which a sum of losses starts."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value == 0
    op = op_of(value)
    if op in _COPIES:
        return is_zero(value.args[0])
    if value.op == "get_attr":
        return not bool(constant_of(value).any())
    return op is aten.zeros or (op is aten.full and is_zero(value.args[1]))


# -- along dimensions ----------------------------------------------------------------------------------------


def summed(call: PairedCall) -> Fact:
    """A sum or a mean: over the samples it gives a total."""
    fact, dims = call.of("self"), call.dims()
    require(fact.kind != "place")
    if not fact.is_rows:
        return fact.uncounted()
    if fact.dim not in dims:
        return _without(call, fact, dims)
    if call.op is aten.mean:
        return Fact("total", fact.power - 1)
    is_count = len(dims) == call.ndim and not fact.power
    return Fact("total", fact.power, keys=counted_by(call.whole["self"]) if is_count else frozenset())


def apart(dims: Callable[[PairedCall], Iterable[int]]) -> Rule:
    """Any function of the first tensor that mixes these dimensions alone; other tensors are constants."""

    def rule(call: PairedCall) -> Fact:
        fact, *others = call.tensors().values()
        require(fact.is_plain and all(other == FIXED for other in others))
        require(not fact.is_rows or fact.dim not in dims(call))
        return fact

    return rule


def _last(count: int) -> Callable[[PairedCall], Iterable[int]]:
    return lambda call: range(call.ndim - count, call.ndim)


def _named(call: PairedCall) -> Iterable[int]:
    return call.dims("dims" if "dims" in call.whole else "dim")


def _padded(call: PairedCall) -> Iterable[int]:
    pads: list[int] = call.whole.get("pad", call.whole.get("padding", ()))  # of the last dimension first
    return [call.ndim - 1 - place // 2 for place, pad in enumerate(pads) if pad]


_by_sample = apart(lambda call: range(1, call.ndim))


def group_norm(call: PairedCall) -> Fact:
    require(call.is_same("N"))
    return _by_sample(call)


def reduced(call: PairedCall) -> Fact:
    """Any function of whole dimensions without samples."""
    require(len(call.tensors()) == 1)
    return _without(call, apart(_named)(call), call.dims())


def _without(call: PairedCall, fact: Fact, dims: list[int]) -> Fact:
    gone = 0 if call.whole.get("keepdim") else sum(dim < fact.dim for dim in dims)
    return fact.at(fact.dim - gone)


def counted_by(node: Any) -> frozenset[Any]:
    """The key of a sum's elements where they say of each target whether it counts."""
    op = op_of(node)
    if op in (aten._to_copy, aten.clone):
        return counted_by(node.args[0])
    is_inverted = op in (aten.bitwise_not, aten.logical_not)
    if is_inverted:
        node = node.args[0]
    if op_of(node) is not (aten.eq if is_inverted else aten.ne) or isinstance(node.args[1], fx.Node):
        return frozenset()
    return frozenset({(node.args[0], None, node.args[1])})


# -- products ------------------------------------------------------------------------------------------------


def product(first: str, second: str, out: str) -> Rule:
    """A matrix product, as ``einsum`` writes it: over the samples it gives a total."""

    def rule(call: PairedCall) -> Fact:
        *_, a, b = call.tensors().values()
        contracted = _contracted(a, b, first, second, out)
        if "beta" not in call.whole:
            return contracted
        bias = call.of("self")
        return added(bias, contracted, broadcast([bias, contracted], [call.shape("self"), call.shapes[0]]))

    return rule


def _contracted(a: Fact, b: Fact, first: str, second: str, out: str) -> Fact:
    rows = [(fact, labels[fact.dim]) for fact, labels in ((a, first), (b, second)) if fact.is_rows]
    if not rows:
        return multiplied(a, b)
    (one, label), (other, second_label) = rows[0], rows[-1]
    require({a.kind, b.kind} <= {"rows", "fixed"} and label == second_label and one.agrees_with(other))
    power = a.power + b.power
    if label in out:
        return replace(one, power=power, dim=out.index(label))
    require(len(rows) == 2)
    return Fact("total", power)


def attention(call: PairedCall) -> Fact:
    """Each sample attends to itself alone."""
    facts = call.tensors()
    first = facts["query"]
    require(first.is_rows and first.is_plain and first.dim == 0)
    for name, fact in facts.items():
        is_shared = fact == FIXED and name not in ("key", "value")
        require(is_shared or (fact == first and len(call.shape(name)) == 4))
    return first


# -- layers --------------------------------------------------------------------------------------------------


def batch_norm(call: PairedCall) -> Fact:
    """In evaluation; in training where samples are channels, as instance norm has them."""
    if not call.whole.get("training", call.whole.get("train", False)):
        return apart(lambda _: [1])(call)
    fact, *others = call.tensors().values()
    require(fact.is_rows and fact.is_plain and fact.dim == 1 and all(other == fact.at(0) for other in others))
    return fact


# -- losses --------------------------------------------------------------------------------------------------

_NONE, _MEAN = 0, 1  # torch's numbers of reductions


def negative_log_likelihood(call: PairedCall) -> Fact:
    """A mean over the targets that are not ignored, by their class weights."""
    fact, weight, reduction = call.of("self"), call.whole.get("weight"), call.whole["reduction"]
    require(fact == call.of("target") and fact.is_rows and fact.is_plain and fact.dim == 0)
    require(call.ndim == (4 if call.op is aten.nll_loss2d_forward else 2))
    require(weight is None or call.of("weight") == FIXED)
    if reduction == _NONE:
        return fact
    key = (call.whole["target"], weight, call.whole["ignore_index"])
    return Fact("counted", keys=frozenset({key})) if reduction == _MEAN else Fact("total")


def elementwise_loss(call: PairedCall) -> Fact:
    """A loss of each element, reduced or not."""
    fact, reduction = pointwise(call), call.whole.get("reduction", _MEAN)
    if not fact.is_rows or reduction == _NONE:
        return fact
    return Fact("total", -1 if reduction == _MEAN else 0)


# -- the tables ----------------------------------------------------------------------------------------------


def _by_op(*groups: tuple[Rule, str]) -> dict[Any, Rule]:
    """Rules by op; an op that this version of torch lacks is left out."""
    named = ((rule, name) for rule, names in groups for name in names.split())
    return {getattr(aten, name): rule for rule, name in named if hasattr(aten, name)}


# Ops whose sizes and numbers may grow with the samples: their rules compare these themselves.
_SIZED = _by_op(
    (add, "add sub rsub"),
    (multiply, "mul"),
    (divide, "div"),
    (layouts.view, "view _unsafe_view reshape _reshape_alias view_as"),
    (layouts.expand, "expand"),
    (layouts.repeat, "repeat"),
    (layouts.sliced, "slice"),
    (layouts.slice_scatter, "slice_scatter select_scatter"),
    (layouts.filled, "full zeros ones empty new_zeros new_ones new_full new_empty full_like zeros_like fill"),
    (layouts.filled, "ones_like empty_like scalar_tensor rand randn randint"),
    (layouts.counted_up, "arange"),
    (group_norm, "native_group_norm"),
)

# Ops whose other arguments are the same for a piece; other ops that torch tags as pointwise need no entry.
_RULES = _by_op(
    (pointwise, "copy masked_fill where"),
    (negative, "neg"),
    (copied, "_to_copy clone detach alias lift_fresh lift_fresh_copy contiguous positive"),
    (apart(lambda _: ()), "native_dropout bernoulli rand_like randn_like"),
    (layouts.permute, "permute transpose t"),
    (layouts.unsqueeze, "unsqueeze"),
    (layouts.squeeze, "squeeze"),
    (layouts.parted, "select split split_with_sizes unbind"),
    (layouts.concatenate, "cat stack"),
    (apart(_padded), "constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d"),
    (summed, "sum mean"),
    (reduced, "amax amin all any argmax argmin max min logsumexp prod var std var_mean std_mean linalg_vector_norm"),
    (apart(_named), "_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort topk flip roll glu"),
    (product("mk", "kn", "mn"), "mm addmm"),
    (product("bmk", "bkn", "bmn"), "bmm baddbmm"),
    (product("mk", "k", "m"), "mv addmv"),
    (product("k", "k", ""), "dot"),
    (_by_sample, "convolution"),
    (apart(lambda call: _last(len(call.whole["normalized_shape"]))(call)), "native_layer_norm _fused_rms_norm"),
    (batch_norm, "_native_batch_norm_legit _native_batch_norm_legit_functional native_batch_norm cudnn_batch_norm"),
    (batch_norm, "_native_batch_norm_legit_no_training"),
    (apart(_last(1)), "avg_pool1d upsample_linear1d upsample_nearest1d"),
    (apart(_last(2)), "_adaptive_avg_pool2d avg_pool2d max_pool2d_with_indices adaptive_max_pool2d tril triu"),
    (apart(_last(2)), "upsample_bilinear2d upsample_nearest2d upsample_bicubic2d"),
    (
        apart(_last(3)),
        "_adaptive_avg_pool3d avg_pool3d max_pool3d_with_indices upsample_trilinear3d upsample_nearest3d",
    ),
    (apart(_last(3)), "pixel_shuffle pixel_unshuffle"),
    (layouts.embedding, "embedding"),
    (layouts.gather, "gather"),
    (layouts.index_select, "index_select"),
    (layouts.scatter, "scatter scatter_add"),
    (layouts.indexed, "index _unsafe_index"),
    (layouts.index_put, "index_put _unsafe_index_put"),
    (negative_log_likelihood, "nll_loss_forward nll_loss2d_forward"),
    (elementwise_loss, "mse_loss smooth_l1_loss huber_loss soft_margin_loss"),
    (elementwise_loss, "binary_cross_entropy binary_cross_entropy_with_logits"),
    (attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"),
    (attention, "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
    (attention, "_scaled_dot_product_attention_math"),
)
