"""Profiles of real steps and of predicted ones."""

import pytest
import torch

from lowtide import zoo
from lowtide.errors import TraceError
from lowtide.profiling import profile
from tests.refusals import refused


def test_seconds_are_measured_where_the_step_ran_and_modelled_where_not():
    real = profile(zoo.small("resnet18"))
    assert real.seconds_source == "measured"
    assert real.seconds > 0
    predicted = profile(zoo.small("resnet18"), fake=True)
    assert predicted.seconds_source == "modelled"
    assert predicted.seconds > 0


def test_another_device_is_predicted():
    shown = profile(zoo.small("gpt2"), device="h200")
    assert shown.graph.fake
    assert shown.hardware == "NVIDIA H200"
    assert shown.peak_bytes % 512 == 0  # as CUDA's allocator rounds


def test_the_gpt2_medium_step_is_predicted_without_memory():
    work = zoo.workload("gpt2-medium", batch=16, seq=1024, device="meta", autocast=torch.bfloat16)
    shown = profile(work, device="h200")
    assert shown.peak_bytes == pytest.approx(28_719_564_288, rel=0.01)  # as measured on the H200


def test_a_device_that_is_not_known_is_refused():
    with refused("'h2oo'", kind=TraceError):
        profile(zoo.small("lenet"), device="h2oo")
