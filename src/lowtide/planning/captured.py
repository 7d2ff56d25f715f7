"""A captured step beside the plain one: the joint graph, and the fidelity class that its results have earned.

Capture can take another way than the plain step. Dynamo may choose another branch of the model's code, and a formula of
autograd's may look at values. So the joint graph is run once, op by op, on the step's own tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from lowtide.compat.dispatch import without_autocast
from lowtide.errors import TraceError
from lowtide.planning.rounding import (
    Parts,
    Rounding,
    distance,
    generators,
    loss_and_gradients,
    named,
    on_host,
    parts_equal,
)
from lowtide.profiling import Profile
from lowtide.registry import NEEDS_NO_CAPTURE
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.capture.inputs import GraphInputs
from lowtide.tracing.capture.joint import Joint, is_random
from lowtide.tracing.capture.loss import Capture, capture_loss
from lowtide.tracing.dense_parts import address
from lowtide.tracing.graph import Graph
from lowtide.workload import Workload


@dataclass(frozen=True)
class Captured:
    """A captured loss, what its results promise, and why where that is not bitwise or not compared."""

    capture: Capture
    fidelity: Fidelity
    note: str = ""
    inputs: GraphInputs | None = None  # None where the step has not come to the graph

    @property
    def joint(self) -> Joint:
        """The graph of the whole step."""
        return self.capture.graph.joint


def capture_and_compare(work: Workload, profiled: Profile | None = None) -> Captured:
    """Capture a step and run it beside the plain one; everything is restored.

    Raises ``TraceError`` where the captured step differs by more than rounding, or draws other random numbers. Given
    the plain step's profile, it names draws that capture left out.
    """
    results: list[Parts] = []
    places: list[GraphInputs] = []

    def run(joint: Joint, inputs: Sequence[Any]) -> None:
        places.append(GraphInputs(work, inputs))
        results.extend(_run(work, joint, inputs))

    capture = capture_loss(work, run)
    if profiled is not None:
        check_draws(capture.graph.joint, profiled)
    fidelity, note = _earned(work, results)
    return Captured(capture, fidelity, note, next(iter(places), None))


def _earned(work: Workload, results: Sequence[Parts]) -> tuple[Fidelity, str]:
    """The fidelity that a captured graph's results earn beside the plain step's, and why where that is not bitwise."""
    if not results:
        return (
            Fidelity.ROUNDOFF,
            "The captured graph was not compared with the plain step, so its bits are not promised.",
        )
    (captured,) = results
    plain = {what: {name: part[name] for name in captured[what]} for what, part in _plain(work, captured).items()}
    differing = [what for what, part in plain.items() if not parts_equal(part, captured[what])]
    if not differing:
        return Fidelity.BITWISE, ""
    again = loss_and_gradients(work)
    if not all(parts_equal(part, {name: again[what][name] for name in part}) for what, part in plain.items()):
        note = "The plain step differs from itself when run twice, so the captured graph's bits are not promised."
        return Fidelity.ROUNDOFF, note
    error = max((distance(plain[what], captured[what]) for what in differing if what != "generators"), default=0.0)
    rounding = Rounding(work, plain)
    if not all(rounding.explains(what, plain[what], captured[what]) for what in differing):
        raise TraceError(
            f"The captured graph gives other {', '.join(differing)} than the plain step ({error:.1e} off)",
            hint=NEEDS_NO_CAPTURE,
        )
    note = (
        f"The captured graph rounds otherwise than the plain step, by {error:.1e}: Dynamo or autograd took another way."
    )
    return Fidelity.ROUNDOFF, note


def check_draws(joint: Joint, plain: Profile) -> None:
    """Raise ``TraceError`` where capture left out random numbers that the plain step draws."""
    if _draws(plain.graph) > sum(map(is_random, joint.forward)):
        raise TraceError(
            "The step draws random numbers that nothing uses, and a captured graph leaves them out",
            hint=NEEDS_NO_CAPTURE,
        )


def _plain(work: Workload, captured: Parts) -> Parts:
    plain = loss_and_gradients(work)
    if plain["gradients"].keys() != captured["gradients"].keys():
        raise TraceError(
            "The captured graph gives gradients to other parameters than the plain step",
            hint=NEEDS_NO_CAPTURE,
        )
    return plain


def _run(work: Workload, joint: Joint, inputs: Sequence[Any]) -> list[Parts]:
    """Loss, gradients, buffers and generators of the captured graph; nothing where it cannot run so."""
    if len(joint.tangents) != 1 or len(inputs) != len(joint.primals):
        return []
    one = joint.tangents[0].meta["val"]
    tangent = torch.ones(one.shape, dtype=one.dtype, device=one.device)
    try:
        with torch.no_grad(), without_autocast():  # the graph has its casts
            results: Any = fx.Interpreter(joint.module).run(*inputs, tangent, enable_io_processing=False)
        outputs, gradients = results[: len(joint.outputs)], results[len(joint.outputs) :]
        written = {
            address(inputs[place]): value for place, value in zip(joint.written, outputs, strict=True) if place >= 0
        }
        by_address = {address(tensor): gradient for tensor, gradient in zip(inputs, gradients, strict=True)}
        return [
            {
                "loss": {"loss": on_host(outputs[joint.outputs.index(joint.loss)])},
                "gradients": {
                    name: on_host(by_address[address(parameter)])
                    for name, parameter in named(work).items()
                    if by_address.get(address(parameter)) is not None
                },
                "buffers": {
                    name: on_host(written.get(address(buffer), buffer))
                    for name, buffer in work.model.named_buffers()
                    # Counters are no part of the graph, nor are buffers that the model replaces.
                    if buffer.is_floating_point() and not joint.stored
                },
                "generators": generators(work),
            }
        ]
    except torch.OutOfMemoryError:
        return []


def _draws(graph: Graph) -> int:
    """How often the forward pass of a traced step draws random numbers."""
    names = (op.name for op in graph.ops if op.phase == "forward" and not op.recompute)
    return sum(_is_random_op(name) for name in names)


@cache
def _is_random_op(name: str) -> bool:
    try:
        op = operator.attrgetter(name)(torch.ops)
    except (AttributeError, RuntimeError):  # such as what lowtide itself records
        return False
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
