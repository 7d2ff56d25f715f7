"""A step under options, predicted to the byte."""

from __future__ import annotations

import torch
from torch import nn

from lowtide import Workload
from lowtide.engines import plan
from lowtide.errors import PlanError
from lowtide.planning import apply_options
from lowtide.planning.prediction import predict
from lowtide.profiling import Profile, profile
from lowtide.techniques import register
from lowtide.techniques.microbatch.technique import Microbatch
from lowtide.techniques.registry import techniques
from tests.models import squares
from tests.refusals import refused

from .steps import Loose, chain, tanh_layers


def test_techniques_that_conflict_are_not_applied_together(plain: Profile) -> None:
    work = chain()
    chosen = plan(work, "60%", profile=plain, tune=False).options
    with register(Loose()) as undo, refused("loose", chosen[0].technique, kind=PlanError):
        apply_options(work, [*chosen, *Loose().options(plain)])
    undo()
    with refused("loose", kind=PlanError):
        apply_options(work, Loose().options(plain))
    assert "forward" not in work.model.__dict__


def test_a_batch_that_a_size_does_not_divide_is_predicted_to_the_byte() -> None:
    work = tanh_layers(squares)
    work = Workload(work.model, work.loss, torch.randn(97, 24))
    options = [option for option in Microbatch().options(profile(work)) if option.config.size == 4]
    before = profile(work)
    predicted = predict(work, options, before, only_peaks=True)
    with apply_options(work, options) as applied:
        assert profile(applied.work).storage_peak_bytes == predicted.storage_peak_bytes


def test_ops_that_a_technique_brings_are_measured_before_their_bytes_are_promised() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    work = Workload(model, squares, torch.randn(60, 16), autocast=torch.bfloat16)
    before = profile(work)
    for option in techniques()["randomized"].options(before)[:2]:
        predicted = predict(work, [option], before)
        with apply_options(work, [option]) as applied:
            assert profile(applied.work).peak_bytes <= predicted.peak_bytes
