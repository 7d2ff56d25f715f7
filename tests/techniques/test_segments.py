"""Segments of a container: where they may start, what they refuse, how they run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lowtide import zoo
from lowtide.errors import LowtideError, PlanError
from lowtide.planning import estimate_peak, predict
from lowtide.profiling import profile
from lowtide.techniques import Check, Option
from lowtide.techniques.optimal import Optimal
from lowtide.techniques.segments import SegmentConfig
from lowtide.techniques.sqrt import Sqrt, SqrtConfig, checkpoint_segments
from lowtide.workload import Workload
from tests.models import Call, squares

from ..contract.outcomes import assert_agree, assert_restored, run
from ..contract.outcomes import snapshot as take
from ..contract.workloads import Residual, chain
from ..soak import in_soak


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

    with pytest.raises(LowtideError) as refusal:
        checkpoint_segments(Own(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert "Own" in str(refusal.value)


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
    with pytest.raises(PlanError) as refusal:
        Sqrt().apply(work, [Option("sqrt", ("up",), SqrtConfig((((0, 1),),)))])
    assert "ModuleList" in str(refusal.value)
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
        with pytest.raises(LowtideError) as refusal:
            model(x)
        assert "4 blocks" in str(refusal.value)
        del model[4]
        model(x)
    model.append(Residual(4))
    model(x)


BOTH = pytest.mark.parametrize("technique", [Sqrt(), Optimal()], ids=["sqrt", "optimal"])


@BOTH
def test_a_model_without_blocks_has_no_options(technique: Sqrt | Optimal) -> None:
    assert technique.options(profile(zoo.small("lstm"), fake=True)) == []


@BOTH
@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        *((name, None) for name in ("gpt2", "unet", *in_soak(["resnet18", "densenet121", "roberta-base"]))),
        *((name, torch.bfloat16) for name in ("resnet18", *in_soak(["gpt2", "densenet121", "roberta-base", "unet"]))),
    ],
)
def test_zoo_models_are_bitwise(technique: Sqrt | Optimal, name: str, autocast: torch.dtype | None) -> None:
    """In the middle of the options, or with the deepest one."""
    work = replace(zoo.small(name), autocast=autocast)
    options = technique.options(profile(work, fake=True))
    deepest = max(options, key=lambda option: option.config_as(SegmentConfig).levels)
    expected = run(work)
    with technique.apply(work, [deepest if autocast is None else options[len(options) // 2]]):
        assert_agree(run(work), expected, Check.EXACT)


@pytest.mark.parametrize(
    ("technique", "name"),
    [
        (Optimal(), "chain"),
        (Sqrt(), "gpt2"),
        *in_soak((technique, name) for technique in (Sqrt(), Optimal()) for name in ("resnet18", "unet", "gpt2")),
    ],
)
def test_estimated_bytes_and_seconds_are_those_of_the_ops_that_run(technique: Sqrt | Optimal, name: str) -> None:
    sizes = {"layers": 4, "vocab": 64, "seq": 16} if name == "gpt2" else {}
    work = chain(12, batch=64) if name == "chain" else zoo.small(name, **sizes)
    plain = profile(work, fake=True)
    options = technique.options(plain)
    deepest = max(options, key=lambda option: option.config_as(SegmentConfig).levels)
    for option in (options[1], deepest):
        price, traced = technique.price(option, plain), predict(work, [option], plain)
        assert estimate_peak(plain.graph, [price]) == pytest.approx(traced.peak_bytes, rel=0.01), option
        if name == "chain":
            again = [op for op in traced.graph.ops if op.recompute and "clone" not in op.name]  # of running statistics
            assert price.seconds == pytest.approx(sum(op.seconds for op in again), rel=1e-6), option


@BOTH
def test_blocks_with_a_generator_of_their_own_stay_as_they_are(technique: Sqrt | Optimal) -> None:
    """Around them the plan is bitwise."""
    own = torch.Generator()

    def drawing(generator: torch.Generator | None) -> Call:
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        return Call(lambda m, x: m.layers(x).tanh() * (torch.rand(x.shape, generator=generator) > 0.5), layers=layers)

    torch.manual_seed(0)
    model = nn.Sequential(*(drawing(own if i in (2, 5) else None) for i in range(8)))
    work = Workload(model, squares, torch.randn(16, 8))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        own.manual_seed(1)
        torch.manual_seed(2)
        work.compute_loss().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients()
    options = technique.options(profile(work, fake=True))
    assert options
    for option in options[:: max(1, len(options) // 8)]:
        with technique.apply(work, [option]):
            assert all(map(torch.equal, gradients(), expected)), option
