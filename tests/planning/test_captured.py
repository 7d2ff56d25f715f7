"""The class of a captured step is what its results have earned."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload
from lowtide.errors import TraceError
from lowtide.planning.captured import capture_and_compare
from lowtide.profiling import profile
from lowtide.techniques import Fidelity
from tests.models import squares
from tests.refusals import refused

NOISE = itertools.count(1)  # outside of the step, so that nothing restores it


class Net(nn.Module):
    """Statistics, random numbers, and an end that Dynamo may see otherwise."""

    def __init__(self, end: str = "same") -> None:
        super().__init__()
        self.end = end
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)))
        captured = torch.compiler.is_compiling()
        if self.end == "product":  # whose formula looks at values
            return self.last(x).sigmoid().prod(1)
        if self.end == "branch" and captured:  # the same sum in another order
            left, right = x[:, :3] @ self.last.weight[:, :3].t(), x[:, 3:] @ self.last.weight[:, 3:].t()
            return left + right + self.last.bias
        if self.end == "scaled" and captured:
            return self.last(x) * 1.01
        if self.end == "drawn for nothing":
            torch.rand_like(x)
        if self.end == "noise" and not captured:
            x = x * (1 + 1e-6 * next(NOISE))
        if self.end == "masked" and captured:
            return self.last(self.drop(x))
        return self.last(x)


def work_of(end: str, dtype: torch.dtype = torch.float32) -> Workload:
    torch.manual_seed(0)
    model = Net(end).to(dtype)
    return Workload(model, squares, torch.randn(64, 8).to(dtype))


@pytest.mark.parametrize(
    ("end", "fidelity"), [("same", Fidelity.BITWISE), ("product", Fidelity.ROUNDOFF), ("branch", Fidelity.ROUNDOFF)]
)
def test_a_capture_is_bitwise_only_where_its_results_are(end: str, fidelity: Fidelity) -> None:
    found = capture_and_compare(work_of(end))
    assert found.fidelity is fidelity
    assert ("rounds otherwise" in found.note) == (fidelity is Fidelity.ROUNDOFF)


def test_a_capture_that_a_noisy_step_cannot_be_compared_with_promises_no_bits() -> None:
    found = capture_and_compare(work_of("noise"))
    assert found.fidelity is Fidelity.ROUNDOFF
    assert "differs from itself" in found.note


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_in_any_precision_are_the_plain_steps(dtype: torch.dtype) -> None:
    assert capture_and_compare(work_of("same", dtype)).fidelity is Fidelity.BITWISE


@pytest.mark.parametrize(("end", "what"), [("scaled", "loss, gradients"), ("masked", "generators")])
def test_a_capture_with_other_results_is_refused(end: str, what: str) -> None:
    with refused(what, kind=TraceError):
        capture_and_compare(work_of(end))


def test_draws_that_capture_leaves_out_are_named_first() -> None:
    work = work_of("drawn for nothing")
    with refused("random", kind=TraceError):
        capture_and_compare(work, profile(work))


def test_hooks_on_gradients_are_no_part_of_the_comparison() -> None:
    work = work_of("same")
    work.model.first.weight.register_hook(lambda gradient: 2 * gradient)
    work.model.last.weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    assert capture_and_compare(work).fidelity is Fidelity.BITWISE


def test_a_comparison_changes_nothing() -> None:
    work = work_of("branch")
    before, state = copy.deepcopy(work.model.state_dict()), torch.get_rng_state()
    capture_and_compare(work)
    assert all(map(torch.equal, work.model.state_dict().values(), before.values()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in work.model.parameters())
