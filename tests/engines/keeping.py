"""Models that keep tensors from one step to the next."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import Workload
from tests.models import blocks, squares

SHAPE = 1024, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(3, 64)
        self.kept: Any = None


class Table(Model):
    """Made in the first step, as of positions."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos()
        return self.layers(x) * self.kept


class Features(Model):
    """Left by the last step, to be looked at."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        self.kept = x.detach()
        return x


class Memory(Model):
    """Each step reads what the one before left."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        x = x if self.kept is None else x + 0.1 * self.kept
        self.kept = x.detach().exp()
        return x


class Queue(Model):
    """A buffer that is a view after the first step, and that backward reads when it is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(*SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        similar = x @ self.queue.T[:, :16]
        self.queue = torch.cat([x.detach()[:256], self.queue])[: SHAPE[0]]
        return similar


class Nested(Model):
    """A table for each size, further inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"cos": {}}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.kept["cos"]:
            self.kept["cos"][len(x)] = (torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos(),)
        return self.layers(x) * self.kept["cos"][len(x)][0]


class Last(Model):
    """The features of the last steps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = deque(maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        self.kept.append(x.detach().repeat(1, 4).cos())
        return x


def workload(model: nn.Module) -> Workload:
    return Workload(model, squares, torch.randn(*SHAPE), torch.optim.SGD(model.parameters(), lr=0.1))


def held(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for module in model.modules() for name, value in vars(module).items()]


MODELS = [Table, Features, Memory, Queue, Nested, Last]
