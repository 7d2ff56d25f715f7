"""The forward pass of a step's loss as one functional graph of ATen ops, without its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.compat.dynamo import aot_autograd, place_of_result, silenced
from lowtide.compat.fake import FAKE_KERNELS
from lowtide.errors import TraceError
from lowtide.tracing.capture.joint import Origin, origin_of
from lowtide.tracing.capture.loss import CapturedError, CompiledLoss, call_until_captured
from lowtide.tracing.snapshot import unchanged
from lowtide.workload import Workload


@dataclass(frozen=True)
class CapturedLoss:
    """A captured loss. The graph's inputs have origins; its loss is one of its outputs."""

    graph: fx.Graph
    module: fx.GraphModule  # holds the graph's constants
    origins: dict[fx.Node, Origin]
    loss: fx.Node


def capture_forward(work: Workload) -> CapturedLoss:
    """Capture the loss of a step, forward alone. Nothing runs, and nothing is changed.

    Raises ``TraceError`` if the loss is not one graph, or if a custom ``autograd.Function`` or a hook inside of it
    changes gradients.
    """
    captures: list[CapturedLoss] = []

    def backend(captured: fx.GraphModule, inputs: Any) -> Any:
        _refuse_own_gradients(captured)
        placeholders = captured.graph.find_nodes(op="placeholder")
        origins: list[Origin] = [origin_of(*each) for each in zip(placeholders, inputs, strict=True)]

        def compiler(module: fx.GraphModule, _: Any) -> Any:
            captures.append(_read(module, origins))
            raise CapturedError

        with torch.no_grad():  # without a backward pass
            return aot_autograd(fw_compiler=compiler)(captured, inputs)

    with CompiledLoss(work, backend) as compiled, unchanged(work, fake=True), silenced(FAKE_KERNELS):
        call_until_captured(compiled, work)
    if not captures:
        raise TraceError("The loss is not captured as one graph")
    return captures.pop()


def _refuse_own_gradients(captured: fx.GraphModule) -> None:
    for module in captured.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if "autograd_function" in str(node.target) or "register_hook" in str(node.target):
                raise TraceError("The loss has a backward pass of its own, in an autograd.Function or a hook")


def _read(module: fx.GraphModule, origins: list[Origin]) -> CapturedLoss:
    inputs = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    if len(inputs) != len(origins):
        raise TraceError("The captured loss has other inputs than the step")
    results: Any = output.args[0]
    loss = results[place_of_result(module.graph, len(results))]
    if not isinstance(loss, fx.Node) or loss.meta["val"].numel() != 1:
        raise TraceError("The captured loss is not one number that is computed")
    return CapturedLoss(module.graph, module, dict(zip(inputs, origins, strict=True)), loss)
