"""The ``rewritten`` lowering: a captured graph with patterns of ops replaced, op by op."""

from __future__ import annotations

from lowtide.engines.lowering.ops import OpsLowering
from lowtide.planning.solvers.solver import Problem, Solution
from lowtide.techniques.rewrites import REWRITES, rewritten
from lowtide.techniques.technique import Fidelity, Price
from lowtide.tracing.capture.joint import Joint


class RewrittenLowering(OpsLowering):
    """Runs one op after another, some of them lowtide's: the plain step's mathematics in fewer bytes."""

    name = "rewritten"

    def is_offered(self, joint: Joint) -> bool:
        """For graphs with a pattern: the plain graph is another's to offer."""
        return self.form(joint) is not joint

    def form(self, joint: Joint) -> Joint:
        """The graph as captured, with rewrites; the plain step's ops where no pattern is found."""
        if self.name not in joint.forms:
            form = rewritten(joint, REWRITES)
            joint.forms[self.name] = form if form.rewrites else joint
        return joint.forms[self.name]

    def price(self, problem: Problem, solution: Solution, fidelity: Fidelity) -> Price:
        """Price other rounding than the plain step's, and the extra seconds of replaced ops.

        Ops timed alone run faster than within a step. A rewrite that seems to save seconds is therefore priced
        without the saving: tuning measures it.
        """
        longer = max(0.0, -problem.saved_seconds)
        return Price(max(fidelity, Fidelity.ROUNDOFF), compute_seconds=solution.seconds + longer)
