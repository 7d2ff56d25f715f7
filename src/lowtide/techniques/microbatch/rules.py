"""Rules for ATen ops: the fact about a result, from the facts about what the op reads.

An op without a rule gives nothing, and so does a rule in doubt: what is not proved counts as mixing samples. The shapes
of every result are compared between the two captures, so a rule need not look at sizes again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.techniques.microbatch.facts import (
    FIXED,
    TOTAL,
    Fact,
    Shape,
    Sizes,
    added,
    are_plain,
    broadcast,
    divided,
    is_rows,
    multiplied,
    reshaped,
)


@dataclass(frozen=True)
class Call:
    """One op in both captures: its arguments by name, and the facts about those that are tensors or numbers."""

    name: str  # of the op, without its overload
    whole: dict[str, Any]  # arguments of the whole batch's capture
    part: dict[str, Any]  # of the piece's
    shapes: tuple[Shape, Shape]  # of the result, where it is one tensor
    facts: dict[fx.Node, Fact]
    sizes: Sizes

    def of(self, name: str) -> Fact | None:
        """The fact about an argument. A number that grows as N**power is fixed with that power."""
        value = self.whole.get(name)
        if isinstance(value, fx.Node):
            return self.facts.get(value)
        if isinstance(value, (int, float)):
            power = self.sizes.power(value, self.part[name])
            return None if power is None else Fact("fixed", power)
        return None

    def shape(self, name: str) -> Shape:
        value = self.whole[name]
        return shape_of(value) if isinstance(value, fx.Node) else ()

    def tensors(self) -> list[str]:
        """The names of the arguments that are tensors."""
        return [name for name, value in self.whole.items() if isinstance(value, fx.Node)]

    def dims(self, name: str = "dim") -> list[int]:
        """The dimensions that a reduction goes over; all where it names none."""
        ndim, dims = len(self.shape(self.tensors()[0])), self.whole.get(name)
        if dims is None or dims == []:
            return list(range(ndim))
        return [dim % max(ndim, 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]

    def is_same(self, *names: str) -> bool:
        """Whether arguments that are neither tensors nor named here are the same in both captures."""
        return all(
            self.part.get(name) == value
            for name, value in self.whole.items()
            if name not in names and not has_nodes(value)
        )


Rule = Callable[[Call], Fact | None]


def has_nodes(value: Any) -> bool:
    """Whether an argument is a tensor, or a list of some."""
    return isinstance(value, fx.Node) or (isinstance(value, (list, tuple)) and any(map(has_nodes, value)))


def shape_of(node: fx.Node) -> Shape:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def find_rule(op: Any) -> Rule | None:
    """The rule of an op; None where nothing is known of it."""
    name = op._schema.name.removeprefix("aten::")
    if op.namespace != "aten":
        return None
    if name in RULES:
        return RULES[name]
    return pointwise if torch.Tag.pointwise in op.tags else None


# -- one element at a time -----------------------------------------------------------------------------------


def pointwise(call: Call) -> Fact | None:
    """Any function of elements at the same place."""
    names = call.tensors()
    found = [call.of(name) for name in names]
    facts = [fact for fact in found if fact is not None]
    if len(facts) < len(names) or not are_plain(facts) or not call.is_same():
        return None
    return broadcast(facts, [call.shape(name) for name in names])


def add(call: Call) -> Fact | None:
    if call.whole.get("alpha", 1) != call.part.get("alpha", 1):
        return None
    for one, other in (("self", "other"), ("other", "self")):
        fact = call.of(other)
        if fact is not None and fact.kind in ("total", "counted") and is_zero(call.whole[one]):
            return fact
    return _joined(call, added)


def multiply(call: Call) -> Fact | None:
    return _joined(call, multiplied)


def divide(call: Call) -> Fact | None:
    return _joined(call, divided) if call.whole.get("rounding_mode") is None else pointwise(call)


def _joined(call: Call, join: Callable[[Fact, Fact, Fact | None], Fact | None]) -> Fact | None:
    a, b = call.of("self"), call.of("other")
    if a is None or b is None:
        return None
    return join(a, b, broadcast([a, b], [call.shape("self"), call.shape("other")]))


def linear(call: Call) -> Fact | None:
    """A negative, a copy, another dtype."""
    fact = call.of("self")
    return None if fact is None else replace(fact, keys=fact.keys if fact.kind == "counted" else frozenset())


def copied(call: Call) -> Fact | None:
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
    return name == "zeros" or (name == "full" and value.args[1] == 0)


def constant_of(node: fx.Node) -> Tensor:
    """A tensor that a captured graph holds."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def dropout(call: Call) -> Fact | None:
    """Random masks are drawn for each element."""
    fact = call.of(call.tensors()[0])
    return fact if fact is not None and call.is_same() and are_plain([fact]) else None


