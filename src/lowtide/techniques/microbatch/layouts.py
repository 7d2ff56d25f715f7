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
    is_rows,
    reshaped,
    shape_of,
)

# -- views and layouts ---------------------------------------------------------------------------------------


def moved(place: Callable[[PairedCall, Fact], Fact | None]) -> Rule:
    """A rule for ops that keep every element: ``place`` finds the samples, and all else stays as it is."""

    def rule(call: PairedCall) -> Fact | None:
        fact = call.of("self")
        return fact if fact is None or fact.kind not in ("rows", "place") else place(call, fact)

    return rule


@moved
def view(call: PairedCall, fact: Fact) -> Fact | None:
    return reshaped(fact, call.shape("self"), call.shapes[0], call.sizes.whole)


def expand(call: PairedCall) -> Fact | None:
    """Broadcast to a shape; a constant that is expanded to all samples is the same for each."""
    fact, more = call.of("self"), len(call.shapes[0]) - len(call.shape("self"))
    if fact is None or fact.kind in ("rows", "place"):
        return None if fact is None else fact.at(fact.dim + more)
    dim = call.sizes.scaled(*call.shapes)
    if dim is None or dim < 0 or fact.kind != "fixed":
        return fact if dim == -1 else None
    return Fact("rows", fact.power, dim) if dim < more or call.shape("self")[dim - more] == 1 else None


def repeat(call: PairedCall) -> Fact | None:
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


@moved
def permute(call: PairedCall, fact: Fact) -> Fact:
    ndim = len(call.shape("self"))
    order = list(range(ndim))
    if "dims" in call.whole:
        order = [dim % ndim for dim in call.whole["dims"]]
    elif ndim > 1:
        a, b = (call.whole.get(name, default) % ndim for name, default in (("dim0", 0), ("dim1", 1)))
        order[a], order[b] = order[b], order[a]
    return fact.at(order.index(fact.dim))


@moved
def unsqueeze(call: PairedCall, fact: Fact) -> Fact:
    return fact.at(fact.dim + (call.whole["dim"] % len(call.shapes[0]) <= fact.dim))


@moved
def squeeze(call: PairedCall, fact: Fact) -> Fact:
    shape = call.shape("self")
    return fact.at(fact.dim - sum(dim < fact.dim for dim in call.dims() if shape[dim] == 1))


def sliced(call: PairedCall) -> Fact | None:
    """A part of a dimension that has no samples, or all of one that has."""
    fact = call.of("self")
    if fact is None or fact.kind not in ("rows", "place") or call.dims() != [fact.dim]:
        return fact if call.is_same() else None
    return fact if _is_all(call) else None


def _is_all(call: PairedCall) -> bool:
    """Whether a slice takes all; its end is then the result's, whose length is compared."""
    both = (call.whole, call.part)
    return call.shapes[0] == call.shape("self") and all(not a.get("start") and a.get("step", 1) == 1 for a in both)


def parted(call: PairedCall) -> Fact | None:
    """Parts of a dimension that has no samples; all results alike. Some ops take that dimension away."""
    fact, (dim,) = call.of("self"), call.dims()
    if fact is None or not call.is_same() or fact.kind == "place" or (is_rows(fact) and dim == fact.dim):
        return None
    gone = call.name in ("select", "unbind") and dim < fact.dim
    return fact.at(fact.dim - gone) if is_rows(fact) else fact


def concatenate(call: PairedCall) -> Fact | None:
    """Along another dimension than the samples', or copies of all samples one after the other."""
    # An empty vector is left out by torch, whatever the others' shapes: an empty cache of keys begins so.
    nodes = [node for node in call.whole["tensors"] if shape_of(node) != (0,)]
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


# -- tables and indices --------------------------------------------------------------------------------------


def embedding(call: PairedCall) -> Fact | None:
    weight, indices = call.of("weight"), call.of("indices")
    if call.whole.get("scale_grad_by_freq"):  # its gradients count how often the whole batch has an index
        return None
    return indices if weight == FIXED and indices is not None and are_plain([indices]) and call.is_same() else None


