"""Steps of one parameter at a time give a plain step's bits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide.optim as lo
from lowtide.errors import LowtideError
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


class CommonNorm(torch.optim.SGD):
    """Clips all gradients together, inside the step."""

    @torch.no_grad()
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class CountedSteps(torch.optim.Optimizer):
    """Counts its steps in the object, not for each parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / self.steps)


class Outer(torch.optim.Optimizer):
    """Steps with another optimizer, which has the parameters too."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


class Signs(torch.optim.Optimizer):
    """Looks at each parameter by itself."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(average.lerp_(p.grad, 0.1).sign(), alpha=group["lr"])


@pytest.mark.parametrize("way", [lo.step_in_backward, lambda optimizer: lo.lower_state(optimizer, "cpu")])
@pytest.mark.parametrize("kind", [CommonNorm, CountedSteps, Outer])
def test_a_step_that_looks_at_all_parameters_is_refused(kind, way):
    model = make()
    optimizer = kind(model.parameters())
    model(BATCHES[0]).sum().backward()
    before = [(p, p.detach().clone(), p.grad) for p in model.parameters()]
    with pytest.raises(LowtideError) as error:
        way(optimizer)
    assert kind.__name__ in str(error.value)
    assert getattr(optimizer, "steps", 0) == 0
    assert all(torch.equal(p, value) and p.grad is gradient for p, value, gradient in before)


def test_a_step_that_was_replaced_is_refused():
    optimizer = torch.optim.SGD(make().parameters())
    optimizer.step = lambda closure=None: None
    with pytest.raises(LowtideError):
        lo.step_in_backward(optimizer)


@pytest.mark.parametrize("way", ["in backward", "cpu"])
def test_an_unknown_optimizer_whose_step_is_of_each_parameter_gives_the_same_bits(way):
    results = []
    for use in (WAYS["plain"], WAYS[way]):
        model = make()
        optimizer = Signs(model.parameters())
        generator = torch.get_rng_state()
        use(optimizer)
        assert torch.equal(torch.get_rng_state(), generator)
        results.append(train(model, optimizer, BATCHES[:3]))
    assert equal(*results)
