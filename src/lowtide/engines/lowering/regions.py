"""Cut a program into regions: runs of instructions of one block of the model, each compiled as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.kernels import batchnorm_ops
from lowtide.kernels.dropout_mask import decomposed
from lowtide.planning.programs.program import Instruction, Kind, Role, Value
from lowtide.tracing.capture.blocks import blocks_of
from lowtide.tracing.capture.joint import Joint, is_item, is_random, viewed

DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.lowtide.dropout_mask.default: decomposed,
    # Torch scatters into zeros in 32 bits, with 8 bytes an index. Inductor's own kernel gathers and is deterministic.
    torch.ops.aten.max_pool2d_with_indices_backward.default: lambda *_args, **_kwargs: NotImplemented,
    **batchnorm_ops.DECOMPOSITIONS,
}

_SMALL = 4  # instructions: shorter runs join the run before


@dataclass(frozen=True)
class Region:
    """Instructions that run as one piece of code."""

    instructions: tuple[Instruction, ...]
    reads: tuple[Value, ...]  # from outside
    results: tuple[Value, ...]  # read by later regions, kept, or returned
    returned: tuple[Instruction, ...]  # gradients that autograd gets when the region has run
    is_compiled: bool


def regions_of(
    joint: Joint,
    instructions: Sequence[Instruction],
    makers: Mapping[Value, Instruction],
    *,
    read_later: Iterable[Value] = (),
    returned: Iterable[Value] = (),
) -> list[Region]:
    """Regions of one pass, in order.

    A view is not handed on: each region that reads it takes it again from the tensor that owns the memory. Only
    ``returned`` values, which leave the program, may be views. ``makers`` are the instructions of both passes.
    """
    runs = _runs(joint, instructions)
    whole = [_with_views(joint, run, makers) for run in runs]
    last = {value: len(runs) for value in (*returned, *(base_of(joint, value, makers) for value in read_later))}
    reads = [_read_from_outside(instructions) for instructions in whole]
    for index, run in enumerate(runs):
        for value in reads[index]:
            last[value] = max(index, last.get(value, -1))
        last.update((each.reads[0], len(runs)) for each in run if each.kind is Kind.RETURN_GRAD)
    regions: list[Region] = []
    for index, run in enumerate(runs):
        own = [each.value for each in run if each.kind is not Kind.RETURN_GRAD]
        states = [value._replace(role=Role.STATE) for value in own]
        passed = (*(value for value in own if _is_tensor(joint, value)), *states)
        results = tuple(value for value in passed if last.get(value, -1) > index)
        gradients = tuple(each for each in run if each.kind is Kind.RETURN_GRAD)
        alone = not own or runs_alone(joint, joint.nodes[own[0].op])
        regions.append(Region(tuple(whole[index]), reads[index], results, gradients, not alone))
    return regions


def _read_from_outside(instructions: Sequence[Instruction]) -> tuple[Value, ...]:
    here = {each.value for each in instructions}
    return tuple(dict.fromkeys(value for each in instructions for value in each.reads if value not in here))


def base_of(joint: Joint, value: Value, makers: Mapping[Value, Instruction]) -> Value:
    """The value that owns a view's memory; any other value is its own."""
    while value in makers and _is_inlined(joint, joint.nodes[value.op]):
        value = makers[value].reads[0]
    return value


def runs_alone(joint: Joint, node: fx.Node) -> bool:
    """Tell whether an op is not compiled: a constant, lowtide's own op, or one with the plain step's random draws."""
    return node.op == "get_attr" or is_random(joint.storages[node]) or is_own_op(node)


def is_own_op(node: fx.Node) -> bool:
    """Tell whether an op is a kernel of lowtide's. Masks are not: they are decomposed."""
    own = node.args[0] if is_item(node) else node
    target: Any = own.target if isinstance(own, fx.Node) else None
    return getattr(target, "namespace", "") == "lowtide" and target not in DECOMPOSITIONS


def _is_inlined(joint: Joint, node: fx.Node) -> bool:
    """Tell whether each region takes a view for itself. Seeds are handed on, since their place would show."""
    return viewed(node) is not None and not runs_alone(joint, node)


def _is_tensor(joint: Joint, value: Value) -> bool:
    return not isinstance(joint.nodes[value.op].meta.get("val"), (tuple, list))


def _runs(joint: Joint, instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Consecutive instructions of one block; ops that are not compiled are runs of their own."""
    block_of = blocks_of(joint)
    runs: list[list[Instruction]] = []
    key: str | None = None
    for each in instructions:
        if each.kind is Kind.FREE or each.value.is_state or (each.kind is Kind.RETURN_GRAD and not each.reads):
            continue
        node = joint.nodes[each.value.op]
        joins = each.kind is Kind.RETURN_GRAD or is_item(node)
        if not runs or (not joins and runs_alone(joint, node)):
            runs.append([each])
            key = None if runs_alone(joint, node) else block_of(node)
            continue
        block = key if joins or key is None else block_of(node) or key
        if not joins and (runs_alone(joint, joint.nodes[runs[-1][0].value.op]) or block != key):
            runs.append([])
            block = block_of(node) or key
        runs[-1].append(each)
        key = block
    return list(_joined(joint, runs))


def _joined(joint: Joint, runs: Iterable[list[Instruction]]) -> Iterator[list[Instruction]]:
    """Join short runs with the run before, and take a run that only returns gradients with it."""
    current: list[Instruction] = []
    for run in runs:
        alone = [runs_alone(joint, joint.nodes[each[0].value.op]) for each in (run, current) if each]
        ops = sum(viewed(joint.nodes[each.value.op]) is None for each in run if each.kind is not Kind.RETURN_GRAD)
        if current and not any(alone) and ops < _SMALL:
            current = [*current, *run]
            continue
        if current:
            yield current
        current = run
    if current:
        yield current


def _with_views(joint: Joint, run: Sequence[Instruction], makers: Mapping[Value, Instruction]) -> list[Instruction]:
    """A run's instructions without returned gradients, with the views that it reads from outside before them."""
    own = [each for each in run if each.kind is not Kind.RETURN_GRAD]
    here = {each.value for each in own}
    views: dict[Value, Instruction] = {}

    def take(value: Value) -> None:
        maker = makers.get(value)
        if value in here or value in views or maker is None or not _is_inlined(joint, joint.nodes[value.op]):
            return
        for source in maker.reads:
            take(source)
        views[value] = maker

    for each in own:
        for value in each.reads:
            take(value)
    return [*views.values(), *own]
