"""Small steps for the tests of microbatch, and how their results are compared."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowtide import Workload
from lowtide.techniques.microbatch.facts import Sizes
from lowtide.techniques.microbatch.proof import Proof, conclude, find_facts, prove
from lowtide.tracing.capture.forward import capture_forward

Outcome = dict[str, Tensor]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The mean over samples, or over tokens."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    """The same over what a mask says, or else over targets that are not ignored."""
    x, y, *masks = batch
    mask = masks[0] if masks else (y >= 0).to(x.dtype)
    each = F.cross_entropy(model(x).flatten(0, -2), y.flatten().clamp(min=0), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum()


class Scale:
    """A mean loss, scaled by what it holds; ``count`` changes that."""

    def __init__(self, factor: Any = 0, count: Callable[[Any], Any] = lambda n: n + 1) -> None:
        self.factor, self.count = factor, count

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.factor = self.count(self.factor)
        return model(batch[0]).square().mean() * self.factor


def mlp(
    samples: int = 7,
    *,
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy,
    targets: Tensor | None = None,
) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    drawn = torch.randn(samples, 5).double(), torch.randint(3, (samples,))
    return Workload(model, loss, drawn if targets is None else (drawn[0], targets))


def step(work: Workload) -> Outcome:
    """Run a step from a fixed seed and return its results; restore buffers."""
    buffers = {name: value.clone() for name, value in work.model.named_buffers()}
    torch.manual_seed(1)
    work.model.zero_grad()
    loss = work.compute_loss()
    loss.backward()
    actual = {"loss": loss.detach()}
    actual |= {f"{name}.grad": p.grad.clone() for name, p in work.model.named_parameters() if p.grad is not None}
    for name, value in work.model.named_buffers():
        actual[name] = value.clone()
        value.copy_(buffers[name])
    work.model.zero_grad()
    return actual


def assert_same(actual: Outcome, expected: Outcome, rtol: float = 1e-12) -> None:
    """In the norm of each tensor; what is 0 but for rounding is measured by the largest gradient."""
    assert actual.keys() == expected.keys()
    largest = max(float(value.double().norm()) for name, value in expected.items() if name.endswith(".grad"))
    for name, value in expected.items():
        error = float((actual[name].double() - value.double()).norm())
        assert error <= rtol * max(float(value.double().norm()), largest * 1e-3), name


@contextmanager
def names(expected: AbstractContextManager[Any], *words: str) -> Generator[None]:
    """The one error or warning that pytest expects names these arguments, numbers or layers."""
    with expected as caught:
        yield
    messages = [each.message for each in caught] if isinstance(caught, pytest.WarningsRecorder) else [caught.value]
    (message,) = map(str, messages)
    assert [word for word in words if word not in message] == []


def without_randomness(work: Workload) -> Workload:
    for module in work.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            vars(module)["dropout"] = 0.0
    return work


def in_float64(work: Workload) -> Workload:
    batch = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, work.batch)
    return replace(work, model=work.model.double(), batch=batch, optimizer=None)


def normed(*layers: nn.Module, samples: int = 7) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * 4 * 4, 5)).double()
    x = torch.randn(samples, 3, 4, 4).double() + torch.arange(samples).double()[:, None, None, None]
    return Workload(model, cross_entropy, (x, torch.randint(5, (samples,))))


def texts() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(6, 5, 4), torch.randint(4, (6, 5)), torch.ones(6, 5)


IGNORED = torch.tensor([1, -100, -100, 2, 0, -100, 1, 2])


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.randint(4, (6,))


def proofs(losses: dict[str, Callable[[Any, Any], Tensor]], batch: Any, *layers: nn.Module) -> dict[str, Proof]:
    """Proofs of many losses from one capture, of their sum: the terms are the operands of its last additions."""

    def total(model: nn.Module, batch: Any) -> Tensor:
        return reduce(torch.add, [loss(model, batch) for loss in losses.values()])

    torch.manual_seed(0)
    work = Workload(nn.Sequential(nn.Linear(4, 4), *layers), total, batch)
    halves = replace(work, batch=pytree.tree_map_only(Tensor, lambda t: t[: len(t) // 2], batch))
    samples = len(batch[0])
    captured = capture_forward(work)
    facts = find_facts(captured, capture_forward(halves), Sizes(samples, samples // 2))
    reduced: dict[str, Proof] = {}
    rest: Any = captured.loss
    for name in reversed(list(losses)):
        rest, term = rest.args[:2] if name != next(iter(losses)) else (None, rest)
        reduced[name] = conclude(term, facts)
    return reduced


def proof(loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> Proof:
    torch.manual_seed(0)
    return prove(Workload(nn.Sequential(nn.Linear(4, 4)), loss, batch))
