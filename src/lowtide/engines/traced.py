"""A program as a loss that a trace follows, so that the step around it is predicted to the byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lowtide.engines.autograd import Runner
from lowtide.planning.lowering import Lowering
from lowtide.planning.programs.program import Program
from lowtide.tracing.capture.inputs import GraphInputs
from lowtide.tracing.capture.joint import Joint


class ProgramLoss:
    """The loss by a program on the captured graph, for any tensors in the places of the captured ones."""

    is_compiled = True  # modules do not run

    def __init__(
        self,
        loss: Callable[[nn.Module, Any], Tensor],
        joint: Joint,
        program: Program,
        lowering: Lowering,
        inputs: GraphInputs,
        mutated: Sequence[int],
    ) -> None:
        self.__wrapped__ = loss
        self._runner = Runner(joint, program, lowering.lower(joint, program), mutated)
        self._inputs = inputs

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss with its graph; ``model`` is ignored: loss functions take one."""
        return self._runner(*self._inputs(batch))[0]
