"""Optimizer states as a technique: the contract where they are large enough, their bytes, and plans that use them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import LowtideError
from lowtide.planning import predict
from lowtide.profiling import profile
from lowtide.techniques import techniques
from tests.contract.contract import StepContract
from tests.contract.workloads import seeded, wide
from tests.models import squares


class TestContract(StepContract):
    name = "optimizer_state"


def test_the_price_is_what_a_trace_then_finds():
    technique, work = techniques()["optimizer_state"], seeded(wide)()
    plain = profile(work)
    option = next(o for o in technique.options(plain) if o.config.state == "8bit")
    removed = sum(interval.bytes for interval in technique.price(option, plain).removed)
    matrix = 64 * 64
    assert removed == 2 * (4 * matrix - matrix - 4 * matrix // 256)
    assert plain.static_bytes - predict(work, [option], plain).static_bytes == removed


def test_a_plan_uses_it_when_it_is_allowed_and_takes_it_back(only):
    only("optimizer_state")
    work = lowtide.zoo.workload("gpt2", layers=1, width=128, heads=4, vocab=512, batch=1, seq=8, optimizer="adamw")
    plain = profile(work)
    optimizer = work.optimizer
    weight = max(work.model.parameters(), key=lambda p: p.numel())
    plan = lowtide.plan(work, "80%", allow="optimizer_state", profile=plain, engine="eager", tune=False)
    assert [option.technique for option in plan.options] == ["optimizer_state"]
    assert type(optimizer) is torch.optim.AdamW
    with lowtide.apply(plan, work) as step:
        assert step.work.optimizer is optimizer
        step(work.batch)
        assert optimizer.state[weight]["exp_avg"].dtype == torch.int8
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32


def test_a_prediction_for_a_gpu_knows_states_on_the_host():
    work = seeded(wide)()
    plain = profile(work, fake=True, device="h200")
    technique = techniques()["optimizer_state"]
    option = next(o for o in technique.options(plain) if o.config.state == "cpu")
    actual = predict(work, [option], plain)
    states = [s for s in actual.graph.storages if s.category == "optimizer state" and s.bytes > 8]
    assert states
    assert all(s.device == "cpu" for s in states)
    assert actual.static_bytes < plain.static_bytes


@pytest.mark.parametrize(("fake", "listed"), [(False, "all"), (True, "trained")])
def test_frozen_parameters_take_no_gradient_and_no_state(fake, listed):
    model = nn.Sequential(nn.Linear(64, 96).requires_grad_(False), nn.ReLU(), nn.Linear(96, 32))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(model.parameters() if listed == "all" else trained)
    batch = torch.randn(8, 64)
    work = lowtide.Workload(model, squares, batch, optimizer)
    actual = profile(work, fake=fake)
    size = dict.fromkeys(("parameter", "gradient", "optimizer state"), 0)
    for storage in actual.graph.storages:
        if storage.category in size:
            size[storage.category] += storage.bytes
    everything, free = (sum(4 * p.numel() for p in ps) for ps in (model.parameters(), trained))
    assert size == {
        "parameter": everything,
        "gradient": free,
        "optimizer state": 2 * free + 4 * len(trained),  # and a step count each
    }


def test_a_step_without_such_states_says_so():
    weight = nn.Linear(64, 64)
    work = lowtide.Workload(
        weight, lambda m, b: m(b).mean(), torch.zeros(1, 64), torch.optim.Adagrad(weight.parameters())
    )
    technique = techniques()["optimizer_state"]
    assert technique.options(profile(work)) == []
    option = technique.options(profile(seeded(wide)()))[0]
    with pytest.raises(LowtideError) as refusal:
        technique.apply(work, [option])
    assert "Adagrad" in str(refusal.value)


def test_momentum_of_sgd_is_offered_in_8_bits_by_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    work = seeded(wide)()
    work = replace(work, optimizer=torch.optim.SGD(work.model.parameters(), lr=0.1, momentum=0.9))
    technique, plain = techniques()["optimizer_state"], profile(work)
    (option,) = technique.options(plain)
    assert option.config.state == "8bit"
    removed = sum(interval.bytes for interval in technique.price(option, plain).removed)
    assert removed == 4 * 64 * 64 - 64 * 64 - 4 * 64 * 64 // 256
    table = 4 * 256  # of the values of codes, once for all parameters
    assert plain.static_bytes - predict(work, [option], plain).static_bytes == removed - table
    plain_sgd = replace(work, optimizer=torch.optim.SGD(work.model.parameters(), lr=0.1))
    assert not technique.options(profile(plain_sgd))
