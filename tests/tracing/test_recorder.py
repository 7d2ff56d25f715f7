"""The two peaks of every zoo model: fake equals real to the byte, and allocated is what the allocator says."""

from functools import cache

import pytest
import torch

from lowtide import zoo
from lowtide.tracing import Graph, trace
from tests.soak import in_soak
from tests.tracing.allocator import allocated_peak
from tests.zoo.families import FAMILIES


@cache
def real_step(name: str) -> Graph:
    return trace(zoo.small(name))


LARGE = {"resnet50", "resnext50", "densenet121", "wrn38", "unet"}


@pytest.mark.parametrize("name", [*(name for name in FAMILIES if name not in LARGE), *in_soak(LARGE)])
def test_fake_storage_peak_equals_real_to_the_byte(name):
    real, fake = real_step(name), trace(zoo.small(name), fake=True)
    assert fake.storage_peak_bytes == real.storage_peak_bytes
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]


@pytest.mark.parametrize("name", ["lenet", "resnet18", "gpt2", "lstm", *in_soak(FAMILIES)])
def test_allocated_peak_is_within_one_percent_of_the_profilers(name):
    work = zoo.small(name)
    assert real_step(name).peak_bytes == pytest.approx(
        allocated_peak(work.model, work.loss, work.batch, work.optimizer), rel=0.01
    )


@pytest.mark.parametrize("name", ["lenet", *in_soak(["resnet18", "gpt2", "unet"])])
def test_peaks_hold_under_autocast(name):
    work = zoo.small(name, autocast=torch.bfloat16)
    real, fake = trace(work), trace(work, fake=True)
    assert fake.storage_peak_bytes == real.storage_peak_bytes
    plain = allocated_peak(work.model, work.loss, work.batch, work.optimizer, torch.bfloat16)
    assert real.peak_bytes == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("name", ["lenet", *in_soak(["gpt2"])])
@pytest.mark.parametrize("optimizer", ["none", "sgd", "adam", "adamw"])
def test_peaks_hold_for_each_optimizer(name, optimizer):
    work = zoo.small(name, optimizer=optimizer)
    real, fake = trace(work), trace(work, fake=True)
    assert fake.storage_peak_bytes == real.storage_peak_bytes
    assert real.peak_bytes == pytest.approx(allocated_peak(work.model, work.loss, work.batch, work.optimizer), rel=0.01)


def test_a_meta_model_gives_the_same_storage_peak():
    assert trace(zoo.small("gpt2", device="meta")).storage_peak_bytes == real_step("gpt2").storage_peak_bytes


def test_wrn_28_2_takes_what_the_report_says():
    """404.8 MB in the report (decimal, batch 100, fp32, SGD with momentum), and its parts as counted by hand."""
    graph = trace(zoo.workload("wrn28-2", batch=100, device="meta"))
    assert graph.storage_peak_bytes == pytest.approx(404.8e6, rel=0.02)
    size = {
        category: sum(s.bytes for s in graph.storages if s.category == category)
        for category in ("parameter", "gradient", "optimizer state", "input")
    }
    assert size["parameter"] == size["gradient"] == size["optimizer state"] == 4 * 1_467_610
    assert size["input"] == pytest.approx(1.23e6, rel=0.01)
    saved = {s.storage for s in graph.saved if s.category == "activation"}
    maps = [graph.storages[i] for i in saved if graph.storages[i].bytes > 100_000]
    assert sum(s.bytes for s in maps) + 4 * 100 * 3 * 32 * 32 == pytest.approx(381.3e6, rel=0.001)
