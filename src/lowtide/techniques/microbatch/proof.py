"""Proof that a loss is a mean or a sum over its samples, from the ops of its forward pass.

The loss is captured twice, for the whole batch and for a piece of it. Both captures must be the same ops; a number or a
length that differs between them must grow with the samples. Then a fact about each value follows from its op.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowtide.compat.operators import OpOverload, schema_of
from lowtide.errors import LowtideError, TraceError
from lowtide.techniques.microbatch.facts import FIXED, SAMPLES, Fact, PairedCall, Sizes, constant_of, shape_of
from lowtide.techniques.microbatch.pieces import Batch
from lowtide.techniques.microbatch.rules import find_rule
from lowtide.techniques.microbatch.weights import Proved
from lowtide.tracing.capture.batchnorm import ancestors
from lowtide.tracing.capture.forward import CapturedLoss, capture_forward
from lowtide.tracing.snapshot import unchanged
from lowtide.tracing.step_state import modules_of
from lowtide.workload import Workload


@dataclass(frozen=True)
class Proof:
    """The reduction of a loss over its samples; None where it is not proved, and then why.

    "counted" is a mean over the targets that cross entropies do not ignore, the same ones for all terms; "several" adds
    means over different numbers of targets, which each step must find to be alike in all pieces.
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
        return _Analysis(whole, part, sizes).result()
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


class _Analysis:
    """The facts about every value of a captured loss."""

    def __init__(self, whole: CapturedLoss, part: CapturedLoss, sizes: Sizes) -> None:
        self.loss = whole.loss
        self.sizes = sizes
        self.facts: dict[fx.Node, Fact] = {}
        self.twins: dict[fx.Node, fx.Node] = {}
        for node, twin in _paired(whole, part):
            self.twins[node] = twin
            fact = self._find(node, twin, whole)
            if fact is not None and self._fits(fact, node, twin):
                self.facts[node] = fact

    def result(self) -> Proof:
        fact = self.facts.get(self.loss)
        if fact is None:
            return Proof(None, self._reason())
        if fact.kind == "counted":
            return self._counted(fact)
        if fact.kind == "fixed" and not fact.power:
            return Proof("mean")
        if fact.kind == "total" and fact.power in (0, -1):
            return Proof("mean" if fact.power else "sum")
        return Proof(None, "the loss has a row for each sample, or grows with their number")

    def _counted(self, fact: Fact) -> Proof:
        behind = ancestors([self.loss])
        seen = {
            (node.args[1], node.args[2], node.args[4])
            for node in behind
            if "nll_loss" in str(node.target) and node.args[3] == 1
        }
        if not fact.keys - {SAMPLES} <= seen:
            return Proof(None, "the loss divides by a count that no cross entropy has")
        return Proof("counted" if len(fact.keys) == 1 else "several")

    def _find(self, node: fx.Node, twin: fx.Node, whole: CapturedLoss) -> Fact | None:
        if node.op == "placeholder":
            dim = self.sizes.scaled(shape_of(node), shape_of(twin))
            if dim == 0 and whole.origins[node] == "batch":
                return Fact("rows")
            return FIXED if dim == -1 else None
        if node.op == "get_attr":
            return self._constant(node, twin)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return None if "nll_loss" in str(source.target) and node.args[1] else self.facts.get(source)
        return self._op(node, twin) if isinstance(node.target, OpOverload) else None

    def _op(self, node: fx.Node, twin: fx.Node) -> Fact | None:
        op: Any = node.target
        whole, part = _bound(op, node), _bound(op, twin)
        shapes = shape_of(node), shape_of(twin)
        call = PairedCall(schema_of(op).name.removeprefix("aten::"), whole, part, shapes, self.facts, self.sizes)
        if schema_of(op).is_mutable:
            if op is not torch.ops.aten.copy_.default or node.args[0].op != "placeholder":  # pyright: ignore
                raise TraceError(f"The captured loss writes in place ({op})")
            return None  # a buffer's new value, at the end
        if all(self.facts.get(each) == FIXED for each in node.all_input_nodes) and call.is_same():
            return FIXED
        rule = find_rule(op)
        try:
            return None if rule is None else rule(call)
        except (ArithmeticError, LookupError, TypeError, ValueError):  # arguments that the rule did not foresee
            return None

    def _constant(self, node: fx.Node, twin: fx.Node) -> Fact | None:
        whole, part = constant_of(node), constant_of(twin)
        if not isinstance(whole, Tensor) or not isinstance(part, Tensor):  # a branch of control flow
            return None
        if whole.shape == part.shape and torch.equal(whole, part):
            return FIXED
        if whole.numel() != 1 or part.numel() != 1:
            return None
        power = self.sizes.power(float(whole), float(part))
        return None if power is None else Fact("fixed", power)

    def _fits(self, fact: Fact, node: fx.Node, twin: fx.Node) -> bool:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return True  # of an op with several results: each is looked at
        return self.sizes.holds(fact, shape_of(node), shape_of(twin))

    def _reason(self) -> str:
        """The first op on the way to the loss of whose result nothing is known."""
        behind = ancestors([self.loss])
        for node in self.twins:
            if node in behind and node not in self.facts:
                name = str(node.target).removeprefix("aten.").partition(".")[0]
                if node.op == "placeholder":
                    return "an input of the loss has neither a row for each sample nor always the same shape"
                return f"{name} mixes samples, or is not known not to{_place(node)}"
        return "the loss is not followed"


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


def _bound(op: Any, node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by name, defaults included."""
    arguments = schema_of(op).arguments
    bound = {each.name: each.default_value for each in arguments if each.has_default_value()}
    bound |= {each.name: value for each, value in zip(arguments, node.args, strict=False)}
    bound |= node.kwargs
    return {each.name: bound[each.name] for each in arguments if each.name in bound}


def _place(node: fx.Node) -> str:
    """The user's line that an op comes from."""
    lines = [line for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File")]
    if not lines:
        return ""
    path, _, rest = lines[-1].strip().removeprefix('File "').partition('", line ')
    return f" ({path.rpartition('/')[2]}:{rest.partition(',')[0]})"
