"""The optimizer in backward as a technique: bit for bit, and gradients that are not all alive in a trace either."""

import copy

import pytest
import torch

import lowtide
from lowtide.planning import predict
from lowtide.planning.prediction import apply_options
from lowtide.profiling import profile
from lowtide.techniques import Option, techniques
from lowtide.techniques.optimizer_state import OptimizerStateConfig
from tests.contract.contract import StepContract
from tests.contract.outcomes import run
from tests.contract.workloads import WORKLOADS, seeded, wide

NAME = "optimizer_in_backward"


class TestContract(StepContract):
    name = NAME


def test_parameters_and_buffers_are_those_of_a_plain_step():
    work = WORKLOADS["convnet"]()
    expected = run(work, steps=3)
    with techniques()[NAME].apply(work, [Option(NAME, ("",))]) as applied:
        actual = run(applied.work, steps=3)
    assert actual.keys() == {key for key in expected if not key.endswith(".grad")}
    assert all(torch.equal(value, expected[key]) for key, value in actual.items())


@pytest.mark.parametrize("device", [None, "h200"])
def test_a_trace_sees_gradients_go(device):
    work = lowtide.zoo.workload("gpt2", layers=1, width=64, heads=4, vocab=512, batch=2, seq=16, optimizer="adamw")
    fake = device is not None
    plain = profile(work, fake=fake, device=device)
    actual = predict(work, [Option(NAME, ("",))], plain)
    before, after = (int(p.graph.live_bytes("gradient").max()) for p in (plain, actual))
    assert before >= 4 * sum(p.numel() for p in work.model.parameters())
    assert 0 < after < 0.5 * before  # the tied embedding, whose gradient waits for both its uses, is the most of it
    assert actual.static_bytes == plain.static_bytes
    assert actual.peak_bytes < plain.peak_bytes


def test_with_8bit_states_it_gives_what_8bit_states_alone_give():
    both = [Option("optimizer_state", ("",), OptimizerStateConfig("8bit")), Option(NAME, ("",))]
    results = []
    for options in (both[:1], both, both[::-1]):
        work = seeded(wide)()
        with apply_options(work, options) as applied:
            results.append(run(applied.work, steps=3))
        assert type(work.optimizer) is torch.optim.AdamW
    for actual in results[1:]:
        assert all(torch.equal(value, results[0][key]) for key, value in actual.items())


def test_a_profile_changes_nothing():
    work = seeded(wide)()
    before = copy.deepcopy(work.model.state_dict())
    with techniques()[NAME].apply(work, [Option(NAME, ("",))]) as applied:
        profile(applied.work)
        profile(applied.work, fake=True)
    assert all(torch.equal(value, before[key]) for key, value in work.model.state_dict().items())
    assert not work.optimizer.state


def test_an_optimizer_with_step_hooks_of_the_user_is_left_alone():
    work = WORKLOADS["convnet"]()
    assert work.optimizer is not None
    handle = work.optimizer.register_step_pre_hook(lambda optimizer, *_: None)
    with pytest.raises(lowtide.LowtideError) as error:
        techniques()[NAME].apply(work, [Option(NAME, ("",))])
    assert "<lambda>" in str(error.value)
    smallest = lowtide.plan(work, "99%", tune=False)
    assert NAME not in [option.technique for option in smallest.options]
    handle.remove()
    techniques()[NAME].apply(work, [Option(NAME, ("",))])()
