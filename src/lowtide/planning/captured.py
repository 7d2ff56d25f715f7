"""A captured step beside the plain one: the joint graph, and the fidelity class that its results have earned.

Capture can take another way than the plain step. Dynamo may choose another branch of the model's code, and a formula of
autograd's may look at values. So the joint graph is run once, op by op, on the step's own tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lowtide.compat.dispatch import without_autocast
from lowtide.errors import TraceError, WorkloadError
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
from lowtide.registry import NEEDS_NO_CAPTURE, PLAIN_ENGINE
from lowtide.techniques.microbatch.pieces import Batch
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.capture.inputs import GraphInputs
from lowtide.tracing.capture.joint import Joint, is_random
from lowtide.tracing.capture.loss import Capture, capture_loss
from lowtide.tracing.dense_parts import address
from lowtide.tracing.op_calls import draws
from lowtide.tracing.snapshot import unchanged
from lowtide.workload import Workload


@dataclass(frozen=True)
class ComparedCapture:
    """A captured loss, what its results promise, and why where that is not bitwise or not compared."""

    capture: Capture
    fidelity: Fidelity
    note: str = ""
    is_compared: bool = True
    inputs: GraphInputs | None = None  # None where the step has not come to the graph

    @property
    def joint(self) -> Joint:
        """The graph of the whole step."""
        return self.capture.graph.joint


def capture_and_compare(work: Workload, profiled: Profile | None = None) -> ComparedCapture:
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
    return ComparedCapture(capture, fidelity, note, is_compared=bool(results), inputs=next(iter(places), None))


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


def capture_too_large(work: Workload, predicted: Profile) -> ComparedCapture:
    """Capture a step that does not fit on the device, and compare it on the largest part of the batch that does.

    Half the samples are tried, then a quarter, and so on. Raises ``TraceError`` as ``capture_and_compare`` does.
    Models that keep tensors from one step to the next are refused: their second step differs, and is not known here.
    """
    places: list[GraphInputs] = []
    capture = capture_loss(work, lambda _, inputs: places.append(GraphInputs(work, inputs)))
    inputs = next(iter(places), None)
    try:
        check_draws(capture.graph.joint, predicted)
        if capture.graph.joint.stored:
            raise TraceError(
                "The model keeps tensors from one step to the next, and no step of it ran",
                hint=f"Plan with engine={PLAIN_ENGINE!r}, or with a smaller batch.",
            )
        part, said = _compared_part(work)
    except BaseException:
        capture.release()
        raise
    if part is None:
        note = "The captured graph was not compared with the plain step, which does not fit."
        return ComparedCapture(capture, Fidelity.ROUNDOFF, note, is_compared=False, inputs=inputs)
    return ComparedCapture(capture, part.fidelity, " ".join(filter(None, (said, part.note))), inputs=inputs)


def _compared_part(work: Workload) -> tuple[ComparedCapture | None, str]:
    """The step captured and compared on some samples, and on how many; None where no part of the batch runs."""
    try:
        batch = Batch.of(work.batch)
    except WorkloadError:
        return None, ""  # without samples to choose from
    size = batch.samples // 2
    while size:
        smaller = replace(work, batch=batch.piece(0, size))
        try:
            with unchanged(smaller):
                smaller.compute_loss().backward()  # or a capture would be for nothing
            part = capture_and_compare(smaller)
        except torch.OutOfMemoryError:
            part = None
        except TraceError:
            raise
        except Exception:  # a loss that needs the whole batch says so in its own way
            return None, ""
        if part is not None:
            part.capture.release()
            if part.is_compared:
                return part, f"Compared with the plain step on {size} of {batch.samples} samples: more do not fit."
        size //= 2
    return None, ""


def check_draws(joint: Joint, plain: Profile) -> None:
    """Raise ``TraceError`` where capture left out random numbers that the plain step draws."""
    drawing = [op for op in plain.graph.ops if op.is_random and op.phase == "forward" and not op.recompute]
    if len(drawing) > sum(draws(node.target, node.args, node.kwargs) for node in joint.forward if is_random(node)):
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
