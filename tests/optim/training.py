"""A small model, batches for it, optimizers, and the changes of optimizers that tests share."""

import io

import torch
from torch import nn

import lowtide.optim as lo


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)


BATCHES = [torch.randn(16, 64, generator=torch.Generator().manual_seed(i)) for i in range(12)]
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    "AdamW8bit": lambda ps: lo.AdamW8bit(ps, lr=1e-2),
    "AdamW8bit stochastic": lambda ps: lo.AdamW8bit(ps, lr=1e-2, rounding="stochastic"),
}
WAYS = {
    "plain": lambda o: None,
    "in backward": lo.step_in_backward,
    "cpu": lambda o: lo.lower_state(o, "cpu"),
    "stochastic": lambda o: lo.round_updates(o, "stochastic"),
    "kahan": lambda o: lo.round_updates(o, "kahan"),
    "16bit gradients": lambda o: lo.store_gradients(o, "16bit"),
    "8bit gradients": lambda o: lo.store_gradients(o, "8bit"),
    "8bit": lambda o: lo.lower_state(o, "8bit"),
}


def train(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def equal(ours, expected):
    return all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def started(name="AdamW", *ways, dtype=torch.float32):
    """A model and its optimizer, changed in these ways."""
    model = make(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    for way in ways:
        WAYS[way](optimizer)
    return model, optimizer


def resumes(start, *, saver=None, weights_only=True, then=lambda optimizer: None):
    """Whether a run that is saved after three steps and loaded by another process goes on bit for bit.

    ``start()`` gives a model and its optimizer; ``saver()`` those of the first run, which ``then`` changes.
    """
    model, optimizer = (saver or start)()
    train(model, optimizer, BATCHES[:3])
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    then(optimizer)
    expected = train(model, optimizer, BATCHES[3:6])
    file.seek(0)
    saved = torch.load(file, weights_only=weights_only)
    model, optimizer = start()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return equal(train(model, optimizer, BATCHES[3:6]), expected)
