"""The error for a budget that no plan fits."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.engines import eager as eager_module
from lowtide.engines import plan
from lowtide.errors import BudgetError
from lowtide.planning import graph_candidates
from lowtide.planning import search as search_module
from lowtide.sizes import format_size, parse_size
from lowtide.workload import Workload
from tests.models import blocks, squares

from ..engines.counting import count_calls
from ..optim.test_one_parameter import Signs


def layers() -> Workload:
    """A stack whose activations weigh more than its parameters."""
    model = blocks(3, 16, nn.GELU)
    optimizer = torch.optim.Adam(model.parameters())
    return Workload(model, squares, torch.randn(128, 16), optimizer)


def refusal(work: Workload, budget: str, **options: Any) -> BudgetError:
    with pytest.raises(BudgetError) as error:
        plan(work, budget, tune=False, **options)
    return error.value


def test_a_refusal_traces_few_options_and_names_who_holds_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = count_calls(monkeypatch, eager_module, "predict")
    lines = str(refusal(layers(), "14%")).splitlines()
    assert len(lines) <= 3
    assert all(word in lines[1] for word in ("parameters", "gradients", "optimizer state"))
    assert len(traced) <= 4 * search_module._TRACED  # alone and combined, as permitted and with all allowed


def test_a_refusal_below_parameters_and_gradients_captures_nothing_and_its_budget_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures = count_calls(monkeypatch, graph_candidates, "capture_and_compare")
    work = layers()
    refused = refusal(work, "1%")
    assert not captures
    assert "at most" in str(refused)  # captured, the step may have a smaller plan
    assert refused.smallest_bytes
    assert plan(work, refused.smallest_bytes, tune=False).peak_bytes <= refused.smallest_bytes


def test_tips_of_torch_over_many_lines_are_not_part_of_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("a different number of tensors was saved\nTip 1\nTip 2")

    monkeypatch.setattr(eager_module, "predict", failing)
    message = str(refusal(layers(), "80%", engine="eager"))
    assert "tensors was saved" in message
    assert "Tip" not in message


def test_no_share_of_the_smallest_plan_is_larger_than_it() -> None:
    with torch.device("meta"):
        model, x = blocks(6, 128, nn.Identity), torch.randn(8, 128)
    refused = refusal(Workload(model, squares, x, Signs(model.parameters())), "90%", device="h200")
    shares = re.findall(r"[0-9.]+ [KMG]iB", str(refused).splitlines()[1])
    assert refused.smallest_bytes
    assert max(map(parse_size, shares)) <= parse_size(format_size(refused.smallest_bytes))


@pytest.mark.parametrize(("width", "batch", "room"), [(16, 256, 0), (256, 4096, 2 * 2**20)])
def test_the_budget_named_for_a_gpu_has_room_for_large_blocks_but_not_for_the_plain_step(
    width: int, batch: int, room: int
) -> None:
    model = blocks(4, width, nn.GELU)
    work = Workload(model, squares, torch.randn(batch, width), torch.optim.Adam(model.parameters()))
    refused = refusal(work, "1%", engine="eager", device="h200")
    assert refused.smallest_bytes
    for budget in (refused.smallest_bytes, refused.smallest_bytes - room):
        assert not plan(work, budget, engine="eager", device="h200", tune=False).is_plain
