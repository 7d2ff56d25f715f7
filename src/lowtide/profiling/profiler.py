"""``profile``: trace a step and say where its memory and its seconds go."""

from __future__ import annotations

import platform
from dataclasses import replace

import numpy as np
import torch

from lowtide.profiling.devices import hardware_name
from lowtide.profiling.profile import Profile
from lowtide.profiling.roofline import model_seconds
from lowtide.tracing import trace
from lowtide.version import __version__
from lowtide.workload import Workload


def profile(work: Workload, *, fake: bool = False, device: str | None = None) -> Profile:
    """Where the memory of one training step goes, and when.

    Runs one step (zero_grad, forward, backward, optimizer) and puts everything back, bit for bit. With ``fake``,
    or for another ``device`` ("cuda", "h200", ...), nothing is allocated or computed: the step is predicted.

    >>> model = torch.nn.Linear(1000, 1000)
    >>> work = Workload(model, lambda model, batch: model(batch).sum(), torch.zeros(8, 1000))
    >>> profile(work).storage_peak_bytes == profile(work, fake=True).storage_peak_bytes
    True
    """
    fake = fake or device not in (None, work.device.type) or work.device.type == "meta"
    graph = trace(work, fake=fake, device=device)
    measured = not any(np.isnan(op.seconds) for op in graph.ops)
    if not measured:
        graph = replace(graph, ops=model_seconds(graph))
    return Profile(
        name=work.name or type(work.model).__name__,
        graph=graph,
        hardware=hardware_name(graph.device),
        seconds_source="measured" if measured else "modelled",
        workspace_source="measured" if measured else "none",
        versions={"lowtide": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    )