# -- views and layouts ---------------------------------------------------------------------------------------


def view(call: Call) -> Fact | None:
    fact, (after, _) = call.of("self"), call.shapes
    if fact is None or fact.kind not in ("rows", "place"):
        return fact
    return reshaped(fact, call.shape("self"), after, call.sizes.whole)


def expand(call: Call) -> Fact | None:
    """Broadcast to a shape; a constant that is expanded to all samples is the same for each."""
    fact, more = call.of("self"), len(call.shapes[0]) - len(call.shape("self"))
    if fact is None or fact.kind in ("rows", "place"):
        return None if fact is None else fact.at(fact.dim + more)
    dim = call.sizes.scaled(*call.shapes)
    if dim is None or dim < 0 or fact.kind != "fixed":
        return fact if dim == -1 else None
    return Fact("rows", fact.power, dim) if dim < more or call.shape("self")[dim - more] == 1 else None


def repeat(call: Call) -> Fact | None:
    fact, times = call.of("self"), call.whole["repeats"]
    if fact is None or fact.kind not in ("fixed", "rows"):
        return None
    if is_rows(fact):
        dim = fact.dim + len(times) - len(call.shape("self"))
        return fact.at(dim, fact.outer * times[dim]) if call.is_same() else None
    dim = call.sizes.scaled(*call.shapes)
    if dim is None or dim < 0:
        return fact if dim == -1 else None
    return Fact("rows", fact.power, dim) if times[dim] % call.sizes.whole == 0 else None


def permute(call: Call) -> Fact | None:
    ndim = len(call.shape("self"))
    order = list(range(ndim))
    if "dims" in call.whole:
        order = [dim % ndim for dim in call.whole["dims"]]
    elif ndim > 1:
        a, b = (call.whole.get(name, default) % ndim for name, default in (("dim0", 0), ("dim1", 1)))
        order[a], order[b] = order[b], order[a]
    fact = call.of("self")
    return fact.at(order.index(fact.dim)) if fact is not None and fact.kind in ("rows", "place") else fact


def unsqueeze(call: Call) -> Fact | None:
    fact, (after, _) = call.of("self"), call.shapes
    if fact is None or fact.kind not in ("rows", "place"):
        return fact
    return fact.at(fact.dim + (call.whole["dim"] % len(after) <= fact.dim))


def squeeze(call: Call) -> Fact | None:
    fact, shape = call.of("self"), call.shape("self")
    if fact is None or fact.kind not in ("rows", "place"):
        return fact
    gone = [dim for dim in call.dims() if shape[dim] == 1]
    return fact.at(fact.dim - sum(dim < fact.dim for dim in gone))


def sliced(call: Call) -> Fact | None:
    """A part of a dimension that has no samples, or all of one that has."""
    fact = call.of("self")
    if fact is None or fact.kind not in ("rows", "place") or call.dims() != [fact.dim]:
        return fact if call.is_same() else None
    return fact if _is_all(call) else None


def _is_all(call: Call) -> bool:
    """Whether a slice takes all; its end is then the result's, whose length is compared."""
    both = (call.whole, call.part)
    return call.shapes[0] == call.shape("self") and all(not a.get("start") and a.get("step", 1) == 1 for a in both)


def select(call: Call) -> Fact | None:
    fact, (dim,) = call.of("self"), call.dims()
    if fact is None or not call.is_same() or (is_rows(fact) and dim == fact.dim) or fact.kind == "place":
        return None
    return fact.at(fact.dim - (dim < fact.dim)) if is_rows(fact) else fact


def split(call: Call) -> Fact | None:
    """Parts of a dimension that has no samples; all results alike. For ``unbind`` that dimension is gone."""
    fact, (dim,) = call.of("self"), call.dims()
    if fact is None or not call.is_same() or fact.kind == "place" or (is_rows(fact) and dim == fact.dim):
        return None
    gone = call.name == "unbind" and dim < fact.dim
    return fact.at(fact.dim - gone) if is_rows(fact) else fact