def gather(call: PairedCall) -> Fact | None:
    """From the same sample along another dimension, or from a constant along the samples'."""
    fact, indices, (dim,) = call.of("self"), call.of("index"), call.dims()
    if fact is None or indices is None or not is_rows(indices) or not are_plain([fact, indices]):
        return None
    if is_rows(fact):
        return indices if dim != fact.dim and _lie_alike(call, fact, "self", "index") else None
    return indices if dim == indices.dim else None


def _lie_alike(call: PairedCall, fact: Fact, *names: str) -> bool:
    """Whether these arguments have the same rows, of the same length."""
    lengths = {call.shape(name)[fact.dim] for name in names if call.of(name) == fact}
    return len(lengths) == 1 and all(call.of(name) == fact for name in names)


def index_select(call: PairedCall) -> Fact | None:
    """A constant at the places that samples say, or samples at constant places."""
    fact, index, (dim,) = call.of("self"), call.of("index"), call.dims()
    if fact is None or index is None or not are_plain([fact, index]) or not call.is_same():
        return None
    if is_rows(index):
        return index.at(dim) if fact == FIXED else None
    return fact if is_rows(fact) and fact.dim != dim else None


def scatter(call: PairedCall) -> Fact | None:
    """Into the same sample, along another dimension."""
    fact, (dim,) = call.of("self"), call.dims()
    if fact is None or not is_rows(fact) or fact.power or fact.dim == dim or not call.is_same():
        return None
    return fact if _lie_alike(call, fact, *call.tensors()) else None


def slice_scatter(call: PairedCall) -> Fact | None:
    """Into a part of a dimension that has no samples."""
    fact, source, dim = call.of("self"), call.of("src"), call.whole.get("dim", 0) % len(call.shape("self"))
    if fact is None or source is None or not is_rows(fact) or not are_plain([fact, source]):
        return None
    if fact.dim == dim:  # all of it is written over
        return source if call.name == "slice_scatter" and call.shape("src") == call.shape("self") else None
    if call.name == "select_scatter" and is_rows(source):
        source = source.at(source.dim + (dim <= source.dim))
    return fact if source in (fact, FIXED) and call.is_same() else None


def indexed(call: PairedCall) -> Fact | None:
    """A constant at the places that samples say, samples at constant places, or each sample at its own places."""
    indices: list[Any] = list(call.whole["indices"])
    used = [(dim, node) for dim, node in enumerate(indices) if node is not None]
    fact, known = call.of("self"), [call.facts.get(node) for _, node in used]
    facts = [each for each in known if each is not None]
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


def index_put(call: PairedCall) -> Fact | None:
    """A constant where a mask of each sample says so."""
    fact, value = call.of("self"), call.of("values")
    nodes: list[Any] = call.whole["indices"]
    if fact is None or value != FIXED or not is_rows(fact) or len(nodes) != 1 or call.shape("values") not in ((), (1,)):
        return None
    mask = call.facts.get(nodes[0])
    return fact if mask == fact and nodes[0].meta["val"].dtype is torch.bool and not fact.power else None


# -- new tensors ---------------------------------------------------------------------------------------------


_FILLS = ("fill_value", "value", "s")


def filled(call: PairedCall) -> Fact | None:
    """The same number everywhere, or random ones: with a dimension of samples, a row for each."""
    given = [name for name in _FILLS if name in call.whole]
    fill = call.of(given[0]) if given else FIXED
    dim = call.sizes.scaled(*call.shapes)
    if fill is None or fill.kind != "fixed" or dim is None or not call.is_same("size", *_FILLS):
        return None
    return fill if dim < 0 else Fact("rows", fill.power, dim)


def counted_up(call: PairedCall) -> Fact | None:
    """The numbers of the samples, or of anything else."""
    if call.is_same():
        return FIXED
    is_places = all(
        args["end"] == samples and not args.get("start") and args.get("step", 1) == 1
        for args, samples in ((call.whole, call.sizes.whole), (call.part, call.sizes.part))
    )
    return Fact("place") if is_places else None
