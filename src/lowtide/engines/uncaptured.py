"""Batches of other shapes on the graph engine that run without a capture, where that fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lowtide.engines.shapes import Bounds, Signature, is_within, modes_of, predict_shape, signature
from lowtide.fingerprint import batch_shapes
from lowtide.planning.candidate import Permission
from lowtide.planning.plan import Plan
from lowtide.planning.prediction import apply_options, estimate_peak
from lowtide.profiling import Profile
from lowtide.registry import PLAIN_ENGINE
from lowtide.sizes import format_size
from lowtide.techniques.registry import techniques
from lowtide.techniques.technique import Fidelity, Option
from lowtide.workload import Workload

_log = logging.getLogger("lowtide")
_TRIED = 3  # options that are traced for one shape: a capture takes as long as a few traces
_MOST_PREDICTED = 4  # plain steps, where checkpoints are known to fit: each takes as long as tracing a step

BatchLoss = Callable[[Any], Tensor]
Options = tuple[Option, ...]


class Uncaptured:
    """Decides how a batch of an unplanned shape runs: as the plain step, with bitwise checkpoints, or captured.

    Peaks are predicted on fake tensors, and only where no earlier prediction already bounds them.
    ``work`` is the step as it was before its loss was captured.
    """

    def __init__(self, plan: Plan, work: Workload) -> None:
        self.plan, self.work = plan, work
        self._planned = signature(work.batch)
        self._said: set[str] = set()
        self._forget()

    def __call__(self, batch: Any) -> BatchLoss | None:
        """The loss for such a batch without a capture; None for the planned shape or if only a program fits."""
        shape = signature(batch)
        if not shape or shape == self._planned:
            return None
        if modes_of(self.work) != self._modes:
            self._forget()
        options = self._options(shape, batch)
        if options is None:
            self._say("captured", f"{self._title(batch)}: the step is captured for it, which takes seconds. {_ADVICE}")
            return None
        way = "the plain step" if not options else f"checkpoints in the model's own code ({options[0]})"
        budget = format_size(self.plan.budget_bytes)
        self._say(way, f"{self._title(batch)}: runs as {way}, within {budget}. Further such shapes are not listed")
        return lambda batch: self._run(options, batch)

    def _run(self, options: Options, batch: Any) -> Tensor:
        with apply_options(self.work, options) as applied:  # segments hold what backward runs again
            return applied.work.compute_loss(batch=batch)

    def _options(self, shape: Signature, batch: Any) -> Options | None:
        """Options under which the batch fits; None if unknown, or if nothing fits."""
        plain, checkpoints = self._plain.fit(shape), self._checkpoints.fit(shape)
        enough = checkpoints is not None and len(self._plain) >= _MOST_PREDICTED
        if plain is None and not enough and self._plain.excess(shape) is None:
            before = self._predict(batch, ())
            if before is None:
                self._plain.note(shape, (), fits=False)
                self._checkpoints.note(shape, (), fits=False)
                return None
            fits = before.peak_bytes <= self.plan.budget_bytes
            plain = () if fits else None
            self._plain.note(shape, (), fits=fits)
        if plain is not None or checkpoints is not None:
            return checkpoints if plain is None else plain
        # A choice for the planned batch holds for all that are smaller.
        batches = [self.work.batch] if is_within(shape, self._planned) else []
        for each in (*batches, batch):
            if self._checkpoints.excess(signature(each)) is None:
                options = self._fastest_checkpoints(each)
                self._checkpoints.note(signature(each), options or (), fits=options is not None)
                if options is not None:
                    return options
        return None

    def _fastest_checkpoints(self, batch: Any) -> Options | None:
        """The fastest bitwise option that fits, of the few that are worth a trace."""
        before = self._predict(batch, ())
        if before is None:
            return None
        for option in _worth_a_trace(before, self.plan.budget_bytes, self.plan.permission):
            after = self._predict(batch, (option,))
            if after is not None and after.peak_bytes <= self.plan.budget_bytes:
                return (option,)
        return None

    def _predict(self, batch: Any, options: Options) -> Profile | None:
        """The step with such a batch; None where it cannot be predicted."""
        try:
            return predict_shape(self.work, batch, device=self.plan.device, options=options)
        except Exception:  # the step itself is about to run: an error is better seen there
            return None

    def _forget(self) -> None:
        self._plain, self._checkpoints = Bounds[Options](), Bounds[Options]()
        self._modes = modes_of(self.work)

    def _title(self, batch: Any) -> str:
        return f"A batch of {batch_shapes(batch)} was not planned ({self.plan.fingerprint.batch} was)"

    def _say(self, key: str, line: str) -> None:
        if key not in self._said:
            self._said.add(key)
            _log.warning("lowtide: %s", line)


_ADVICE = (
    "From the second such shape on, one capture serves all that differ in the same dimensions. Further ones are not "
    f"listed. To avoid captures, pad to few lengths, or plan with engine={PLAIN_ENGINE!r}"
)


def _worth_a_trace(before: Profile, budget: int, permitted: Permission) -> Iterator[Option]:
    """Permitted bitwise options on modules whose estimates fit: the fastest, and the smallest."""
    priced: list[tuple[float, int, Option]] = []
    for technique in techniques().values():
        if technique.kind != "hold":
            continue
        for option in technique.options(before):
            price = technique.price(option, before)
            if price.fidelity is Fidelity.BITWISE and permitted.permits(technique.name, price.fidelity):
                priced.append((price.seconds, estimate_peak(before.graph, [price]), option))
    fastest = sorted((each for each in priced if each[1] <= budget), key=lambda each: each[:2])[: _TRIED - 1]
    smallest = sorted(priced, key=lambda each: each[1])[:1]
    return iter(dict.fromkeys(option for *_, option in (*fastest, *smallest)))