def concatenate(call: Call) -> Fact | None:
    """Along another dimension than the samples', or copies of all samples one after the other."""
    nodes: list[Any] = call.whole["tensors"]
    facts = [call.facts.get(node) for node in nodes]
    known = [fact for fact in facts if fact is not None]
    if len(known) == len(nodes) and not any(fact.kind in ("rows", "place") for fact in known):  # losses, to be added
        return reduce(lambda a, b: None if a is None else added(a, b, FIXED), known[1:], known[0]) if known else None
    rows = [fact for fact in known if is_rows(fact) and not fact.power]
    if len(rows) < len(nodes) or any(fact.dim != rows[0].dim for fact in rows):
        return None
    first, ndim = rows[0], len(call.shapes[0])
    dim = call.whole.get("dim", 0) % ndim
    if call.name == "stack":
        same = all(fact == first for fact in rows)
        return first.at(first.dim + (dim <= first.dim)) if same else None
    if dim != first.dim:
        return first if all(fact == first for fact in rows) else None
    inner = {shape_of(node)[dim] // fact.outer for node, fact in zip(nodes, rows, strict=True)}
    return first.at(dim, sum(fact.outer for fact in rows)) if len(inner) == 1 else None


def padded(call: Call) -> Fact | None:
    fact = call.of("self")
    if fact is None or not call.is_same() or not are_plain([fact]):
        return None
    touched = len(call.whole.get("pad", call.whole.get("padding", ()))) // 2
    pads: list[int] = list(call.whole.get("pad", call.whole.get("padding", ())))
    place = len(call.shape("self")) - 1 - fact.dim
    return None if is_rows(fact) and place < touched and any(pads[2 * place : 2 * place + 2]) else fact


# -- along dimensions ----------------------------------------------------------------------------------------


def summed(call: Call) -> Fact | None:
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


def reduced(call: Call) -> Fact | None:
    """Any function of whole dimensions without samples."""
    name = call.tensors()[0]
    fact, dims = call.of(name), call.dims()
    if fact is None or len(call.tensors()) > 1 or not call.is_same() or not are_plain([fact]):
        return None
    return None if is_rows(fact) and fact.dim in dims else _without(call, fact, dims)


def along(call: Call) -> Fact | None:
    """Any function along dimensions without samples that keeps them."""
    name = call.tensors()[0]
    fact, dims = call.of(name), call.dims("dims" if "dims" in call.whole else "dim")
    if fact is None or len(call.tensors()) > 1 or not call.is_same() or not are_plain([fact]):
        return None
    return None if is_rows(fact) and fact.dim in dims else fact


def _without(call: Call, fact: Fact, dims: list[int]) -> Fact:
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

    def rule(call: Call) -> Fact | None:
        names = [
            name for name in call.whole if name in ("self", "mat1", "mat2", "batch1", "batch2", "mat", "vec", "tensor")
        ][-2:]
        a, b = (call.of(name) for name in names)
        if a is None or b is None:
            return None
        made = _contracted(a, b, *labels)
        if made is None or "beta" not in call.whole:
            return made
        bias = call.of("self")
        if bias is None or not call.is_same():
            return None
        return added(bias, made, broadcast([bias, made], [call.shape("self"), call.shapes[0]]))

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


def convolution(call: Call) -> Fact | None:
    fact, weights = call.of("input"), [call.of(name) for name in ("weight", "bias") if call.whole.get(name) is not None]
    if fact is None or not call.is_same() or any(weight != FIXED for weight in weights):
        return None
    return fact if is_rows(fact) and fact.dim == 0 and not fact.power else None


def attention(call: Call) -> Fact | None:
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


def normalised(call: Call) -> Fact | None:
    """Layer norm and RMS norm, over the last dimensions."""
    names = call.tensors()
    fact = call.of(names[0])
    if fact is None or not are_plain([fact]) or any(call.of(name) != FIXED for name in names[1:]) or not call.is_same():
        return None
    ndim = len(call.shape(names[0]))
    return None if is_rows(fact) and fact.dim >= ndim - len(call.whole["normalized_shape"]) else fact


def group_norm(call: Call) -> Fact | None:
    fact, weights = call.of("input"), [call.of(name) for name in call.tensors()[1:]]
    if fact is None or not is_rows(fact) or fact.power or fact.dim != 0:
        return None
    return fact if all(weight == FIXED for weight in weights) and call.is_same("N") else None


def batch_norm(call: Call) -> Fact | None:
    """In evaluation; in training where samples are channels, as instance norm has them."""
    names = call.tensors()
    fact, others = call.of(names[0]), [call.of(name) for name in names[1:]]
    if fact is None or not is_rows(fact) or fact.power or not call.is_same():
        return None
    if not call.whole.get("training", call.whole.get("train", False)):
        return fact if fact.dim != 1 and all(other == FIXED for other in others) else None
    return fact if fact.dim == 1 and all(other == fact.at(0) for other in others) else None


def spatial(dims: int) -> Rule:
    """Pooling, resampling and padding over the last dimensions."""

    def rule(call: Call) -> Fact | None:
        names = call.tensors()
        fact = call.of(names[0])
        if fact is None or len(names) > 1 or not call.is_same() or not are_plain([fact]):
            return None
        return None if is_rows(fact) and fact.dim >= len(call.shape(names[0])) - dims else fact

    return rule


# -- tables and indices --------------------------------------------------------------------------------------


def embedding(call: Call) -> Fact | None:
    weight, indices = call.of("weight"), call.of("indices")
    return indices if weight == FIXED and indices is not None and are_plain([indices]) and call.is_same() else None


def gather(call: Call) -> Fact | None:
    """From the same sample along another dimension, or from a constant along the samples'."""
    fact, indices, (dim,) = call.of("self"), call.of("index"), call.dims()
    if fact is None or indices is None or not is_rows(indices) or not are_plain([fact, indices]):
        return None
    if is_rows(fact):
        return indices if fact == indices and dim != fact.dim else None
    return indices if dim == indices.dim else None


def index_select(call: Call) -> Fact | None:
    """A constant at the places that samples say, or samples at constant places."""
    fact, index, (dim,) = call.of("self"), call.of("index"), call.dims()
    if fact is None or index is None or not are_plain([fact, index]) or not call.is_same():
        return None
    if is_rows(index):
        return index.at(dim) if fact == FIXED else None
    return fact if is_rows(fact) and fact.dim != dim else None


def scatter(call: Call) -> Fact | None:
    """Into the same sample, along another dimension."""
    dim = call.dims()[0]
    facts = [call.of(name) for name in call.tensors()]
    rows = [fact for fact in facts if fact is not None and is_rows(fact) and not fact.power]
    is_whole = len(rows) == len(facts) and all(fact == rows[0] for fact in rows)
    return rows[0] if is_whole and rows[0].dim != dim and call.is_same() else None


def slice_scatter(call: Call) -> Fact | None:
    """Into a part of a dimension that has no samples."""
    fact, source, dim = call.of("self"), call.of("src"), call.whole.get("dim", 0) % len(call.shape("self"))
    if fact is None or source is None or not is_rows(fact) or not are_plain([fact, source]):
        return None
    if fact.dim == dim:  # all of it is written over
        return source if call.name == "slice_scatter" and call.shape("src") == call.shape("self") else None
    if call.name == "select_scatter" and is_rows(source):
        source = source.at(source.dim + (dim <= source.dim))
    return fact if source in (fact, FIXED) and call.is_same() else None


def indexed(call: Call) -> Fact | None:
    """A constant at the places that samples say, samples at constant places, or each sample at its own places."""
    indices: list[Any] = list(call.whole["indices"])
    used = [(dim, node) for dim, node in enumerate(indices) if node is not None]
    found = [call.facts.get(node) for _, node in used]
    fact, facts = call.of("self"), [each for each in found if each is not None]
    if fact is None or len(facts) < len(used) or fact.power or fact.kind not in ("fixed", "rows"):
        return None
    if any(node.meta["val"].dtype is torch.bool for _, node in used):
        return None
    places = [each.kind == "place" for each in facts]
    own = is_rows(fact) and any(dim == fact.dim for dim, _ in used)
    if own and not (fact.outer == 1 and places[[dim for dim, _ in used].index(fact.dim)] and sum(places) == 1):
        return None
    if own and call.shape("self")[fact.dim] != call.sizes.whole:
        return None
    if any(places) and not own:
        return None
    facts = [replace(each, kind="rows") if each.kind == "place" else each for each in facts]
    block = broadcast(facts, [shape_of(node) for _, node in used])
    if block is None or not are_plain(facts):
        return None
    dims = [dim for dim, _ in used]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    start = dims[0] if adjacent else 0
    if own or not is_rows(fact):
        return block.at(block.dim + start) if is_rows(block) else None
    if is_rows(block):
        return None
    width = max(len(shape_of(node)) for _, node in used)
    before = sum(dim < fact.dim for dim in dims)
    return fact.at(fact.dim - before + (width if start <= fact.dim - before else 0))


def index_put(call: Call) -> Fact | None:
    """A constant where a mask of each sample says so."""
    fact, value = call.of("self"), call.of("values")
    nodes: list[Any] = call.whole["indices"]
    if fact is None or value != FIXED or not is_rows(fact) or len(nodes) != 1 or call.shape("values") not in ((), (1,)):
        return None
    mask = call.facts.get(nodes[0])
    return fact if mask == fact and nodes[0].meta["val"].dtype is torch.bool and not fact.power else None


# -- new tensors ---------------------------------------------------------------------------------------------


_FILLS = ("fill_value", "value", "s")


def filled(call: Call) -> Fact | None:
    """The same number everywhere, or random ones: with a dimension of samples, a row for each."""
    given = [name for name in _FILLS if name in call.whole]
    fill = call.of(given[0]) if given else FIXED
    dim = call.sizes.scaled(*call.shapes)
    if fill is None or fill.kind != "fixed" or dim is None or not call.is_same("size", *_FILLS):
        return None
    return fill if dim < 0 else Fact("rows", fill.power, dim)


def counted_up(call: Call) -> Fact | None:
    """The numbers of the samples, or of anything else."""
    if call.is_same():
        return FIXED
    is_places = all(
        args["end"] == samples and not args.get("start") and args.get("step", 1) == 1
        for args, samples in ((call.whole, call.sizes.whole), (call.part, call.sizes.part))
    )
    return Fact("place") if is_places else None


# -- losses --------------------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = 0, 1, 2


def negative_log_likelihood(call: Call) -> Fact | None:
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


def elementwise_loss(call: Call) -> Fact | None:
    """A loss of each element, reduced or not."""
    fact = pointwise(call)
    reduction = call.whole.get("reduction", _MEAN)
    if fact is None or not is_rows(fact) or reduction == _NONE:
        return fact
    return Fact("total", -1 if reduction == _MEAN else 0)


def _table() -> dict[str, Rule]:
    groups: list[tuple[Rule, str]] = [
        (add, "add sub rsub"),
        (pointwise, "copy masked_fill where"),
        (multiply, "mul"),
        (divide, "div"),
        (linear, "neg"),
        (copied, "_to_copy clone detach alias lift_fresh lift_fresh_copy contiguous positive"),
        (dropout, "native_dropout bernoulli rand_like randn_like"),
        (view, "view _unsafe_view reshape _reshape_alias view_as"),
        (expand, "expand"),
        (repeat, "repeat"),
        (permute, "permute transpose t"),
        (unsqueeze, "unsqueeze"),
        (squeeze, "squeeze"),
        (sliced, "slice"),
        (select, "select"),
        (split, "split split_with_sizes unbind"),
        (concatenate, "cat stack"),
        (padded, "constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d"),
        (summed, "sum mean"),
        (
            reduced,
            "amax amin all any argmax argmin max min logsumexp prod var std var_mean std_mean linalg_vector_norm",
        ),
        (along, "_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort topk flip roll glu"),
        (product("mk", "kn", "mn"), "mm addmm"),
        (product("bmk", "bkn", "bmn"), "bmm baddbmm"),
        (product("mk", "k", "m"), "mv addmv"),
        (product("k", "k", ""), "dot"),
        (convolution, "convolution"),
        (normalised, "native_layer_norm _fused_rms_norm"),
        (group_norm, "native_group_norm"),
        (
            batch_norm,
            "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training",
        ),
        (batch_norm, "native_batch_norm cudnn_batch_norm"),
        (spatial(1), "_adaptive_avg_pool1d avg_pool1d upsample_linear1d upsample_nearest1d"),
        (spatial(2), "_adaptive_avg_pool2d avg_pool2d max_pool2d_with_indices upsample_bilinear2d upsample_nearest2d"),
        (spatial(2), "adaptive_max_pool2d upsample_bicubic2d tril triu"),
        (spatial(3), "_adaptive_avg_pool3d avg_pool3d max_pool3d_with_indices upsample_trilinear3d pixel_shuffle"),
        (spatial(3), "upsample_nearest3d pixel_unshuffle"),
        (embedding, "embedding"),
        (gather, "gather"),
        (index_select, "index_select"),
        (scatter, "scatter scatter_add"),
        (slice_scatter, "slice_scatter select_scatter"),
        (indexed, "index _unsafe_index"),
        (index_put, "index_put _unsafe_index_put"),
        (filled, "full zeros ones empty new_zeros new_ones new_full new_empty full_like zeros_like fill"),
        (filled, "ones_like empty_like scalar_tensor rand randn randint"),
        (counted_up, "arange"),
        (negative_log_likelihood, "nll_loss_forward nll_loss2d_forward"),
        (elementwise_loss, "mse_loss smooth_l1_loss huber_loss soft_margin_loss"),
        (elementwise_loss, "binary_cross_entropy binary_cross_entropy_with_logits"),
        (attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"),
        (attention, "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
        (attention, "_scaled_dot_product_attention_math"),
    ]
    return {name: rule for rule, names in groups for name in names.split()}


RULES = _table()
