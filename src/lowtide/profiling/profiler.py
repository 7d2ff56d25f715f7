"""``profile``: trace a step and say where its memory and its seconds go."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import replace

import torch

from lowtide.fingerprint import Fingerprint
from lowtide.profiling.devices import find_device, hardware_name
from lowtide.profiling.kernels import with_workspaces
from lowtide.profiling.outside import read_outside
from lowtide.profiling.profile import Profile, Source
from lowtide.profiling.roofline import model_seconds
from lowtide.tracing import trace
from lowtide.tracing.op_calls import Call
from lowtide.version import __version__
from lowtide.workload import Workload, check_workload


def profile(
    work: Workload, *, fake: bool = False, device: str | None = None, measure: bool | Callable[[str], bool] = False
) -> Profile:
    """Show where the memory of one training step goes, and when.

    Runs one step (zero_grad, forward, backward, optimizer) and restores everything, bit for bit. On a GPU, a step
    before it loads the kernels. With ``fake``, or for another ``device`` ("cuda", "h200", ...), nothing is allocated or
    computed: the step is predicted. Workspaces of its kernels then come from a table and rules. With ``measure``, each
    distinct op runs once, alone, on this machine; the disk stores the results for later runs. A function chooses ops by
    their signatures.

    >>> model = torch.nn.Linear(1000, 1000)
    >>> work = Workload(model, lambda model, batch: model(batch).sum(), torch.zeros(8, 1000))
    >>> profile(work).storage_peak_bytes == profile(work, fake=True).storage_peak_bytes
    True
    """
    check_workload(work, call="lowtide.profile(work)")
    if device is not None:
        find_device(device)
    fake = fake or device not in (None, work.device.type) or work.device.type == "meta"
    calls: dict[str, Call] | None = {} if fake and measure else None
    graph = trace(work, fake=fake, device=device, calls=calls)
    seconds_source: Source = "measured"
    workspace_source: Source = "measured"
    if fake:
        if callable(measure) and calls is not None:
            calls = {signature: call for signature, call in calls.items() if measure(signature)}
        graph, workspace_source = with_workspaces(graph, calls)
    if any(math.isnan(op.seconds) for op in graph.ops):
        seconds_source = "modelled"
        graph = replace(graph, ops=model_seconds(graph))
    return Profile(
        name=work.name or type(work.model).__name__,
        graph=graph,
        hardware=hardware_name(graph.device),
        seconds_source=seconds_source,
        workspace_source=workspace_source,
        versions={
            "lowtide": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        outside=None if fake else read_outside(work.device),
        fingerprint=Fingerprint.of(work),
    )
