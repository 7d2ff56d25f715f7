"""Segments of a container: where they may start, what they refuse, how they run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowtide import zoo
from lowtide.errors import LowtideError, PlanError
from lowtide.techniques import Check, Option
from lowtide.techniques.sqrt import Sqrt, SqrtConfig, checkpoint_segments
from lowtide.workload import Workload
from tests.contract.workloads import chain

from ..contract.outcomes import assert_agree, assert_restored, run
from ..contract.outcomes import snapshot as take
from ..contract.workloads import Residual


def test_in_place_layers_stay_with_the_layer_before() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True))]
    model = nn.Sequential(*layers)
    work = Workload(model, lambda m, x: m(x).sum(), torch.randn(2, 3, 4, 4))
    expected = run(work)
    with checkpoint_segments(model, 4):
        assert model.forward.tree == ((0, 1), (2, 3), (4, 5), (6, 7))
        assert_agree(run(work), expected, Check.EXACT)


def test_a_container_with_its_own_forward_is_refused() -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    with pytest.raises(LowtideError, match="Own with its own forward"):
        checkpoint_segments(Own(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_hooks_on_the_container_still_run() -> None:
    model = chain(4).model
    seen: list[str] = []
    model.register_forward_hook(lambda *_: seen.append("hook"))
    with checkpoint_segments(model, 2):
        model(torch.randn(2, 4, 3, 3))
    assert seen == ["hook"]


@pytest.mark.parametrize(
    "option",
    [
        Option("sqrt", ("no.such",), SqrtConfig((((0, 1),),))),
        Option("sqrt", ("",), SqrtConfig((((0, 9),),))),
        Option("sqrt", ("",), SqrtConfig((((1, 0),),))),
        Option("sqrt", ("",), SqrtConfig((((0, 2),),))),
        Option("sqrt", ("",)),
    ],
)
def test_an_option_that_is_not_of_this_model_is_refused(option: Option) -> None:
    work = chain(4)
    before = take(work.model)
    with pytest.raises(PlanError):
        Sqrt().apply(work, [option])
    assert_restored(work.model, before)


def test_blocks_in_a_list_are_recomputed_one_by_one_only() -> None:
    work = zoo.small("unet")
    with pytest.raises(PlanError, match="one by one"):
        Sqrt().apply(work, [Option("sqrt", ("up",), SqrtConfig((((0, 1),),)))])
    before = take(work.model)
    expected = run(work)
    with Sqrt().apply(work, [Option("sqrt", ("up",), SqrtConfig((((0,), (2,)),)))]):
        assert_agree(run(work), expected, Check.EXACT)
    assert_restored(work.model, before)


def test_blocks_added_after_the_plan_are_noticed() -> None:
    model = chain(4).model
    x = torch.randn(2, 4, 3, 3)
    with checkpoint_segments(model, 2):
        model.append(Residual(4))
        with pytest.raises(LowtideError, match=r"with 4 blocks and now has 5.*undo\(\).*plan again"):
            model(x)
        del model[4]
        model(x)
    model.append(Residual(4))
    model(x)
