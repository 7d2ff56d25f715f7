"""Microbatch as a technique: the bytes that a batch in pieces would free, read from a profile alone."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lowtide.profiling.devices import find_device
from lowtide.profiling.profile import Profile
from lowtide.profiling.timing import best_seconds
from lowtide.techniques.microbatch.loss import MicrobatchLoss
from lowtide.techniques.microbatch.pieces import Batch
from lowtide.techniques.microbatch.proof import Proof, prove
from lowtide.techniques.microbatch.weights import REDUCTIONS, Proved
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Kind, Option, Price, Technique, whole_step
from lowtide.tracing.call_sites import short_name
from lowtide.tracing.graph import Graph
from lowtide.tracing.snapshot import unchanged
from lowtide.undo import Applied
from lowtide.workload import Workload


@dataclass(frozen=True)
class MicrobatchConfig(Config):
    """Pieces of ``size`` samples out of ``batch``, and what is known of the loss."""

    size: int
    batch: int
    random: bool = True  # the step draws random numbers
    reduction: Proved | Literal[""] = ""  # of the loss over its samples; "" where it is not proved
    because: str = ""  # why it is not
    exact: bool = False  # batch norms normalise by the whole batch

    def __post_init__(self) -> None:
        self.require("size", int, least=1)
        self.require("batch", int, least=1)
        self.require("random", bool)
        self.require_one_of("reduction", ("", *REDUCTIONS))
        self.require("because", str)
        self.require("exact", bool)


@dataclass(frozen=True)
class MicrobatchFindings:
    """Knowledge of a step that needs more than its profile."""

    proof: Proof | None = None  # of the loss's reduction; None where the loss was not captured
    is_measured: bool = False
    piece: _PieceSeconds | None = None  # None where pieces were not measured, or did not run


class Microbatch(Technique):
    """The whole step over pieces of its batch."""

    name = "microbatch"
    kind: Kind = "step"
    config: type[Config] = MicrobatchConfig
    needs = "a batch of two or more samples, the first dimension of all its tensors"

    def study(self, work: Workload, profile: Profile) -> MicrobatchFindings:
        """Capture the loss of a profiled step and prove its reduction, once. Without this nothing is proved."""
        findings = self._findings(profile)
        if findings.proof is not None or _samples(profile.graph) < 2 or _obstacle(profile.graph):
            return findings
        return replace(findings, proof=prove(work))

    def measure(self, work: Workload, profile: Profile) -> MicrobatchFindings:
        """Run the largest and the smallest pieces, once for a profile; seconds of those between are on a line.

        Nothing is changed. Estimates stay if a piece does not run.
        """
        sizes, findings = _sizes(_samples(profile.graph)), self._findings(profile)
        if findings.is_measured or not sizes:
            return findings
        piece = None
        with unchanged(work), warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")  # of a step that may not be taken
            piece = _measured_piece(work, sizes[0], sizes[-1])
        return replace(findings, is_measured=True, piece=piece)

    def _findings(self, profile: Profile) -> MicrobatchFindings:
        return profile.findings.get(MicrobatchFindings) or MicrobatchFindings()

    def options(self, profile: Profile) -> list[Option]:
        """Two pieces, four, eight, and so on: to a sample each, or to 32."""
        samples = _samples(profile.graph)
        why = _obstacle(profile.graph)
        proof = Proof(None, why) if why else self._findings(profile).proof or Proof(None, "the loss was not captured")
        random = any(op.is_random for op in profile.graph.ops if op.phase == "forward")
        reduction, because = proof.reduction or "", "" if proof.reduction else proof.why
        configs = (MicrobatchConfig(size, samples, random, reduction, because) for size in _sizes(samples))
        return [Option(self.name, ("",), config) for config in configs]

    def price(self, option: Option, profile: Profile) -> Price:
        """The share of what has samples that is not alive; gradients from the first op; seconds of the pieces.

        Measured seconds never undercut the estimate, so that a price only rises once its option is a contender.
        """
        graph, config = profile.graph, option.config_as(MicrobatchConfig)
        size, samples = config.size, config.batch
        pieces = math.ceil(samples / size)
        last = next((op.index for op in graph.ops if op.phase == "optimizer"), len(graph.ops))
        removed: list[Interval] = []
        added: list[Interval] = []
        gradients = 0
        scaled = _with_samples(graph, samples)
        for storage in graph.on_device:
            if storage.category == "gradient":
                gradients += storage.bytes
                if storage.birth > 0:
                    added.append(Interval(storage.bytes, 0, storage.birth, f"sum of {storage.label}"))
                # A piece's gradient lives for a moment, beside the sum.
                added.append(Interval(storage.bytes, storage.birth, storage.birth + 1, f"{storage.label} of a piece"))
            elif storage.id in scaled and storage.birth < min(storage.death, last):
                bytes_less = storage.bytes - math.ceil(storage.bytes * size / samples)
                removed.append(Interval(bytes_less, storage.birth, min(storage.death, last), "of other pieces"))
        seconds, measured = _seconds_more(graph, pieces, gradients), self._findings(profile).piece
        if measured is not None:
            seconds = max(seconds, (measured.share(size) * samples / size - 1) * graph.loss_seconds)
        source = "modelled" if measured is None else "measured"
        return Price(
            _fidelity(config), added=tuple(added), removed=tuple(removed), compute_seconds=seconds, source=source
        )

    def inside(self, work: Workload, option: Option) -> Workload:
        """The loss of the first piece."""
        size = option.config_as(MicrobatchConfig).size
        return replace(work, batch=Batch.of(work.batch).piece(0, size))

    def repeats(self, option: Option) -> int:
        """The number of pieces."""
        config = option.config_as(MicrobatchConfig)
        return math.ceil(config.batch / config.size)

    def around(self, option: Option, profile: Profile) -> Price:
        """Sums of gradients beside those of a piece, and the seconds to add them."""
        graph, repeats = profile.graph, self.repeats(option)
        gradients = [storage for storage in graph.on_device if storage.category == "gradient"]
        added = [Interval(g.bytes, 0, g.birth, f"sum of {g.label}") for g in gradients]
        added += [Interval(g.bytes, g.birth, g.birth + 1, f"{g.label} of a piece") for g in gradients]
        moved = 3 * sum(g.bytes for g in gradients) / find_device(graph.device).bandwidth
        seconds = repeats * (moved + len(gradients) * _HOOK_SECONDS)
        fidelity = _fidelity(option.config_as(MicrobatchConfig))
        return Price(fidelity, added=tuple(added), compute_seconds=seconds)

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """The same step with its loss in pieces; the model is not touched."""
        config = whole_step(options).config_as(MicrobatchConfig)
        loss = MicrobatchLoss(work, config.size, exact=config.exact, proved=config.reduction or None)
        return Applied(replace(work, loss=loss))

    def check(self, option: Option) -> Check:
        """Roundoff where the reduction is proved; other draws of the same random numbers; else another step."""
        return Check(_fidelity(option.config_as(MicrobatchConfig)))


# Measured on one CPU thread (eight models of the zoo, 2 to 16 pieces) and an H200 (GPT-2 medium and ResNet-50, 2 to 8
# pieces).
_HOST_SECONDS = 25e-6  # an op with its share of Python, autograd and modules
_HOOK_SECONDS = 20e-6  # a gradient added by a hook
_CONVOLUTION_SECONDS = 150e-6  # on a CPU, more than other ops: its layouts are chosen and weights reordered each time
_LOSS_PER_HALVING = 0.03  # of the kernels' seconds: smaller products reach a smaller share of the device's rate


def _seconds_more(graph: Graph, pieces: int, gradients: int) -> float:
    """Estimate what pieces take beside the work of the whole batch: fixed costs of each op repeat for each piece.

    A GPU runs while Python goes on, so a piece takes the longer of both; a CPU does one after the other.
    """
    device, on_cpu = find_device(graph.device), graph.tensor_device == "cpu"
    ops = [op for op in graph.ops if op.phase != "optimizer"]
    parameters = [s for s in graph.storages if s.category == "parameter"]
    kernels = graph.loss_seconds
    host = len(ops) * _HOST_SECONDS + len(parameters) * _HOOK_SECONDS
    weights = sum(storage.bytes for storage in parameters)
    # Each piece reads sums of gradients twice and writes them once, and reads weights in forward and in backward.
    moved = (3 * gradients + 2 * weights) / device.bandwidth
    slower = kernels * _LOSS_PER_HALVING * math.log2(pieces)
    if on_cpu:
        host += sum("convolution" in op.name for op in ops) * _CONVOLUTION_SECONDS
        return (pieces - 1) * host + pieces * moved + slower
    return pieces * max((kernels + slower) / pieces + moved, host) - max(kernels, host)


@dataclass(frozen=True, slots=True)
class _PieceSeconds:
    """The measured seconds of a piece, by those of the plain step: a fixed part, and one for each sample."""

    fixed: float
    per_sample: float

    def share(self, size: int) -> float:
        return self.fixed + self.per_sample * size


def _measured_piece(work: Workload, largest: int, smallest: int) -> _PieceSeconds:
    """Time the plain step and steps of two pieces."""
    parts = [_two_pieces(work, size) for size in (largest, smallest)]
    plain, *seconds = best_seconds(work, *parts)
    of_largest, of_smallest = (taken / 2 / plain for taken in seconds)
    per_sample = (of_largest - of_smallest) / max(largest - smallest, 1)
    return _PieceSeconds(of_smallest - per_sample * smallest, per_sample)


def _two_pieces(work: Workload, size: int) -> Workload:
    batch = Batch.of(work.batch)
    part = replace(work, batch=batch.piece(0, min(2 * size, batch.samples)))
    return replace(part, loss=MicrobatchLoss(part, size))


_MOST_HALVINGS = 5  # to trace a step with more pieces takes too long


def _sizes(samples: int) -> list[int]:
    """Sizes of pieces: halves of the batch, quarters, and so on. Where one is near, a size that divides the batch."""
    sizes = dict.fromkeys(_near_divisor(samples, math.ceil(samples / 2**i)) for i in range(1, _MOST_HALVINGS + 1))
    return [size for size in sizes if size < samples]


def _near_divisor(samples: int, size: int) -> int:
    """The largest divisor from two thirds of a size to the size; the size itself where there is none."""
    return next((near for near in range(size, max((2 * size - 1) // 3, 0), -1) if samples % near == 0), size)


def _fidelity(config: MicrobatchConfig) -> Fidelity:
    if config.reduction in ("", "several"):  # a later batch may break the second
        return Fidelity.CHANGED
    return Fidelity.UNBIASED if config.random else Fidelity.ROUNDOFF


def _obstacle(graph: Graph) -> str:
    """The reason for which pieces are another step, whatever the loss; "" where a trace shows none."""
    if graph.fake:
        return "a step that is only predicted is not captured"
    if _normalises(graph):
        return "batch norm in training normalises each piece by itself"
    return "the forward pass writes to a buffer, in each piece again" if _writes(graph) else ""


# -- what a traced step tells ----------------------------------------------------------------------------


def _samples(graph: Graph) -> int:
    """Number of samples in the step; 0 where the tensors of its batch do not agree."""
    sizes = {s.shape[0] for s in graph.storages if s.category == "input" and s.shape}
    return sizes.pop() if len(sizes) == 1 else 0


def _with_samples(graph: Graph, samples: int) -> set[int]:
    """The storages that grow with the batch: made from it, with a whole number of elements for each sample.

    A weight's gradient is made from it too. It has the weight's shape, in some order.
    """
    weights = {s.bytes for s in graph.storages if s.category == "parameter"}
    from_batch = {s.id for s in graph.storages if s.category == "input"}
    scaled: set[int] = set()
    for op in graph.ops:
        if op.phase == "optimizer" or not any(value.storage in from_batch for value in op.inputs):
            continue
        for value in op.outputs:
            storage = graph.storages[value.storage]
            if storage.category not in ("activation", "temporary"):
                continue
            from_batch.add(storage.id)
            has_rows = storage.bytes > 0 and any(length and length % samples == 0 for length in value.shape)
            if has_rows and not (op.phase == "backward" and storage.bytes in weights):
                scaled.add(storage.id)
    return scaled


def _normalises(graph: Graph) -> bool:
    """Whether a batch norm takes statistics of its batch."""
    kinds = dict(graph.modules)
    norms = [op for op in graph.ops if "batch_norm" in op.name and op.phase == "forward"]
    plain = {op.module for op in norms}
    if any(op.is_training and "InstanceNorm" not in kinds.get(op.module, "") for op in norms):
        return True
    # A layer of lowtide's runs as other ops.
    ran = {op.module for op in graph.ops if op.phase == "forward"} - plain
    return any("BatchNorm" in kinds.get(path, "") or "BatchRenorm" in kinds.get(path, "") for path in ran)


def _writes(graph: Graph) -> bool:
    """Whether the loss writes to a buffer, as spectral norm does: in pieces it would do so several times."""
    buffers = {s.id for s in graph.storages if s.category == "buffer"}
    ops = (op for op in graph.ops if op.phase == "forward")
    writing = (op for op in ops if short_name(op.name).endswith("_") or op.name.endswith("out"))
    return any(value.storage in buffers for op in writing for value in op.outputs)
