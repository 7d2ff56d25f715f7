"""Each predicate knows torch's own error, and no other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowtide.compat import messages
from lowtide.compat.fake import FakeTensorMode

PREDICATES = [
    messages.refuses_saved_hooks,
    messages.is_about_inference,
    messages.is_about_writes,
    messages.is_about_devices,
]


def under_hooks() -> None:
    with torch.autograd.graph.save_on_cpu():
        torch.func.grad(torch.sum)(torch.ones(2))


def saving_an_inference_tensor() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    (x * torch.ones(2, requires_grad=True)).sum().backward()


def writing_to_an_inference_tensor() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    x.add_(1)


def reading_what_was_written() -> None:
    y = torch.ones(2, requires_grad=True).exp()
    y.add_(1)
    y.sum().backward()


def adding_across_devices() -> None:
    with FakeTensorMode():
        torch.add(torch.ones(2, device="cpu"), torch.ones(2, device="meta"))


@pytest.mark.parametrize(
    ("fail", "knows"),
    [
        (under_hooks, messages.refuses_saved_hooks),
        (saving_an_inference_tensor, messages.is_about_inference),
        (writing_to_an_inference_tensor, messages.is_about_inference),
        (reading_what_was_written, messages.is_about_writes),
        (adding_across_devices, messages.is_about_devices),
        (lambda: torch.add(torch.ones(2), torch.ones(3)), None),
    ],
)
def test_each_predicate_knows_its_error_alone(fail: Callable[[], Any], knows: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        fail()
    assert [each for each in PREDICATES if each(caught.value)] == ([knows] if knows else [])
