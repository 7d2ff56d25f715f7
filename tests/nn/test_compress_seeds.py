"""``nn.compressed`` draws its noise from torch's seed: a run is repeated and resumed bit for bit."""

import copy

import torch
from torch import nn

from lowtide.nn import compressed
from tests.nn.compressing import activation


def test_the_same_seed_gives_the_same_gradients():
    x = activation(32, 256)

    def run(seed):
        with compressed(2, seed=seed):
            y = x.square().sum()
        return torch.autograd.grad(y, x)[0]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def training(steps, model, optimizer, first=0):
    """Steps of a model without dropout, which draws nothing itself, each on other data."""
    gradients = []
    for step in range(first, first + steps):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        with compressed(2):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    return gradients


def learner():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    return model, torch.optim.AdamW(model.parameters())


def test_torchs_seed_repeats_a_run_and_one_that_is_resumed():
    torch.manual_seed(5)
    model, optimizer = learner()
    whole = training(4, model, optimizer)
    torch.manual_seed(5)
    model, optimizer = learner()
    halves = training(2, model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    torch.manual_seed(6)
    model, optimizer = learner()
    training(3, model, optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    halves += training(2, model, optimizer, first=2)
    for one, other in zip(whole, halves, strict=True):
        assert all(map(torch.equal, one, other))
