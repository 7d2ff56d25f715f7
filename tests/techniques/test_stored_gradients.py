"""Stored gradients as a technique: the contract, the bytes that wait for the step, and plans that use them."""

import pytest
import torch

import lowtide
from lowtide.errors import PlanError
from lowtide.optim.gradients import packed_bytes
from lowtide.optim.used_gradients import UsedGradient
from lowtide.planning import predict
from lowtide.planning.prediction import apply_options, estimate_peak
from lowtide.profiling import profile
from lowtide.techniques import Fidelity, Option, techniques
from lowtide.techniques.microbatch.technique import MicrobatchConfig
from lowtide.techniques.stored_gradients import StoredGradientsConfig
from tests.contract.contract import StepContract
from tests.contract.outcomes import run
from tests.contract.workloads import WORKLOADS, seeded, wide
from tests.soak import in_soak

NAME = "stored_gradients"


def option(bits):
    return Option(NAME, ("",), StoredGradientsConfig(bits))


class TestContract(StepContract):
    name = NAME


@pytest.mark.parametrize(("bits", "device"), [("16bit", None), ("8bit", "h200")])
def test_what_waits_for_the_step_is_what_the_price_says(bits, device):
    work = lowtide.zoo.workload("gpt2", layers=1, width=64, heads=4, vocab=512, batch=2, seq=16, optimizer="adamw")
    plain = profile(work, fake=device is not None, device=device)
    actual = predict(work, [option(bits)], plain)
    counts = [p.numel() for p in work.model.parameters()]
    waiting = sum(packed_bytes(count, bits) for count in counts)
    assert _live_after_backward(plain) - _live_after_backward(actual) == 4 * sum(counts) - waiting
    price = techniques()[NAME].price(option(bits), plain)
    first = plain.graph.phase_starts()["optimizer"] - 1
    added = sum(i.bytes for i in price.added if i.birth <= first + 1 and i.death == len(plain.graph.ops))
    assert added == waiting
    assert sum(i.bytes for i in price.removed) == 4 * sum(counts)
    assert price.fidelity is Fidelity.CHANGED
    largest = 4 * max(counts)
    assert int(actual.graph.live_bytes("gradient").max()) == largest  # the tied embedding's, while it is packed


def _live_after_backward(actual):
    last = max(op.index for op in actual.graph.ops if op.phase == "backward")
    return sum(s.bytes for s in actual.graph.on_device if s.birth <= last and s.death > last + 1)


@pytest.mark.parametrize("bits", ["8bit", *in_soak(["16bit"])])
def test_the_estimate_is_near_the_trace(bits):
    work = lowtide.zoo.workload("gpt2", layers=2, width=256, heads=4, vocab=2000, batch=1, seq=16, optimizer="adamw")
    plain = profile(work)
    price = techniques()[NAME].price(option(bits), plain)
    exact = predict(work, [option(bits)], plain).peak_bytes
    assert exact < plain.peak_bytes
    assert estimate_peak(plain.graph, [price]) == pytest.approx(exact, rel=0.02)


def test_a_plan_uses_it_when_it_is_allowed_and_takes_it_back(only):
    only(NAME)
    work = lowtide.zoo.workload("gpt2", layers=1, width=128, heads=4, vocab=2000, batch=1, seq=8, optimizer="adamw")
    plan = lowtide.plan(work, "95%", allow=NAME, engine="eager", tune=False)
    assert [option.technique for option in plan.options] == [NAME]
    assert lowtide.verify(work, plan).ok
    with lowtide.apply(plan, work) as step:
        step(work.batch)
        assert all(isinstance(p.grad, UsedGradient) for p in work.model.parameters())
    work.compute_loss().backward()
    assert all(p.grad is not None for p in work.model.parameters())


@pytest.mark.parametrize(("bits", "near"), [("16bit", 0.01), ("8bit", 0.05)])
def test_a_step_is_near_the_plain_one(bits, near):
    work = WORKLOADS["convnet"]()
    expected, start = run(work), {n: p.detach().clone() for n, p in work.model.named_parameters()}
    with techniques()[NAME].apply(work, [option(bits)]) as applied:
        actual = run(applied.work)
    for key, before in start.items():
        moved = expected[f"{key}, trained"] - before
        assert (actual[f"{key}, trained"] - expected[f"{key}, trained"]).norm() <= near * moved.norm() + 1e-6


def test_a_batch_in_pieces_is_rounded_once():
    work = seeded(wide)()
    pieces = Option("microbatch", ("",), MicrobatchConfig(2, 8))
    with apply_options(work, [pieces, option("8bit")]) as applied:
        applied.work.compute_loss().backward()
        parameters = len(list(work.model.parameters()))
        assert work.optimizer.param_groups[0]["gradient_roundings"] == parameters
        work.optimizer.step()


def test_16_bits_are_no_gain_for_16_bit_gradients():
    work = seeded(wide)()
    batch = work.batch[0].bfloat16()
    work = lowtide.Workload(work.model.bfloat16(), lambda m, b: m(b).float().mean(), batch, work.optimizer)
    assert techniques()[NAME].options(profile(work)) == [option("8bit")]


def test_bits_that_no_gradient_is_stored_in_are_refused():
    with pytest.raises(PlanError) as refusal:
        option("4bit")
    assert "bits='4bit'" in str(refusal.value)


@pytest.mark.parametrize("fake", [False, True])
def test_a_profile_between_backward_and_step_loses_no_gradient(fake):
    results = []
    for looks in (False, True):
        work = seeded(wide)()
        with techniques()[NAME].apply(work, [option("8bit")]) as applied:
            work.compute_loss().backward()
            if looks:
                profile(applied.work, fake=fake)
            work.compute_loss().backward()
            work.optimizer.step()
        results.append([p.detach().clone() for p in work.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_profile_changes_nothing():
    work = seeded(wide)()
    with techniques()[NAME].apply(work, [option("8bit")]) as applied:
        profile(applied.work)
        profile(applied.work, fake=True)
        assert work.optimizer.param_groups[0]["gradient_roundings"] == 0
    assert not work.optimizer.state
    assert all(p.grad is None for p in work.model.parameters())
    assert torch.is_grad_enabled()
