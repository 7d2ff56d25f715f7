"""A program on another graph of the same ops, such as the step with a smaller batch."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from lowtide.errors import PlanError
from lowtide.planning.programs.codes import codes_of
from lowtide.planning.programs.in_place import lies_like
from lowtide.planning.programs.program import Instruction, Kind, Program, Role, Value
from lowtide.planning.programs.writer import STATE_BYTES
from lowtide.tracing.capture.batchnorm import inputs_of
from lowtide.tracing.capture.joint import Joint, bytes_of, size_of


def check_runs_on(program: Program, joint: Joint) -> None:
    """Raise ``PlanError`` unless the graph has the program's ops, with its inputs and gradients."""
    if not _has_ops_of(program, joint):
        raise PlanError("The plan's program is not of this step's graph", hint="Plan again.")


def transferred(program: Program, joint: Joint) -> Program | None:
    """The program with the bytes of another graph; None if that has other ops, or other results written in place."""
    if not _has_ops_of(program, joint) or not all(_is_alike(each, program, joint) for each in _instructions(program)):
        return None
    return replace(program, bytes={value: _bytes(value, joint) for value in program.bytes})


def _has_ops_of(program: Program, joint: Joint) -> bool:
    values = {value for each in _instructions(program) for value in (each.value, *each.reads)}
    forward = [each.value.op for each in program.forward if each.kind is Kind.COMPUTE and not each.value.is_state]
    gradients = [node.name if isinstance(node, fx.Node) else None for node in joint.gradients]
    return (
        forward == [node.name for node in joint.forward]
        and [value and value.op for value in program.gradients] == gradients
        and all(value.op in joint.nodes for value in values)
        and all(_reads_inputs(each, joint) for each in _instructions(program))
    )


def _reads_inputs(each: Instruction, joint: Joint) -> bool:
    """Whether an op's instruction reads the results that the graph's op reads."""
    if each.kind not in (Kind.COMPUTE, Kind.RECOMPUTE) or each.value.is_state:
        return True
    node = joint.nodes[each.value.op]
    inputs = [value.name for value in inputs_of(node, again=each.kind is Kind.RECOMPUTE)]
    return [value.op for value in each.reads if not value.is_state] == inputs


def _is_alike(each: Instruction, program: Program, joint: Joint) -> bool:
    """Whether a result can still be written in place, and a gradient still be handed on without a copy."""
    node = joint.nodes[each.value.op]
    if each.kind is Kind.ENCODE:
        return node in codes_of(joint)
    if each.into is not None:
        target = joint.nodes[each.into.op]
        return _lie_alike(target, node) and bytes_of(joint.storages[target]) == bytes_of(node)
    if each.kind is Kind.RETURN_GRAD and each.reads and each.value in program.storages:
        return _lie_alike(joint.nodes[each.reads[0].op], node)
    return True


def _lie_alike(node: fx.Node, other: fx.Node) -> bool:
    return lies_like(node.meta.get("val"), other.meta.get("val"))


def _instructions(program: Program) -> tuple[Instruction, ...]:
    return (*program.forward, *program.backward)


def _bytes(value: Value, joint: Joint) -> int:
    if value.is_state:
        return STATE_BYTES
    node = joint.nodes[value.op]
    if value.role is Role.CODES:
        return codes_of(joint)[node].bytes
    return bytes_of(node) if value.part is None else size_of(node.meta["val"][value.part])
