"""Steps on the graph of the compiled lowering, run by any program and lowering, with Inductor or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lowtide import Workload
from lowtide.engines.autograd import Runner
from lowtide.engines.lowering.compiled import CompiledLowering, SeededLowering
from lowtide.engines.lowering.graph_code import boxed
from lowtide.planning.lowering import Lowering
from lowtide.planning.programs.fused import fused_seconds, is_free
from lowtide.planning.programs.program import Instruction, Kind, Program, Value
from lowtide.planning.solvers.solver import Problem, Solution, solutions
from lowtide.tracing.capture.joint import bytes_of
from lowtide.tracing.capture.loss import capture_loss
from lowtide.zoo.gpt2 import GPT2
from tests.models import Call, InTurn, squares

from .counting import plain_results, results


def interpreted(module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """The graph op by op, in place of Inductor."""
    return boxed(module)


class LoweredStep:
    """A captured step, the programs of its compiled form, and what it leaves when one of them runs it."""

    def __init__(self, work: Workload, rewrite: Callable[[fx.Graph], int] | None = None) -> None:
        """``rewrite`` replaces the rewrites of the lowering; ``rewritten`` is what it returns."""
        self.work, self.capture = work, capture_loss(work)
        self.rewritten = 0
        captured = self.capture.graph.joint
        if rewrite is None:
            self.joint = CompiledLowering().form(captured)
            return
        module = captured.as_captured()
        self.rewritten = rewrite(module.graph)
        module.recompile()
        self.joint = captured.rewritten(module)

    @cached_property
    def problem(self) -> Problem:
        seconds = fused_seconds(self.joint, bytes_of)
        return Problem(self.joint, seconds, is_free=partial(is_free, self.joint), prefers_blocks=True)

    @cached_property
    def solutions(self) -> list[Solution]:
        """Programs that the lowering runs, the fastest first."""
        return [each for each in self._solved if self._can_run(each)]

    @cached_property
    def programs(self) -> dict[str, Program]:
        by_size = sorted(self._solved, key=lambda each: each.estimate_bytes)
        orders = {"everything": self._solved, "smallest": by_size}
        return {name: next(filter(self._can_run, order)).program for name, order in orders.items()}

    @cached_property
    def _solved(self) -> list[Solution]:
        return solutions(self.problem)

    def _can_run(self, solution: Solution) -> bool:
        return CompiledLowering().can_run(self.joint, solution.program)

    def loss(self, program: Program, lowering: Lowering) -> Callable[[Any], Tensor]:
        """The loss, run by a program."""

        def recaptured(*_: Any) -> NoReturn:
            raise AssertionError("captured again")

        runner = Runner(self.joint, program, lowering.lower(self.joint, program), self.capture.graph.moved)

        def run(batch: Any) -> Tensor:
            self.capture.run_by(runner, recaptured)
            return self.capture.loss(batch)

        return run

    def results(self, program: Program, lowering: Lowering | None = None) -> list[Tensor]:
        """Loss, gradients, buffers and the generator after a step; op by op unless a lowering is given."""
        return results(self.work, self.loss(program, lowering or SeededLowering()))

    def plain(self) -> list[Tensor]:
        """The same of plain PyTorch."""
        return plain_results(self.work)


def makers_of(program: Program) -> dict[Value, Instruction]:
    """The instruction that computes each value."""
    instructions = (*program.forward, *program.backward)
    return {each.value: each for each in instructions if each.kind in (Kind.COMPUTE, Kind.RECOMPUTE)}


def language_model(*, dropout: float = 0.0, layers: int = 2) -> Workload:
    """GPT-2 with equal blocks; attention itself draws nothing."""
    torch.manual_seed(0)
    model = GPT2(vocab=48, width=16, layers=layers, heads=2, block_size=8, dropout=dropout)
    for block in model.blocks:
        block.attention.dropout = 0.0
    ids = torch.randint(48, (2, 8))
    return Workload(model, lambda m, x: F.cross_entropy(m(x).view(-1, 48), x.flatten()), ids)


def convolutions(*, blocks: int = 2, depth: int = 3) -> Workload:
    """Blocks whose statistics move in forward alone, also where it is recomputed."""
    torch.manual_seed(0)
    parts = [
        [each for _ in range(depth) for each in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
        for _ in range(blocks)
    ]
    model = InTurn(*(nn.Sequential(*part) for part in parts), each=lambda block, x: x + block(x))
    return Workload(model, squares, torch.randn(2, 4, 8, 8))


def dropping() -> Workload:
    """Linear in its input for fixed masks."""

    def drop(model: Any, x: Tensor) -> Tensor:
        for p, linear in zip((0.1, 0.3, 0.5, 0.2), model.linears, strict=True):
            x = F.dropout(F.dropout(linear(x), p) + x, 0.4)
        return x

    torch.manual_seed(0)
    model = Call(drop, linears=nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4)))
    return Workload(model, lambda m, x: m(x).sum(), torch.randn(12, 16, requires_grad=True))
