"""Optimal schedules as nested checkpoints, against plain PyTorch and against what a schedule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowtide.chains import Action, Chain, OptimalSchedules, Schedule, keep_all, recursive, simulate
from lowtide.engines import plan
from lowtide.errors import LowtideError, PlanError
from lowtide.planning import estimate_peak
from lowtide.profiling import Profile, profile
from lowtide.techniques import Check, Option
from lowtide.techniques.block_chains import leaves
from lowtide.techniques.optimal import Optimal, checkpoint_schedule
from lowtide.techniques.sqrt import Sqrt
from lowtide.workload import Workload
from tests.models import Call, squares
from tests.refusals import refused

from ..contract.outcomes import assert_agree, run
from ..contract.workloads import chain


@st.composite
def schedules(draw: st.DrawFn, most: int = 7) -> Schedule:
    """Draw schedules of chains with any sizes and seconds, at any budget."""
    n = draw(st.integers(1, most))
    numbers = st.lists(st.integers(1, 9), min_size=n, max_size=n)
    values = [1, *draw(numbers)]
    saved = [value + more for value, more in zip(values[1:], draw(numbers), strict=True)]
    drawn = Chain(draw(numbers), [1] * n, values, saved)
    plans = OptimalSchedules(drawn)
    return plans.schedule(draw(st.integers(plans.smallest_bytes, simulate(drawn, keep_all(drawn)).peak_bytes)))


# -- any schedule runs -----------------------------------------------------------------------------------


class Logged(torch.autograd.Function):
    """Writes down which stage runs, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: int, log: list[str]) -> Tensor:
        ctx.stage, ctx.log = stage, log
        log.append(f"F{stage + 1}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.log.append(f"B{ctx.stage + 1}")
        return gradients[0], None, None


class Stage(nn.Module):
    """Its last op saves its result, so that no run of it can stop before its end."""

    def __init__(self, stage: int, log: list[str]) -> None:
        super().__init__()
        self.stage, self.log = stage, log

    def forward(self, x: Tensor) -> Tensor:
        return Logged.apply(x.sin(), self.stage, self.log).exp()


@settings(max_examples=40, deadline=None)
@given(schedule=schedules())
def test_stages_run_in_the_order_of_the_schedule(schedule: Schedule) -> None:
    log: list[str] = []
    model = nn.Sequential(*(Stage(i, log) for i in range(len(schedule.runs))))
    with checkpoint_schedule(model, schedule):
        model(torch.zeros(3, requires_grad=True)).sum().backward()
    assert log == [f"{'B' if op.kind is Action.BACKWARD else 'F'}{op.stage + 1}" for op in schedule.operations]


@settings(max_examples=15, deadline=None)
@given(schedule=schedules())
def test_any_schedule_is_bitwise(schedule: Schedule) -> None:
    work = chain(len(schedule.runs))
    expected = run(work, steps=2)
    with checkpoint_schedule(work.model, schedule):
        assert_agree(run(work, steps=2), expected, Check.EXACT)


def test_a_schedule_of_another_chain_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    with pytest.raises(LowtideError) as refusal:
        checkpoint_schedule(model, recursive(Chain.uniform(4)))
    assert "4 stages" in str(refusal.value)
    with refused("B1", kind=PlanError):
        checkpoint_schedule(model, Schedule.parse("F1e, F2e, F3e, B3, B2"))
    assert "forward" not in model.__dict__


# -- as a technique --------------------------------------------------------------------------------------


def priced(profiled: Profile, of: Any) -> list[tuple[int, float, Option]]:
    """Estimated peak and seconds of every option."""
    prices = [(option, of.price(option, profiled)) for option in of.options(profiled)]
    return [(estimate_peak(profiled.graph, [price]), price.seconds, option) for option, price in prices]


def uneven() -> Workload:
    """Blocks that are cheap to run and large to keep, or the other way round."""

    def dear(m: Any, x: Tensor) -> Tensor:
        return m.mix(x @ m.mix.weight.detach() @ m.mix.weight.detach() @ m.mix.weight.detach())

    def cheap(m: Any, x: Tensor) -> Tensor:
        return m.mix(x).sin().exp().tanh().sigmoid()

    torch.manual_seed(0)
    model = nn.Sequential(*(Call(cheap if i % 3 else dear, mix=nn.Linear(64, 64)) for i in range(12)))
    return Workload(model, squares, torch.randn(256, 64), name="uneven")


def test_the_smallest_options_are_smaller_than_those_of_segments_and_none_is_slower() -> None:
    plain = profile(uneven(), fake=True)
    ours, theirs = priced(plain, Optimal()), priced(plain, Sqrt())
    assert min(ours)[0] < min(theirs)[0]
    for peak, seconds, option in theirs:
        # Budgets are not offered to the byte: what is a hundredth smaller or larger counts as well.
        best = min((s for p, s, _ in ours if p <= 1.01 * peak), default=float("inf"))
        assert best <= 1.01 * seconds, option
    gained = [min((s for p, s, _ in ours if p <= peak), default=float("inf")) / seconds for peak, seconds, _ in theirs]
    assert min(gained) < 0.8


def test_a_larger_budget_is_never_predicted_slower() -> None:
    work = chain(6, batch=64)
    plain = profile(work, fake=True)
    smallest = min(priced(plain, Optimal()))[0]
    shares = torch.linspace(1.02 * smallest / plain.peak_bytes, 1, 5).tolist()
    plans = [plan(work, int(share * plain.peak_bytes), profile=plain, engine="eager", tune=False) for share in shares]
    seconds = [each.seconds for each in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) > 3
    assert all(each.peak_bytes <= each.budget_bytes for each in plans)


def test_there_are_few_options_also_of_deep_models() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    work = Workload(model, lambda m, x: m(x).sum(), torch.randn(99, 2))
    options = Optimal().options(profile(work, fake=True))
    assert 5 < len(options) <= 30
    assert all(list(leaves(t)) == sorted(set(leaves(t))) for o in options for t in o.config.trees)
    assert len({option.config.trees for option in options}) == len(options)
