"""Proof that a loss is a mean or a sum over its samples, from the ops of its forward pass.

The loss is captured twice, for the whole batch and for a piece of it. Both captures must be the same ops; a number or a
length that differs between them must grow with the samples. Then a fact about each value follows from its op.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from logging import Logger
from math import ceil
from numbers import Number
from os.path import basename
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.batches import with_own_containers
from lowtide.compat.fx import line_of
from lowtide.compat.operators import OpOverload, schema_of
from lowtide.errors import LowtideError, TraceError
from lowtide.techniques.microbatch.counts import NLL_LOSSES
from lowtide.techniques.microbatch.facts import (
    FIXED,
    SAMPLES,
    Fact,
    PairedCall,
    Sizes,
    constant_of,
    is_mean,
    op_of,
    require,
    shape_of,
)
from lowtide.techniques.microbatch.pieces import Batch
from lowtide.techniques.microbatch.rules import follow
from lowtide.techniques.microbatch.weights import Proved
from lowtide.tracing.call_sites import is_library
from lowtide.tracing.capture.batchnorm import ancestors
from lowtide.tracing.capture.forward import CapturedLoss, capture_forward
from lowtide.tracing.snapshot import Restoring, restore_generators, unchanged
from lowtide.tracing.step_state import CONTAINERS, contents, is_a, modules_of, named_by, walk
from lowtide.workload import Workload


@dataclass(frozen=True)
class Proof:
    """The reduction of a loss over its samples; None where it is not proved, and then why.

    "counted" is a mean over the targets that cross entropies do not ignore, the same ones for all terms. "several" adds
    means over different targets: each step checks that all pieces count alike.
    """

    reduction: Proved | None
    why: str = ""


def prove(work: Workload) -> Proof:
    """Capture a loss for its batch and for half of it, and follow the samples through its ops."""
    try:
        batch = Batch.of(work.batch)
        sizes = Sizes(batch.samples, ceil(batch.samples / 2))
        if sizes.whole == sizes.part:
            return Proof(None, "the batch has one sample")
        if _remembers(work):
            return Proof(None, "a call of the loss changes what the next call may read")
        whole = capture_forward(work)
        part = capture_forward(replace(work, batch=batch.piece(0, sizes.part)))
        return conclude(whole.loss, find_facts(whole, part, sizes))
    except (LowtideError, torch.OutOfMemoryError) as error:
        return Proof(None, str(error).rstrip("."))


def _remembers(work: Workload) -> bool:
    """Whether a call of the loss leaves other numbers behind, or the next call gives another loss."""
    with unchanged(work):
        before, first = _numbers_held(work), _loss(work)
        return _numbers_held(work) != before or not torch.allclose(_loss(work), first, 0, 0, equal_nan=True)


def _loss(work: Workload) -> Tensor:
    with Restoring() as restoring:
        restore_generators(restoring)
        return work.compute_loss(batch=with_own_containers(work.batch)).detach()


def _numbers_held(work: Workload) -> list[Any]:
    """Numbers and words that modules and the loss reach, and lengths of containers."""
    reached = walk([*modules_of(work), work.loss], _inside)
    return [each if is_a(each, _PLAIN) else len(each) for each in reached if is_a(each, (*_PLAIN, *CONTAINERS))]


_PLAIN = (Number, str, bytes)
_OPAQUE = (*_PLAIN, Tensor, type, ModuleType, Logger)  # loggers cache who listens


def _inside(value: Any) -> list[Any]:
    if is_a(value, _OPAQUE) or (is_a(value, FunctionType) and is_library(value.__code__.co_filename)):
        return []
    return [*contents(value), *named_by(value)]


def find_facts(whole: CapturedLoss, part: CapturedLoss, sizes: Sizes) -> dict[fx.Node, Fact]:
    """The facts about values of a captured loss, in one pass over its ops; values without one may mix samples."""
    facts: dict[fx.Node, Fact] = {}
    for node, twin in _paired(whole, part):
        # Beside a rule that gives up, these errors are of arguments that it did not foresee.
        with suppress(ArithmeticError, LookupError, TypeError, ValueError):
            if node.op == "placeholder":
                dim = sizes.scaled(shape_of(node), shape_of(twin))
                require(dim is None or (dim == 0 and whole.origins[node] == "batch"))
                fact = FIXED if dim is None else Fact("rows")
            elif node.op == "get_attr":
                fact = _constant(constant_of(node), constant_of(twin), sizes)
            else:
                fact = _result(node, twin, facts, sizes)
            if isinstance(node.meta.get("val"), Tensor):  # each of several results is checked by itself
                sizes.check(fact, shape_of(node), shape_of(twin))
            facts[node] = fact
    return facts


def _constant(whole: Any, part: Any, sizes: Sizes) -> Fact:
    require(isinstance(whole, Tensor) and isinstance(part, Tensor))  # or it is a branch of control flow
    if whole.shape == part.shape and torch.equal(whole, part):
        return FIXED
    require(whole.numel() == part.numel() == 1)
    return Fact("fixed", sizes.power(float(whole), float(part)))


def _result(node: fx.Node, twin: fx.Node, facts: dict[fx.Node, Fact], sizes: Sizes) -> Fact:
    op: Any = node.target
    if op is operator.getitem:
        source: Any = node.args[0]
        require(source.target not in NLL_LOSSES or not node.args[1])
        return facts[source]
    require(isinstance(op, OpOverload))
    schema = schema_of(op)
    if schema.is_mutable:
        raise TraceError(f"The captured loss writes in place ({op})")
    shapes = shape_of(node), shape_of(twin)
    call = PairedCall(op.overloadpacket, _bound(schema, node), _bound(schema, twin), shapes, facts, sizes)
    if call.is_same() and all(facts.get(each) == FIXED for each in node.all_input_nodes):
        return FIXED
    return follow(call, op)


def conclude(loss: fx.Node, facts: dict[fx.Node, Fact]) -> Proof:
    """The reduction that the fact about a loss shows."""
    fact = facts.get(loss)
    if fact is None:
        return Proof(None, _reason(loss, facts))
    if fact.kind == "counted":
        means = [node for node in ancestors([loss]) if node.target in NLL_LOSSES and node.args[3] == 1]
        counts = {(node.args[1], node.args[2], node.args[4]) for node in means}
        if not fact.keys - {SAMPLES} <= counts:
            return Proof(None, "the loss divides by a count that no cross entropy has")
        return Proof("counted" if len(fact.keys) == 1 else "several")
    if fact == FIXED or is_mean(fact):
        return Proof("mean")
    if fact.kind == "total" and not fact.power:
        return Proof("sum")
    return Proof(None, "the loss has a row for each sample, or grows with their number")


def _reason(loss: fx.Node, facts: dict[fx.Node, Fact]) -> str:
    """The first op on the way to the loss without a fact."""
    behind = ancestors([loss])
    node = next(node for node in loss.graph.nodes if node in behind and node not in facts)
    if node.op == "placeholder":
        return "an input of the loss has neither a row for each sample nor always the same shape"
    name = getattr(op_of(node) or node.target, "__name__", node.name)
    path, line = line_of(node)
    place = f" ({basename(path)}:{line})" if path else ""
    return f"{name} mixes samples, or is not known not to{place}"


def _paired(whole: CapturedLoss, part: CapturedLoss) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes of both captures side by side; an error where they are not the same ops."""
    twins: dict[fx.Node, fx.Node] = {}
    for node, twin in zip_longest(whole.nodes, part.nodes):
        if node is None or twin is None or node.op != twin.op:
            raise TraceError("The loss runs other ops for half of the batch")
        twins[node] = twin
        if (node.op == "call_function" and node.target is not twin.target) or (
            [twins[each] for each in node.all_input_nodes] != twin.all_input_nodes
        ):
            raise TraceError("The loss runs other ops for half of the batch")
        yield node, twin


def _bound(schema: Any, node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by name, defaults included."""
    arguments = schema.arguments
    bound = {each.name: each.default_value for each in arguments if each.has_default_value()}
    bound |= {each.name: value for each, value in zip(arguments, node.args, strict=False)}
    bound |= node.kwargs
    return {each.name: bound[each.name] for each in arguments if each.name in bound}
