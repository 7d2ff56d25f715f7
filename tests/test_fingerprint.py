"""A plan and a profile are of one step: what changes its memory makes another, what does not does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.batches import tensors
from lowtide.fingerprint import Fingerprint
from lowtide.workload import Workload


def of(*layers: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None) -> Fingerprint:
    model = nn.Sequential(nn.Linear(4, 4), *layers)
    work = Workload(model, lambda m, x: m(x).sum(), torch.zeros(2, 4), optimizer and optimizer(model))
    return Fingerprint.of(work)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([nn.GELU()], [nn.Sigmoid()]),
        ([nn.GELU()], [nn.GELU(), nn.Sigmoid(), nn.Tanh()]),
        ([nn.ReLU()], [nn.ReLU(inplace=True)]),
        ([nn.AvgPool1d(3, 1, 1)], [nn.AvgPool1d(3, 2, 1)]),
    ],
)
def test_modules_without_parameters_tell_models_apart(one: list[nn.Module], other: list[nn.Module]) -> None:
    assert "its modules are of other types" in of(*one).difference(of(*other), was="planned")
    assert of(*one).difference(of(*one), was="planned") == ""


def test_what_fsdp2_makes_of_a_class_is_the_same_model() -> None:
    class FSDPModule:
        pass

    class FSDPGELU(FSDPModule, nn.GELU):
        pass

    assert of(FSDPGELU()) == of(nn.GELU())


def test_a_text_that_a_module_of_ones_own_has_of_itself_is_not_looked_at() -> None:
    class Counted(nn.Module):
        steps = 0

        def extra_repr(self) -> str:
            return f"steps={self.steps}"

    one, other = Counted(), Counted()
    other.steps = 7
    assert of(one) == of(other)


def sgd(**knobs: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.1, **knobs})


@pytest.mark.parametrize("knobs", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"foreach": True}, {"foreach": False}])
def test_a_knob_that_is_on_makes_another_optimizer(knobs: dict[str, Any]) -> None:
    said = of(optimizer=sgd()).difference(of(optimizer=sgd(**knobs)), was="planned")
    assert said.startswith("another optimizer: SGD(20 numbers) was planned, SGD(20 numbers: ")
    assert next(iter(knobs)) in said


def test_an_optimizer_of_a_part_of_the_model_is_another() -> None:
    said = of(optimizer=sgd()).difference(of(optimizer=lambda m: torch.optim.SGD([m[0].bias])), was="planned")
    assert said.endswith("SGD(20 numbers) was planned, SGD(4 numbers) is given")


def test_rates_schedulers_and_groups_of_the_same_knobs_do_not_matter() -> None:
    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [model[0].weight], "lr": 0.0}, {"params": [model[0].bias], "name": "biases"}]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.5), weight_decay=0.2)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=9, cycle_momentum=True)
        return optimizer

    assert of(optimizer=scheduled) == of(optimizer=lambda m: torch.optim.AdamW(m.parameters()))


@dataclass
class Pair:
    x: Tensor
    label: str


class Nested:
    def __init__(self) -> None:
        self.pair = Pair(torch.zeros(3), "a")
        self.itself = self
        self.model = nn.Linear(2, 2)


def test_tensors_of_a_batch_are_found_in_objects_and_not_in_modules() -> None:
    shapes = [list(t.shape) for t in tensors([torch.zeros(1), Pair(torch.zeros(2), "b"), {"n": Nested()}, 4])]
    assert shapes == [[1], [2], [3]]
