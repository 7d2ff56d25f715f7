"""The forward pass of a step's loss as one functional graph of ATen ops: a part of the joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from lowtide.compat.dynamo import aot_autograd, has_own_gradients, is_tangent, place_of_result, silenced
from lowtide.compat.fake import FAKE_KERNELS
from lowtide.errors import TraceError
from lowtide.tracing.capture.batchnorm import ancestors
from lowtide.tracing.capture.joint import Origin, origin_of
from lowtide.tracing.capture.loss import CapturedError, CompiledLoss, call_key, call_until_captured
from lowtide.tracing.snapshot import unchanged
from lowtide.workload import Workload


@dataclass(frozen=True)
class CapturedLoss:
    """A captured loss: the nodes that it is computed by, in their order, and the origins of the graph's inputs."""

    loss: fx.Node
    nodes: list[fx.Node]
    origins: dict[fx.Node, Origin]
    module: fx.GraphModule  # holds the graph's constants


def capture_forward(work: Workload) -> CapturedLoss:
    """Read the loss from a capture that the step shares, or capture it. Nothing runs, and nothing is changed.

    Raises ``TraceError`` if the loss is not one graph, or if a custom ``autograd.Function`` or a hook inside of it
    changes gradients.
    """
    for graph in (each.graph for each in work.captures.losses if each.key == call_key(work.batch)):
        _refuse_own_gradients(graph.has_own_gradients)
        return _read(graph.joint.as_captured(), len(graph.joint.outputs), list(graph.joint.origins.values()))
    captures: list[CapturedLoss] = []

    def backend(captured: fx.GraphModule, inputs: Any) -> Any:
        _refuse_own_gradients(has_own_gradients(captured))
        placeholders = captured.graph.find_nodes(op="placeholder")
        origins: list[Origin] = [origin_of(*each) for each in zip(placeholders, inputs, strict=True)]

        def partition(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
            captures.append(_read(module, num_fwd_outputs, origins))
            raise CapturedError

        return aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=partition)(captured, inputs)

    with CompiledLoss(work, backend) as compiled, unchanged(work, fake=True), silenced(FAKE_KERNELS):
        call_until_captured(compiled, work)
    if not captures:
        raise TraceError("The loss is not captured as one graph")
    return captures.pop()


def _refuse_own_gradients(found: bool) -> None:
    if found:
        raise TraceError("The loss has a backward pass of its own, in an autograd.Function or a hook")


def _read(joint: fx.GraphModule, forward_outputs: int, origins: Sequence[Origin]) -> CapturedLoss:
    inputs = [node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    (output,) = joint.graph.find_nodes(op="output")
    if len(inputs) != len(origins):
        raise TraceError("The captured loss has other inputs than the step")
    results: Any = output.args[0]
    loss = results[place_of_result(joint.graph, forward_outputs)]
    if not isinstance(loss, fx.Node) or loss.meta["val"].numel() != 1:
        raise TraceError("The captured loss is not one number that is computed")
    behind = ancestors([loss])
    nodes = [node for node in joint.graph.nodes if node in behind]
    return CapturedLoss(loss, nodes, dict(zip(inputs, origins, strict=True)), joint)
