"""``torch.compile`` with lowtide's backend: results of plain PyTorch, within a budget."""

from __future__ import annotations

import copy
import logging
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from lowtide.errors import BudgetError, LowtideError, PlanError
from lowtide.integrations.torch_compile import backend
from lowtide.zoo.gpt2 import GPT2
from tests.models import squares
from tests.refusals import warned

from ..soak import in_soak
from ..tracing.allocator import allocated_peak


@pytest.fixture(autouse=True)
def _registered() -> Generator[None]:
    """The name, also where lowtide is run from its source tree; and graphs of this test alone."""
    torch._dynamo.reset()
    if "lowtide" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(backend, name="lowtide")
    yield
    torch._dynamo.reset()


def chain(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    parts = (
        (nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(True), nn.Linear(64, 16), nn.Dropout(0.1))
        for _ in range(layers)
    )
    return nn.Sequential(*(nn.Sequential(*each) for each in parts))


def results(model: nn.Module, run: Any, x: Tensor, loss: Any = squares) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    value = loss(run, x)
    value.backward()
    found = [value.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
    return [*found, torch.get_rng_state()]


@contextmanager
def refused(kind: type[LowtideError]) -> Generator[Any]:
    with pytest.raises(BackendCompilerFailed) as error:
        yield error
    assert isinstance(error.value.inner_exception, kind)


def smallest(model: nn.Module, x: Tensor, loss: Any = squares) -> int:
    compiled = torch.compile(copy.deepcopy(model), backend="lowtide", options={"budget": 1})
    with refused(BudgetError) as error:
        loss(compiled, x)
    return error.value.inner_exception.smallest_bytes


def test_the_entry_point_names_the_backend() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["torch_dynamo_backends"]["lowtide"].split(":")
    assert getattr(import_module(module), name) is backend


@pytest.mark.parametrize("share", [0.0, 1.0, *in_soak([0.5])])
def test_results_are_the_plain_ones_bit_for_bit_and_the_peak_is_within_the_budget(share: float) -> None:
    model, x = chain(), torch.randn(512, 16)
    plain = allocated_peak(model, squares, x, None)
    least = smallest(model, x)
    budget = int(least + share * max(0, plain - least))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="lowtide", options={"budget": budget}, fullgraph=True)
    for _ in range(2):
        assert all(map(torch.equal, results(model, compiled, x), results(twin, twin, x)))
    around = 3 * x.nbytes  # the loss outside of the graph: squares, their mean and its gradient
    assert allocated_peak(model, lambda _, x: squares(compiled, x), x, None) <= budget + around
    assert least < 0.7 * plain


def test_a_language_model_with_its_loss_inside_keeps_its_budget() -> None:
    torch.manual_seed(0)
    model = GPT2(layers=2, width=32, heads=2, vocab=128, block_size=64)
    ids = torch.randint(0, 128, (4, 64))

    def loss(model: Any, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    def step(ids: Tensor) -> Tensor:
        return loss(model, ids)

    twin = copy.deepcopy(model)
    compiled = torch.compile(step, backend="lowtide", options={"budget": "70%"}, fullgraph=True)
    expected = results(twin, twin, ids, loss)
    assert all(map(torch.equal, results(model, model, ids, lambda _, ids: compiled(ids)), expected))
    peak, plain = (
        allocated_peak(each, run, ids, None) for each, run in ((model, lambda _, ids: compiled(ids)), (twin, loss))
    )
    assert peak <= 0.71 * plain


def test_shapes_share_a_graph_and_keep_their_results() -> None:
    model = chain()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="lowtide", options={"budget": "90%"})
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for count in (64, 48, 32, 56, 48):
        x = torch.randn(count, 16)
        assert all(map(torch.equal, results(model, compiled, x), results(twin, twin, x)))
    assert counters["unique_graphs"] - before == 2


def test_without_gradients_the_graph_runs_as_it_is() -> None:
    model, x = chain().eval(), torch.randn(8, 16)
    compiled = torch.compile(model, backend="lowtide", options={"budget": 1})
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


def test_one_line_says_what_the_budget_covers(caplog: pytest.LogCaptureFixture) -> None:
    squares(torch.compile(chain(1), backend="lowtide", options={"budget": "1GiB"}), torch.randn(8, 16)).backward()
    (record,) = [record for record in caplog.records if record.name == "lowtide"]
    assert record.levelno == logging.WARNING
    assert "optimizer are not seen" in record.getMessage()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (None, PlanError),
        ({"budget": "6GiB", "mode": 1}, PlanError),
        ({"budget": "six"}, BudgetError),
        ({"budget": "0%"}, BudgetError),
    ],
)
def test_options_are_checked(options: Any, kind: type[LowtideError]) -> None:
    compiled = torch.compile(chain(1), backend="lowtide", options=options)
    with refused(kind):
        compiled(torch.randn(8, 16))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks, after a break
def test_a_model_of_several_graphs_is_refused() -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = chain(1), chain(1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    compiled = torch.compile(Breaking(), backend="lowtide", options={"budget": "1GiB"})
    with refused(PlanError):
        squares(compiled, torch.randn(8, 16))


def test_two_forward_passes_before_a_backward_pass_are_warned_about() -> None:
    model, x = chain(1), torch.randn(8, 16)
    compiled = torch.compile(model, backend="lowtide", options={"budget": "1GiB"})
    squares(compiled, x).backward()
    first = squares(compiled, x)
    with warned("backward pass"):
        second = squares(compiled, x)
    (first + second).backward()
