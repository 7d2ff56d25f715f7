"""Rules for ops that move, choose and make elements: views, indices, new tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from lowtide.techniques.microbatch.facts import (
    FIXED,
    Fact,
    PairedCall,
    Rule,
    added,
    are_plain,
    broadcast,
    is_mask,
    require,
    reshaped,
    shape_of,
)

aten: Any = torch.ops.aten

# -- views and layouts ---------------------------------------------------------------------------------------


def moved(place: Callable[[PairedCall, Fact], Fact]) -> Rule:
    """A rule for ops that keep every element: ``place`` finds the samples, and all else stays as it is."""

    def rule(call: PairedCall) -> Fact:
        fact = call.of("self")
        return place(call, fact) if fact.has_samples else fact

    return rule


@moved
def view(call: PairedCall, fact: Fact) -> Fact:
    return reshaped(fact, call.shape("self"), call.shapes[0], call.sizes.whole)


def expand(call: PairedCall) -> Fact:
    """Broadcast to a shape; a constant that is expanded to all samples is the same for each."""
    fact, more = call.of("self"), len(call.shapes[0]) - len(call.shape("self"))
    if fact.has_samples:
        return fact.at(fact.dim + more)
    dim = call.sizes.scaled(*call.shapes)
    require(dim is None or dim < more or call.shape("self")[dim - more] == 1)
    return _spread(call, fact)


def repeat(call: PairedCall) -> Fact:
    fact, times = call.of("self"), call.whole["repeats"]
    if fact.is_rows:
        require(call.is_same())
        dim = fact.dim + len(times) - len(call.shape("self"))
        return fact.at(dim, fact.outer * times[dim])
    dim = call.sizes.scaled(*call.shapes)
    require(fact.kind == "fixed" and (dim is None or times[dim] % call.sizes.whole == 0))
    return _spread(call, fact)


def _spread(call: PairedCall, fact: Fact) -> Fact:
    """A value in a result that may have a dimension of samples: then it is a constant, the same for each."""
    dim = call.sizes.scaled(*call.shapes)
    require(dim is None or fact.kind == "fixed")
    return fact if dim is None else Fact("rows", fact.power, dim)


@moved
def permute(call: PairedCall, fact: Fact) -> Fact:
    order = list(range(call.ndim))
    if "dims" in call.whole:
        order = [dim % call.ndim for dim in call.whole["dims"]]
    elif call.ndim > 1:
        a, b = (call.whole.get(name, default) % call.ndim for name, default in (("dim0", 0), ("dim1", 1)))
        order[a], order[b] = order[b], order[a]
    return fact.at(order.index(fact.dim))


@moved
def unsqueeze(call: PairedCall, fact: Fact) -> Fact:
    return fact.at(fact.dim + (call.whole["dim"] % len(call.shapes[0]) <= fact.dim))


@moved
def squeeze(call: PairedCall, fact: Fact) -> Fact:
    shape = call.shape("self")
    return fact.at(fact.dim - sum(dim < fact.dim for dim in call.dims() if shape[dim] == 1))


def sliced(call: PairedCall) -> Fact:
    """A part of a dimension that has no samples, or all of one that has."""
    fact = call.of("self")
    if not fact.has_samples or call.dims() != [fact.dim]:
        require(call.is_same())
        return fact
    # The slice's end is then the result's, whose length is compared.
    require(call.shapes[0] == call.shape("self"))
    require(all(not each.get("start") and each.get("step", 1) == 1 for each in (call.whole, call.part)))
    return fact


def parted(call: PairedCall) -> Fact:
    """Parts of a dimension that has no samples; all results alike. Some ops remove that dimension."""
    fact, (dim,) = call.of("self"), call.dims()
    if not fact.is_rows:
        require(fact.kind != "place")
        return fact
    require(dim != fact.dim)
    return fact.at(fact.dim - (call.op in (aten.select, aten.unbind) and dim < fact.dim))


def concatenate(call: PairedCall) -> Fact:
    """Along another dimension than the samples', or copies of all samples one after the other."""
    # torch leaves out an empty vector, whatever the others' shapes: an empty cache of keys begins so.
    nodes = [node for node in call.whole["tensors"] if shape_of(node) != (0,)]
    first, *others = facts = [call.facts[node] for node in nodes]
    if not any(fact.has_samples for fact in facts):  # losses, to be added
        return reduce(added, others, first)
    require(all(fact.is_rows and not fact.power and fact.dim == first.dim for fact in facts))
    dim = call.whole.get("dim", 0) % len(call.shapes[0])
    if call.op is aten.cat and dim == first.dim:
        inner = {shape_of(node)[dim] // fact.outer for node, fact in zip(nodes, facts, strict=True)}
        require(len(inner) == 1)
        return first.at(dim, sum(fact.outer for fact in facts))
    require(all(fact == first for fact in others))
    return first.at(first.dim + (call.op is aten.stack and dim <= first.dim))


# -- tables and indices --------------------------------------------------------------------------------------


def embedding(call: PairedCall) -> Fact:
    indices = call.of("indices")
    # Gradients scaled by frequency count how often the whole batch has an index.
    require(call.of("weight") == FIXED and indices.is_plain and not call.whole.get("scale_grad_by_freq"))
    return indices


def gather(call: PairedCall) -> Fact:
    """From the same sample along another dimension, or from a constant along the samples'."""
    fact, indices, (dim,) = call.of("self"), call.of("index"), call.dims()
    require(indices.is_rows and are_plain([fact, indices]))
    require(dim != fact.dim and _lie_alike(call, fact, "self", "index") if fact.is_rows else dim == indices.dim)
    return indices


def _lie_alike(call: PairedCall, fact: Fact, *names: str) -> bool:
    """Whether these arguments have the same rows, of the same length."""
    return all(call.of(name) == fact for name in names) and len({call.shape(name)[fact.dim] for name in names}) == 1


def index_select(call: PairedCall) -> Fact:
    """A constant at the places that samples say, or samples at constant places."""
    fact, index, (dim,) = call.of("self"), call.of("index"), call.dims()
    require(are_plain([fact, index]))
    if index.is_rows:
        require(fact == FIXED)
        return index.at(dim)
    require(fact.is_rows and fact.dim != dim)
    return fact


def scatter(call: PairedCall) -> Fact:
    """Into the same sample, along another dimension."""
    fact, (dim,) = call.of("self"), call.dims()
    require(fact.is_rows and fact.is_plain and fact.dim != dim and _lie_alike(call, fact, *call.tensors()))
    return fact


def slice_scatter(call: PairedCall) -> Fact:
    """Into a part of a dimension that has no samples, or over all of one that has."""
    fact, source, dim = call.of("self"), call.of("src"), call.whole.get("dim", 0) % call.ndim
    require(fact.is_rows and are_plain([fact, source]))
    if fact.dim == dim:
        require(call.op is aten.slice_scatter and call.shape("src") == call.shape("self"))
        return source
    if call.op is aten.select_scatter and source.is_rows:
        source = source.at(source.dim + (dim <= source.dim))
    require(source in (fact, FIXED) and call.is_same())
    return fact


def indexed(call: PairedCall) -> Fact:
    """A constant at the places that samples say, samples at constant places, or each sample at its own places."""
    used = {dim: node for dim, node in enumerate(call.whole["indices"]) if node is not None}
    fact, indices = call.of("self"), {dim: call.facts[node] for dim, node in used.items()}
    require(fact.is_plain and not any(map(is_mask, used.values())))
    places = [dim for dim, index in indices.items() if index.kind == "place"]
    is_own = fact.is_rows and fact.dim in used
    require(places == ([fact.dim] if is_own else []))
    require(not is_own or (fact.outer == 1 and call.shape("self")[fact.dim] == call.sizes.whole))
    rows = [replace(index, kind="rows") if index.kind == "place" else index for index in indices.values()]
    shapes = [shape_of(node) for node in used.values()]
    block = broadcast(rows, shapes)
    require(are_plain(rows))
    dims = list(used)
    is_adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    start = dims[0] if is_adjacent else 0  # of the indexed dimensions in the result
    if is_own or not fact.is_rows:
        require(block.is_rows)
        return block.at(block.dim + start)
    require(not block.is_rows)
    dim = fact.dim - sum(dim < fact.dim for dim in dims)
    return fact.at(dim + (max(map(len, shapes)) if start <= dim else 0))


def index_put(call: PairedCall) -> Fact:
    """A constant where a mask of each sample says so."""
    fact, (mask,) = call.of("self"), call.whole["indices"]
    require(call.of("values") == FIXED and call.shape("values") in ((), (1,)))
    require(fact.is_rows and fact.is_plain and call.facts[mask] == fact and is_mask(mask))
    return fact


# -- new tensors ---------------------------------------------------------------------------------------------


_FILLS = ("fill_value", "value", "s")


def filled(call: PairedCall) -> Fact:
    """The same number everywhere, or random ones: with a dimension of samples, a row for each."""
    fill = next((call.of(name) for name in _FILLS if name in call.whole), FIXED)
    require(fill.kind == "fixed" and call.is_same("size", *_FILLS))
    return _spread(call, fill)


def counted_up(call: PairedCall) -> Fact:
    """The numbers of the samples, or of anything else."""
    if call.is_same():
        return FIXED
    for args, samples in ((call.whole, call.sizes.whole), (call.part, call.sizes.part)):
        require(args["end"] == samples and not args.get("start") and args.get("step", 1) == 1)
    return Fact("place")
