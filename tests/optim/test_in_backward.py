"""Steps in backward: gradients are never all alive, and other changes of the optimizer go together with it."""

import pytest
import torch
from torch import nn

import lowtide.optim as lo
from lowtide import LowtideError
from tests.optim.training import BATCHES, OPTIMIZERS, WAYS, equal, make, started, train


def test_gradients_are_never_all_alive_in_backward():
    model, optimizer = started()
    alive = []

    def count(_):
        alive.append(sum(p.grad is not None for p in model.parameters()))

    handles = [p.register_post_accumulate_grad_hook(count) for p in model.parameters()]
    with lo.step_in_backward(optimizer):
        train(model, optimizer, BATCHES[:1])
    assert max(alive) == 1
    for handle in handles:
        handle.remove()
    model(BATCHES[0]).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("order", [["8bit", "in backward"], ["in backward", "8bit"]], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_8bit_states_and_steps_in_backward_work_together_in_either_order(name, order):
    pytest.importorskip("bitsandbytes" if name == "SGD" else "torch")
    results = []
    for ways in (["8bit"], order):
        model, optimizer = started(name)
        kind = type(optimizer)
        undos = [WAYS[way](optimizer) for way in ways]
        results.append(train(model, optimizer, BATCHES[:4]))
        for undo in reversed(undos):
            undo()
        assert type(optimizer) is kind
        assert optimizer.state[model[0].weight].get("step", 4) == 4  # SGD counts none
    assert equal(*results)


def test_rounding_and_steps_in_backward_work_together():
    results = []
    for ways in (["stochastic"], ["in backward", "stochastic"], ["stochastic", "in backward"]):
        model = make(torch.bfloat16)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        for way in ways:
            WAYS[way](optimizer)
        results.append(train(model, optimizer, BATCHES[:3]))
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_is_told_that_steps_are_over(unscales):
    model = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    undo = lo.step_in_backward(optimizer)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(LowtideError) as refusal:
        scaler.step(optimizer)
    assert "GradScaler" in str(refusal.value)
    undo()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)  # as without
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
