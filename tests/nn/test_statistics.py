"""Running statistics are torch's, bit for bit, and move once."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.nn.plain import (
    ONE_BUFFER,
    assert_same_statistics,
    assert_same_step,
    pair,
    step,
)
from tests.nn.raising import raises


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize(
    ("momentum", "inputs", "parameters"),
    [
        (0.25, torch.float32, torch.float32),
        (None, torch.float32, torch.float32),
        (0.1, torch.bfloat16, torch.bfloat16),
        (0.1, torch.float16, torch.float32),
    ],
)
def test_statistics_after_twenty_steps_are_torchs_bit_for_bit(strategy, momentum, inputs, parameters):
    layer, plain = (model.to(parameters) for model in pair(strategy, momentum=momentum))
    for _ in range(20):
        x = (torch.randn(5, 4, 3, 3) * 3 + 2).to(inputs)
        for model in (layer, plain):
            model(x.clone().requires_grad_()).sum().backward()
    for name, expected in plain.norm.named_buffers():
        assert torch.equal(getattr(layer, name), expected), name
    assert layer.num_batches_tracked == 20


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 4, 5, 3), (2, 4, 0, 3)])
def test_an_empty_batch_is_as_in_torch(strategy, training, shape):
    layer, plain = pair(strategy)
    layer.train(training)
    plain.train(training)
    x, gradient = torch.randn(2, *shape)
    try:
        expected = step(plain, x, gradient)
    except (RuntimeError, ValueError) as error:
        with pytest.raises(type(error)):
            step(layer, x, gradient)
        return
    torch.testing.assert_close(step(layer, x, gradient), expected, equal_nan=True)
    torch.testing.assert_close(list(layer.buffers()), list(plain.norm.buffers()), equal_nan=True)


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("grad", [True, False])
def test_one_value_per_channel_is_torchs_error(strategy, grad):
    layer, plain = pair(strategy)
    x = torch.randn(1, 4, 1, 1, requires_grad=grad)
    for model in (plain, layer):
        with raises(ValueError, "[1, 4, 1, 1]"):
            model(x)
    layer.eval()
    plain.eval()
    assert_same_step(layer, plain, x.detach(), torch.randn(1, 4, 1, 1))


def non_reentrant(function, x):
    return checkpoint(function, x, use_reentrant=False)


def reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


def nested(function, x):
    return non_reentrant(lambda x: non_reentrant(function, x), x)


RUNS = [
    *((strategy, non_reentrant, 0.1, False) for strategy in ("standard", *ONE_BUFFER)),
    *(("checkpoint", run, None, False) for run in (reentrant, nested)),
    *((strategy, non_reentrant, 0.1, True) for strategy in ONE_BUFFER),
]


@pytest.mark.parametrize(("strategy", "run", "momentum", "autocast"), RUNS)
def test_recompute_updates_running_stats_once(strategy, run, momentum, autocast):
    layer, plain = pair(strategy, momentum=momentum)
    x, gradient = torch.randn(2, 5, 4, 3, 3)
    results = []
    for model, call in ((layer, run), (plain, lambda function, x: function(x))):
        net = nn.Sequential(nn.Conv2d(4, 4, 1), model)
        nn.init.dirac_(net[0].weight)
        nn.init.zeros_(net[0].bias)
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            call(net, leaf).backward(gradient.bfloat16() if autocast else gradient)
        results.append([leaf.grad, *(p.grad for p in net.parameters())])
    # The plain layers round twice to 16 bits; sums over an x̂ of 16 bits lose one more.
    tolerance = {"rtol": 2e-2, "atol": 4e-2 if strategy == "checkpoint_xhat" else 2e-2} if autocast else {}
    torch.testing.assert_close(results[0], results[1], **tolerance)
    assert_same_statistics(layer, plain.norm)
    assert layer.num_batches_tracked == 1
