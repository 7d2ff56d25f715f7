"""Proof that a loss is a mean or a sum over its samples, from the ops of its forward pass.

The loss is captured twice, for the whole batch and for a piece of it. Both captures must be the same ops; a number or a
length that differs between them must grow with the samples. Then a fact about each value follows from its op.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowtide.compat.dynamo import line_of
from lowtide.compat.operators import OpOverload, schema_of
from lowtide.errors import LowtideError, TraceError
from lowtide.techniques.microbatch.counts import NLL_LOSSES
from lowtide.techniques.microbatch.facts import (
    FIXED,
    SAMPLES,
    Fact,
    PairedCall,
    Sizes,
    UnfollowedError,
    constant_of,
    is_mean,
    op_of,
    require,
    shape_of,
)
from lowtide.techniques.microbatch.pieces import Batch
from lowtide.techniques.microbatch.rules import follow
from lowtide.techniques.microbatch.weights import Proved
from lowtide.tracing.capture.batchnorm import ancestors
from lowtide.tracing.capture.forward import CapturedLoss, capture_forward
from lowtide.tracing.snapshot import unchanged
from lowtide.tracing.step_state import modules_of
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
        if _counts_steps(work):
            return Proof(None, "the loss changes numbers that it or a module holds")
        whole = capture_forward(work)
        part = capture_forward(replace(work, batch=batch.piece(0, sizes.part)))
        return conclude(whole.loss, find_facts(whole, part, sizes))
    except (LowtideError, torch.OutOfMemoryError) as error:
        return Proof(None, str(error).rstrip("."))


def _counts_steps(work: Workload) -> bool:
    """Whether a forward pass leaves other Python numbers behind, which each piece would change again."""
    with unchanged(work):
        before = _numbers_held(work)
        work.compute_loss()
        return _numbers_held(work) != before


def _numbers_held(work: Workload) -> list[Any]:
    """The plain values of modules, and those that the loss closes over, is bound to or reads as globals."""
    owner = getattr(work.loss, "__self__", None)
    function = getattr(work.loss, "__func__", work.loss)
    cells = getattr(function, "__closure__", None) or ()
    closed_over = [cell.cell_contents for cell in cells if cell != CellType()]
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    read = [value for name, value in getattr(function, "__globals__", {}).items() if name in names]
    holders = [*map(vars, modules_of(work)), getattr(owner, "__dict__", {}), closed_over, read]
    return [_plain_values(holder) for holder in holders]


def _plain_values(value: Any, depth: int = 3) -> Any:
    """Numbers and words in containers and objects, to a small depth; None for all else."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if depth and isinstance(value, dict):
        return [(str(key), _plain_values(each, depth - 1)) for key, each in value.items()]
    if depth and isinstance(value, (list, tuple)):
        return [_plain_values(each, depth - 1) for each in value]
    if depth and hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type, FunctionType)):
        return _plain_values(vars(value), depth - 1)
    return None


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
        if op is not torch.ops.aten.copy_.default or node.args[0].op != "placeholder":  # pyright: ignore
            raise TraceError(f"The captured loss writes in place ({op})")
        raise UnfollowedError  # a buffer's new value, at the end
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
    line = line_of(node)
    return f"{name} mixes samples, or is not known not to{line and f' ({line})'}"


def _paired(whole: CapturedLoss, part: CapturedLoss) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes of both captures side by side; an error where they are not the same ops."""
    nodes, twins = list(whole.graph.nodes), list(part.graph.nodes)
    places = {node: i for i, node in enumerate(nodes)}, {node: i for i, node in enumerate(twins)}
    if places[0][whole.loss] != places[1][part.loss]:
        raise TraceError("The loss runs other ops for half of the batch")
    for node, twin in zip(nodes, twins, strict=False):
        reads = [places[0][each] for each in node.all_input_nodes], [places[1][each] for each in twin.all_input_nodes]
        if len(nodes) != len(twins) or node.op != twin.op or reads[0] != reads[1]:
            raise TraceError("The loss runs other ops for half of the batch")
        if node.op == "call_function" and node.target is not twin.target:
            raise TraceError("The loss runs other ops for half of the batch")
        if node.op != "output":
            yield node, twin


def _bound(schema: Any, node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by name, defaults included."""
    arguments = schema.arguments
    bound = {each.name: each.default_value for each in arguments if each.has_default_value()}
    bound |= {each.name: value for each, value in zip(arguments, node.args, strict=False)}
    bound |= node.kwargs
    return {each.name: bound[each.name] for each in arguments if each.name in bound}
