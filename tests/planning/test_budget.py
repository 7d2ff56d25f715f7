from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide import zoo
from lowtide.engines import plan
from lowtide.errors import BudgetError
from lowtide.planning import apply_options, resolve_budget
from lowtide.profiling import Profile, profile
from lowtide.techniques import Fidelity
from tests.refusals import refused

from ..contract.outcomes import assert_restored, snapshot
from ..engines.planned import without_advice
from ..soak import count
from .steps import chain

# -- what a budget is ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("6GiB", 6 * 2**30),
        ("800MB", 800 * 10**6),
        (12345, 12345),
        ("60%", 600),
        (" 12.5 % ", 125),
        ("150%", 1500),
        (1.5e5, 150_000),
        ("1.5e5", 150_000),
        (np.int64(150_000), 150_000),
    ],
)
def test_a_budget_is_read_as_people_write_it(written: float | str, size: int) -> None:
    assert resolve_budget(written, 1000, "cpu").bytes == size


@pytest.mark.parametrize(
    "written",
    [
        "much", "%", "x%", "-5%", "0%", "nan%", "inf%", "1e300%", "9" * 400, 10**400, "6 parsecs", -3,
        True, None, float("nan"), float("inf"), b"1", "1e-3",
    ],
)  # fmt: skip
def test_what_is_no_budget_is_refused(written: int | str) -> None:
    named = "2⁶³" if written == 10**400 else repr(written)
    with refused(named, kind=BudgetError):
        resolve_budget(written, 1000, "cpu")


def test_device_is_an_error_on_a_cpu() -> None:
    with refused("device", kind=BudgetError):
        resolve_budget("device", 1000, "cpu")


def test_device_leaves_room_for_the_context_and_fragmentation_and_says_so() -> None:
    resolved = resolve_budget("device", 1000, "h200")
    assert 0.9 * 139 * 2**30 < resolved.bytes < 139 * 2**30
    assert "CUDA context" in resolved.said
    assert "fragmentation" in resolved.said


def test_device_is_what_the_gpu_has_free_and_what_this_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100)
    assert resolve_budget("device", 1, "cuda").bytes == 700 - 21


# -- what a plan is ------------------------------------------------------------------------------------


def test_nothing_is_changed_where_the_plain_step_fits(plain: Profile) -> None:
    chosen = plan(chain(), "100%", profile=plain, tune=False)
    assert chosen.choices == ()
    assert chosen.fidelity is Fidelity.BITWISE
    assert (chosen.peak_bytes, chosen.seconds) == (plain.peak_bytes, plain.seconds)


def test_the_measured_peak_is_the_predicted_one_and_within_the_budget() -> None:
    work = chain()
    before = profile(work)
    for share in ("90%", "60%"):
        chosen = plan(work, share, profile=before, engine="eager", tune=False)
        with apply_options(work, chosen.options) as applied:
            measured = profile(applied.work)
        assert measured.storage_peak_bytes == chosen.storage_peak_bytes
        assert measured.peak_bytes <= chosen.budget_bytes
        assert chosen.baseline.peak_bytes == before.peak_bytes


@settings(max_examples=count(2, soak=20), deadline=None)
@given(shares=st.tuples(st.integers(40, 110), st.integers(40, 110)))
def test_a_larger_budget_is_never_predicted_slower(plain: Profile, shares: tuple[int, int]) -> None:
    seconds = []
    for share in sorted(shares):
        try:
            with without_advice():
                seconds.append(plan(chain(), f"{share}%", profile=plain, tune=False).seconds)
        except BudgetError:
            seconds.append(float("inf"))
    assert seconds[1] <= seconds[0]


def test_an_impossible_budget_names_the_smallest_one_and_that_one_works(plain: Profile) -> None:
    work = chain()
    with pytest.raises(BudgetError) as error:
        plan(work, "10%", profile=plain, tune=False)
    smallest = error.value.smallest_bytes
    assert smallest
    assert f"{smallest} bytes" in str(error.value)
    assert plan(work, smallest, profile=plain, tune=False).peak_bytes == smallest
    with without_advice(), pytest.raises(BudgetError):
        plan(work, smallest - 1, profile=plain, tune=False)


def test_planning_changes_nothing_and_leaves_gradients_as_they_are() -> None:
    work = replace(chain(2), batch=torch.randn(64, 16))
    work.compute_loss().backward()
    gradients = [(p.grad, p.grad.clone()) for p in work.model.parameters() if p.grad is not None]
    before, state = snapshot(work.model), torch.get_rng_state()
    plan(work, "80%", tune=False)
    with pytest.raises(BudgetError):
        plan(work, 1, engine="eager", allow="changed", tune=False)
    assert_restored(work.model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert work.optimizer is not None
    assert not work.optimizer.state
    now = [p.grad for p in work.model.parameters()]
    assert all(grad is held and torch.equal(grad, value) for grad, (held, value) in zip(now, gradients, strict=True))


def test_a_meta_model_is_planned_for_a_gpu_that_is_not_here() -> None:
    sizes = {"layers": 3, "width": 64, "heads": 2, "vocab": 100}
    work = zoo.workload("gpt2", batch=8, seq=128, optimizer="none", device="meta", **sizes)
    chosen = plan(work, "91%", device="h200", tune=False)
    assert chosen.device == "h200"
    assert chosen.peak_bytes <= chosen.budget_bytes
