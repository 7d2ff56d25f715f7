"""The ``graph`` engine: a program that runs behind autograd.

Dynamo and AOTAutograd capture the loss. Forward runs in one piece. Backward is cut into nodes of autograd, each of
which returns the gradients that it completes. Hooks, accumulation, autocast, clipping and optimizers therefore work as
in a plain step. Ops and bits are the plain step's.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from lowtide.batches import tensors
from lowtide.compat.dispatch import active_modes
from lowtide.compat.dynamo import cause_of, is_recaptured_too_often, is_uncaptured
from lowtide.engines.autograd import Runner
from lowtide.engines.lowering.graph_code import boxed, graphs_of
from lowtide.engines.many_shapes import ManyShapes, SharedCaptures, UnplannedShape
from lowtide.engines.other_shapes import OtherShapes, Planner, PlannerFor
from lowtide.engines.plain_step import PlainStep
from lowtide.engines.recorded import RecordedRunners
from lowtide.engines.traced import ProgramLoss
from lowtide.engines.uncaptured import Uncaptured
from lowtide.engines.watch import unwatched
from lowtide.errors import LowtideError, PlanError, TraceError
from lowtide.planning.combinations import prices_inside
from lowtide.planning.graph_candidates import GraphCandidates, graph_candidates
from lowtide.planning.lowering import LOWERINGS, Lowering
from lowtide.planning.plan import Changes, Plan
from lowtide.planning.prediction import apply_options, predict, with_prices
from lowtide.planning.programs.program import Program
from lowtide.planning.programs.transfer import check_runs_on
from lowtide.profiling import Profile
from lowtide.registry import PLAIN_ENGINE, PLAIN_LOWERING
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import Capture, CapturedGraph, CompiledLoss, call_key, differentiated
from lowtide.tracing.step_state import parameters_of, watch_modules
from lowtide.undo import Applied, Undo
from lowtide.workload import Workload

_MOST_SHAPES = 16  # captured at a time: each holds its code, and some MiB on the host
_MOST_PROGRAMS = 128  # of shapes that share a capture, at a time


class GraphEngine:
    """Captures the loss with its gradients, and runs the plan's program in its place."""

    name = "graph"
    takes_options = False
    captures = True

    def candidates(self, work: Workload, baseline: Profile) -> GraphCandidates:
        """Programs of the captured step."""
        return graph_candidates(work, baseline)

    def apply(self, work: Workload, plan: Plan) -> Applied:
        """Replace the step's loss by the planned one; the model stays as it is."""
        if plan.program is None:
            raise PlanError("A plan for the graph engine has no program", hint="Plan again.")
        lowering = LOWERINGS[plan.program.lowering]
        plain = PlainStep(work, is_changed=bool(plan.options))
        applied = apply_options(work, plan.options)
        work = applied.work
        with Undo(applied) as undo:  # if the loss cannot be built
            shapes = OtherShapes(plan, work, plan.program, plain)
            loss = PlannedLoss(
                work, shapes, Uncaptured(plan, work), lowering, shapes.is_planned, is_recorded=plan.program.is_recorded
            )
            return Applied(replace(work, loss=loss, autocast=None), undo.keep(), loss.release, pause=loss.pause)

    def predict(self, work: Workload, changes: Changes, baseline: Profile, *, only_peaks: bool = False) -> Profile:
        """The program as a traced step; with options around it, a trace of that step on fake tensors."""
        candidates, options, program = graph_candidates(work, baseline), changes.options, changes.program
        form = None if program is None else candidates.form(LOWERINGS[program.lowering])
        if form is None or program is None or form.problem.joint.digest != program.graph:
            raise PlanError("The plan is of another graph than this step's", hint="Plan again.")
        joint, lowering = form.problem.joint, LOWERINGS[program.lowering]
        check_runs_on(program.instructions, joint)
        after = form.forecast.profile(program.instructions)
        if not options:
            return after
        if lowering.compiles:
            return replace(after, graph=with_prices(after.graph, prices_inside(options, after)))
        if candidates.inputs is None:
            raise TraceError("A trace cannot follow the captured graph", hint=f"Plan with engine={PLAIN_ENGINE!r}.")
        loss = ProgramLoss(work.loss, joint, program.instructions, lowering, candidates.inputs, candidates.mutated)
        return predict(replace(work, loss=loss, autocast=None), options, baseline, only_peaks=only_peaks)


