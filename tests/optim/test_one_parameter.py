"""Steps of one parameter at a time give a plain step's bits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.optim.training import BATCHES, OPTIMIZERS, WAYS, equal, make, started, train


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["in backward", "cpu"])
def test_the_same_bits_as_a_plain_step(name, way):
    results, states = [], []
    for use in ("plain", way):
        model, optimizer = started(name, use)
        results.append(train(model, optimizer, BATCHES[:5]))
        states.append(optimizer.state_dict())
    assert equal(*results)
    assert states[0]["param_groups"] == states[1]["param_groups"]
    torch.testing.assert_close(states[1]["state"], states[0]["state"], rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        hidden = checkpoint(lambda t: torch.tanh(self.mix(self.embed(t))), x, use_reentrant=False)
        return F.cross_entropy(F.linear(hidden, self.embed.weight), x)


def test_tied_weights_under_a_checkpoint_step_once_in_backward():
    x = torch.arange(20)
    results = []
    for use in (WAYS["plain"], WAYS["in backward"]):
        model = Tied()
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        use(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
        assert all(state["step"] == 3 for state in optimizer.state.values())
    assert equal(*results)


def test_a_scheduler_and_the_groups_of_the_users_optimizer_go_on():
    results = []
    for use in (WAYS["plain"], WAYS["in backward"]):
        model = make()
        layers = list(model.children())
        optimizer = torch.optim.SGD(
            [{"params": layers[0].parameters(), "lr": 0.1}, {"params": layers[2].parameters()}], lr=0.01, momentum=0.9
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        use(optimizer)
        for x in BATCHES[:4]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
        results.append([p.detach() for p in model.parameters()])
    assert equal(*results)
