"""The plain step that plans start from, traced and timed."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowtide.profiling import Profile
from lowtide.profiling import profile as profile_step
from lowtide.profiling.timing import seconds_of_loss
from lowtide.tracing.snapshot import unchanged
from lowtide.workload import Workload

OUT_OF_MEMORY = "The plain step ran out of memory on this device, and was predicted."
_TIMED_STEPS = 4  # the first is not the fastest


def baseline_profile(work: Workload, *, fake: bool, device: str | None) -> Profile:
    """Trace the plain step after warm-up steps, since the first fills caches and chooses kernels.

    If a GPU waits for the host, its ops take less than the step. They are then scaled to the step's seconds.
    A step that does not fit is predicted; its kernels' workspaces are measured alone.
    """
    if fake or device not in (None, work.device.type) or work.device.type == "meta":
        return profile_step(work, fake=fake, device=device)
    try:
        with unchanged(work):
            seconds = [seconds_of_loss(work) for _ in range(_TIMED_STEPS if work.device.type == "cuda" else 1)]
        profile = profile_step(work, fake=False, device=device)
    except torch.OutOfMemoryError:  # the very reason to plan: predict what cannot be run
        profile = profile_step(work, fake=True, device=device, measure=True)
        return replace(profile, graph=replace(profile.graph, notes=(*profile.graph.notes, OUT_OF_MEMORY)))
    return _lasting(profile, min(seconds)) if work.device.type == "cuda" else profile


def _lasting(profile: Profile, seconds: float) -> Profile:
    """Scale forward and backward to their measured seconds, if these exceed the sum of their ops."""
    return with_loss_seconds(profile, seconds) if 0 < profile.graph.loss_seconds < seconds else profile


def with_loss_seconds(profile: Profile, seconds: float) -> Profile:
    """Scale forward and backward so that their ops take so long together."""
    share = seconds / profile.graph.loss_seconds
    ops = (op if op.phase == "optimizer" else replace(op, seconds=op.seconds * share) for op in profile.graph.ops)
    return replace(profile, graph=replace(profile.graph, ops=tuple(ops)))
