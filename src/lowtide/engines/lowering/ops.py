"""The ``ops`` lowering: generated Python that runs one ATen op after another."""

from __future__ import annotations

from lowtide.engines.lowering.graph_code import boxed, forward_graph, pieces_of
from lowtide.engines.lowering.host_pool import HostPool
from lowtide.planning.lowering import Lowered
from lowtide.planning.programs.program import Program, Value
from lowtide.planning.programs.program_profile import Forecast
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.techniques.technique import Fidelity, Price
from lowtide.tracing.capture.joint import Joint


class OpsLowering:
    """Runs one op after another: the plain step's ops, so the plain step's bits."""

    name = "ops"
    note = ""
    compiles = False
    reference = ""

    def is_offered(self, joint: Joint) -> bool:
        """For every graph."""
        return True

    def form(self, joint: Joint) -> Joint:
        """The plain step's ops."""
        return joint

    def problem(self, form: Joint, forecast: Forecast) -> Problem:
        """Each op as it runs alone. On a GPU, values may wait on the host."""
        return Problem(form, forecast.seconds, forecast.workspace, host=forecast.host, codes=True)

    def can_run(self, joint: Joint, program: Program) -> bool:
        """Every program."""
        return True

    def price(self, problem: Problem, solution: Solution, fidelity: Fidelity) -> Price:
        """The price of the ops themselves, and of waiting for copies."""
        loosest = max(fidelity, solution.fidelity)
        return Price(loosest, compute_seconds=solution.seconds, host_bytes=solution.host_bytes)

    def lower(self, joint: Joint, program: Program) -> Lowered:
        """Generated Python for forward, and for each piece of backward."""
        primals = {Value(node.name) for node in joint.primals}
        saved = tuple(cell for cell in program.kept if cell not in primals)
        pool = HostPool.of(program)
        forward = boxed(forward_graph(joint, program, saved, pool), keeps_graph=False)
        return Lowered(
            forward if pool is None else pool.leased(forward), saved, pieces_of(joint, program, pooled=pool is not None)
        )
