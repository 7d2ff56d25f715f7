"""A program as a loss: the bits and the bytes of the plan that runs it."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowtide.engines.traced import ProgramLoss
from lowtide.planning.graph_candidates import graph_candidates
from lowtide.planning.lowering import LOWERINGS
from lowtide.profiling import profile

from .planned import awkward


def test_a_program_gives_the_plain_loss_and_its_forecast_peak() -> None:
    work = awkward()
    plain = profile(work)
    candidates, lowering = graph_candidates(work, plain), LOWERINGS["ops"]
    form = candidates.form(lowering)
    program = min(form.solutions(), key=lambda each: each.estimate_bytes).program
    assert candidates.inputs is not None
    loss = ProgramLoss(work.loss, form.problem.joint, program, lowering, candidates.inputs, candidates.mutated)
    torch.manual_seed(1)
    expected = work.compute_loss().detach()
    torch.manual_seed(1)
    assert torch.equal(loss(work.model, work.batch), expected)
    traced = profile(replace(work, loss=loss), fake=True)
    assert traced.storage_peak_bytes == form.forecast.graph(program).storage_peak_bytes