class PlannedLoss:
    """The loss of a step, run by programs: one for each structure and shape of the batch.

    ``planner_for(batch)`` makes the program of a joint graph, for batches of that shape. ``uncaptured(batch)`` gives
    what runs such batches without a program, where that is wanted. Shapes share captures if ``is_planned`` says of a
    graph whether it is the planned one. ``is_recorded`` has the planned batch's program run as CUDA graphs, whose
    memory is freed when something else runs the model.
    """

    is_compiled = True

    def __init__(
        self,
        work: Workload,
        planner_for: PlannerFor,
        uncaptured: Callable[[Any], Callable[[Any], Tensor] | None] = lambda _: None,
        lowering: Lowering | None = None,
        is_planned: Callable[[Joint], bool] | None = None,
        *,
        is_recorded: bool = False,
    ) -> None:
        self.__wrapped__ = work.loss
        self.work = work
        self.planner_for = planner_for
        self.uncaptured = uncaptured
        self.lowering = lowering or LOWERINGS[PLAIN_LOWERING]
        self._captured: OrderedDict[Any, tuple[Planner, CompiledLoss | _Taken | _OneOfMany]] = OrderedDict()
        self._shared = None if is_planned is None else SharedCaptures(work, is_planned)
        self._watched = False  # whether a dispatch mode was warned about
        self._failed: set[Any] = set()  # where capture failed once
        self._given_up: set[Any] = set()  # where the plain loss runs
        self._recorded = RecordedRunners(work, call_key(work.batch)) if is_recorded else None
        if work.captures.losses:  # which are shared only now
            self._capture(call_key(work.batch), work.batch)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of the step's own model; ``model`` is ignored: loss functions take one."""
        if any(not mode.is_infra_mode() for mode in active_modes()):
            if not self._watched:
                self._watched = True
                warnings.warn(
                    "A dispatch mode looks at the ops of this step, which then runs as it is: the budget is not kept",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return self.work.compute_loss(batch=batch)
        key = call_key(batch)
        if key in self._given_up:
            return self.work.compute_loss(batch=batch)
        if self._recorded is not None and key != self._recorded.key:
            self.pause()
        if key not in self._captured:
            run = self.uncaptured(batch)
            if run is not None:
                return run(batch)
            self._capture(key, batch)
        self._captured.move_to_end(key)
        _, loss = self._captured[key]
        try:
            with unwatched(self.work.model):
                return loss(batch)
        except Exception as error:
            if isinstance(loss, _OneOfMany) and isinstance(cause_of(error), TraceError):  # in another mode, say
                self._capture_alone(key, batch)
                return self(model, batch)
            if is_recaptured_too_often(error):
                return self._give_up(
                    key,
                    batch,
                    "The loss has been captured for as many values as Dynamo allows",
                    "Make a tensor of what changes at each step, such as a number in the model or in the batch",
                )
            cause = cause_of(error)
            if cause is not error and isinstance(cause, (LowtideError, Warning)):  # raised by the planner
                raise cause from None
            if not is_uncaptured(error):
                raise
            inputs = (*parameters_of(self.work), *tensors(batch))
            if not any(each.requires_grad for each in inputs):
                return self.work.compute_loss(batch=batch)  # which says that nothing is trained
            what = next(iter(str(error).splitlines()), "")
            return self._give_up(
                key,
                batch,
                f"The loss is no longer captured as one graph ({what})",
                f"Plan with engine={PLAIN_ENGINE!r}",
            )

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be copied or pickled: captured code stays that of this model."""
        raise LowtideError(
            "The loss of a planned step is neither copied nor pickled: it is bound to its model",
            hint="Copy the model (copy.deepcopy(step.model)), then apply the plan to a Workload of the copy.",
        )

    def _capture(self, key: Any, batch: Any) -> None:
        """Have a shape run by a program, of a capture that it shares with others or of its own."""
        shared = None
        if self._shared is not None:
            with unwatched(self.work.model):
                shared = self._shared.find(key, batch)
        if shared is None:
            self._capture_alone(key, batch)
            return
        many, shape = shared
        joint = shape.joint()
        try:
            planner = self.planner_for(batch, joint)
        except TraceError:
            self._capture_alone(key, batch)
            return
        self._make_room(_OneOfMany, _MOST_PROGRAMS)
        self._captured[key] = planner, _OneOfMany(many, shape, joint, planner, self._backend(key, planner))

    def _capture_alone(self, key: Any, batch: Any) -> None:
        self._captured.pop(key, None)
        planner = self.planner_for(batch)
        taken = next((capture for capture in self.work.captures.losses if capture.take(key)), None)
        backend = self._backend(key, planner)
        self._make_room((CompiledLoss, _Taken), _MOST_SHAPES)
        loss = CompiledLoss(self.work, backend) if taken is None else _Taken(taken, planner, backend)
        self._captured[key] = planner, loss

    def _backend(self, key: Any, planner: Planner) -> _Backend:
        """What makes code of a program; recorded, if that is planned and the batch is the planned one."""
        is_recorded = self._recorded is not None and key == self._recorded.key
        return _Backend(planner, self.lowering, self._recorded if is_recorded else None)

    def _make_room(self, kind: type | tuple[type, ...], most: int) -> None:
        """Free the shape that was not used for longest, of one kind."""
        alike = [key for key, (_, loss) in self._captured.items() if isinstance(loss, kind)]
        if len(alike) >= most:
            self._captured.pop(alike[0])[1].release()

    def release(self) -> None:
        """Free all programs and captured graphs."""
        if self._recorded is not None:
            self._recorded.release()
        while self._captured:
            self._captured.popitem()[1][1].release()
        if self._shared is not None:
            self._shared.release()

    def pause(self) -> None:
        """Free memory that recordings hold between steps, before something else runs the model."""
        if self._recorded is not None:
            self._recorded.pause()

    def _give_up(self, key: Any, batch: Any, why: str, hint: str) -> Tensor:
        """The plain loss, from now on for such batches. If that fails too, only its own error is raised.

        After a first step, which may store tensors on the model, the loss is captured once more.
        """
        kept_since = watch_modules(self.work)
        loss = self.work.compute_loss(batch=batch)
        warnings.warn(f"{why}, and runs as it is: the budget is not kept. {hint}", RuntimeWarning, stacklevel=5)
        if not kept_since() or key in self._failed:
            self._given_up.add(key)
            self._captured.pop(key)[1].release()
        self._failed.add(key)
        return loss


def planned_loss(work: Workload, planner: Planner) -> Callable[[Any], Tensor]:
    """The step's loss as a function of the batch, run by the program that ``planner`` makes of its joint graph."""
    loss = PlannedLoss(work, lambda *_: planner)
    return lambda batch: loss(work.model, batch)


class _Taken:
    """The loss as it was captured while planning, run by a program."""

    def __init__(self, capture: Capture, planner: Planner, backend: _Backend) -> None:
        self.capture = capture
        try:
            joint = backend.lowering.form(capture.graph.joint)
            capture.run_by(backend.runner(joint, planner(joint), capture.graph.moved), backend)
        except BaseException:
            capture.give_back()
            raise

    def __call__(self, batch: Any) -> Tensor:
        return self.capture.loss(batch)

    def release(self) -> None:
        self.capture.give_back()


class _OneOfMany:
    """The loss for one of the shapes that share a capture, run by a program."""

    def __init__(
        self, many: ManyShapes, shape: UnplannedShape, joint: Joint, planner: Planner, backend: _Backend
    ) -> None:
        self.many, self.shape = many, shape
        form = backend.lowering.form(joint)
        program = planner(form)
        shape.run_by(lambda moved: backend.runner(form, program, moved))

    def __call__(self, batch: Any) -> Tensor:
        return self.many(batch)

    def release(self) -> None:
        self.shape.forget()


class _Backend:
    """For Dynamo: a graph of the forward pass in, what runs it by a program out.

    Dynamo holds backends until they are released; so this one does not hold the planner, which may hold the model.
    """

    def __init__(self, planner: Planner, lowering: Lowering, recorded: RecordedRunners | None = None) -> None:
        self.planner, self.lowering, self.recorded = weakref.ref(planner), lowering, recorded

    def runner(self, joint: Joint, program: Program, mutated: Sequence[int]) -> Runner:
        """The program as code behind autograd; op by op if the lowering cannot run it, as for another shape."""
        lowering = self.lowering if self.lowering.can_run(joint, program) else LOWERINGS[PLAIN_LOWERING]
        lowered = lowering.lower(joint, program)
        if self.recorded is not None:
            return self.recorded.runner(joint, program, lowered, mutated)
        return Runner(joint, program, lowered, mutated)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        programs: list[Program] = []

        def graphs(joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
            planner = self.planner()
            assert planner is not None
            programs.append(planner(joint))
            return graphs_of(joint, programs[0])

        def form(module: fx.GraphModule, outputs: int, _: Any) -> Joint:
            return self.lowering.form(Joint(module, outputs))

        whole, joints = differentiated(module, inputs, form, graphs, code_of=boxed)
        graph = CapturedGraph(joints[0][0], inputs, joints[0][1]) if joints else None
        if graph is None or not graph.is_plain:
            return whole  # no gradients are wanted; or the inputs are not plain tensors, which AOTAutograd can handle
        return self.runner(graph.joint, programs[0], graph.moved)
