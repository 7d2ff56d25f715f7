from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowtide import Workload, zoo
from lowtide.engines import plan
from lowtide.errors import BudgetError, PlanError
from lowtide.planning import apply_options, baseline, resolve_budget
from lowtide.planning import search as search_module
from lowtide.planning.prediction import predict
from lowtide.profiling import Profile, profile
from lowtide.techniques import Fidelity, register
from lowtide.techniques.microbatch.technique import Microbatch
from lowtide.techniques.registry import techniques

from ..contract.outcomes import assert_restored, snapshot
from ..soak import count
from .steps import Loose, chain


@pytest.fixture(scope="module")
def plain() -> Profile:
    return profile(chain(), fake=True)


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
    with pytest.raises(BudgetError, match=r"Write for example|negative"):
        resolve_budget(written, 1000, "cpu")


def test_device_is_an_error_on_a_cpu() -> None:
    with pytest.raises(BudgetError, match="about a GPU"):
        resolve_budget("device", 1000, "cpu")


def test_device_leaves_room_for_the_context_and_fragmentation_and_says_so() -> None:
    found = resolve_budget("device", 1000, "h200")
    assert 0.9 * 139 * 2**30 < found.bytes < 139 * 2**30
    assert "CUDA context" in found.said
    assert "fragmentation" in found.said


def test_device_is_what_the_gpu_has_free_and_what_this_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100)
    assert resolve_budget("device", 1, "cuda").bytes == 700 - 21


# -- what a plan is ------------------------------------------------------------------------------------


def test_nothing_is_changed_where_the_plain_step_fits(plain: Profile) -> None:
    found = plan(chain(), "100%", profile=plain, tune=False)
    assert found.choices == ()
    assert found.fidelity is Fidelity.BITWISE
    assert (found.peak_bytes, found.seconds) == (plain.peak_bytes, plain.seconds)


def test_the_measured_peak_is_the_predicted_one_and_within_the_budget() -> None:
    work = chain()
    before = profile(work)
    for share in ("90%", "60%"):
        found = plan(work, share, profile=before, engine="eager", tune=False)
        with apply_options(work, found.options) as applied:
            measured = profile(applied.work)
        assert measured.storage_peak_bytes == found.storage_peak_bytes
        assert measured.peak_bytes <= found.budget_bytes
        assert found.baseline.peak_bytes == before.peak_bytes


@settings(max_examples=count(8, soak=20), deadline=None)
@given(shares=st.tuples(st.integers(40, 110), st.integers(40, 110)))
def test_a_larger_budget_is_never_predicted_slower(plain: Profile, shares: tuple[int, int]) -> None:
    seconds = []
    for share in sorted(shares):
        try:
            seconds.append(plan(chain(), f"{share}%", profile=plain, tune=False).seconds)
        except BudgetError:
            seconds.append(float("inf"))
    assert seconds[1] <= seconds[0]


def test_an_impossible_budget_names_the_smallest_one_and_that_one_works(plain: Profile) -> None:
    work = chain()
    with pytest.raises(BudgetError, match=r"below the smallest plan \(.*, \d+ bytes\)") as error:
        plan(work, "10%", profile=plain, tune=False)
    smallest = int(str(error.value).split(", ")[1].split(" bytes")[0])
    assert plan(work, smallest, profile=plain, tune=False).peak_bytes == smallest
    with pytest.raises(BudgetError):
        plan(work, smallest - 1, profile=plain, tune=False)


def test_an_option_is_traced_once_for_a_profile(plain: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    work = chain()
    found = plan(work, "60%", profile=plain, engine="eager", tune=False)
    traced = []
    monkeypatch.setattr(search_module, "predict", lambda *args, **_: traced.append(args))
    assert plan(work, "60%", profile=plain, engine="eager", tune=False).peak_bytes == found.peak_bytes
    assert not traced


def test_a_model_that_nothing_can_help_says_what_is_missing() -> None:
    with pytest.raises(BudgetError, match=r"sqrt needs a nn.Sequential or nn.ModuleList of two or more blocks"):
        plan(zoo.small("lstm"), "50%", fake=True, engine="eager", tune=False)


def test_planning_changes_nothing() -> None:
    work = chain()
    before = snapshot(work.model)
    state = torch.get_rng_state()
    plan(work, "60%", tune=False)
    assert_restored(work.model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert work.optimizer is not None
    assert not work.optimizer.state


def test_a_meta_model_is_planned_for_a_gpu_that_is_not_here() -> None:
    sizes = {"layers": 3, "width": 64, "heads": 2, "vocab": 100}
    work = zoo.workload("gpt2", batch=8, seq=128, optimizer="none", device="meta", **sizes)
    found = plan(work, "91%", device="h200", tune=False)
    assert found.device == "h200"
    assert found.peak_bytes <= found.budget_bytes


def test_a_plain_step_that_does_not_fit_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = baseline.profile_step

    def out_of_memory(work, *, fake, device):
        if not fake:
            raise torch.OutOfMemoryError("the GPU is full")
        return real(work, fake=fake, device=device)

    monkeypatch.setattr(baseline, "profile_step", out_of_memory)
    assert plan(chain(), "60%", tune=False).choices
    with pytest.raises(PlanError, match=r"ran out of memory on this device.*engine='eager'"):
        plan(chain(), "60%", engine="graph", tune=False)


# -- what a plan may use -------------------------------------------------------------------------------


def test_ops_take_as_long_as_the_step_where_a_gpu_waits_for_the_host(plain: Profile) -> None:
    def seconds(found: Profile, *, stepping: bool) -> float:
        return sum(op.seconds for op in found.graph.ops if (op.phase == "optimizer") == stepping)

    counted = seconds(plain, stepping=False)
    slower = baseline._lasting(plain, 2 * counted)
    assert seconds(slower, stepping=False) == pytest.approx(2 * counted)
    assert seconds(slower, stepping=True) == seconds(plain, stepping=True)
    assert baseline._lasting(plain, counted / 2) is plain


def test_loose_techniques_wait_for_permission(plain: Profile) -> None:
    with register(Loose()):
        assert plan(chain(), "60%", profile=plain, tune=False).options[0].technique in ("sqrt", "optimal")


@pytest.mark.parametrize("allow", ["changed", "loose", ["approximate", "loose"]])
def test_a_class_or_a_name_gives_permission(plain: Profile, allow: str | list[str], only) -> None:
    only()
    with register(Loose()):
        with pytest.raises(BudgetError, match=r"Allow loose \(changed\) to reach"):
            plan(chain(), "70%", profile=plain, tune=False)
        with pytest.raises(BudgetError):
            plan(chain(), "70%", profile=plain, allow="unbiased", tune=False)
        found = plan(chain(), "70%", profile=plain, allow=allow, tune=False)
        assert found.fidelity is Fidelity.CHANGED
        assert found.options[0].technique == "loose"


def test_roundoff_needs_no_permission(plain: Profile, only) -> None:
    only()
    with register(Loose(Fidelity.ROUNDOFF)):
        assert plan(chain(), "70%", profile=plain, tune=False).fidelity is Fidelity.ROUNDOFF


def test_no_permission_is_none_and_what_is_no_text_is_refused(plain: Profile) -> None:
    work = chain()
    assert plan(work, "90%", allow=None, tune=False).fidelity <= Fidelity.ROUNDOFF
    for wrong in (3, [3]):
        with pytest.raises(PlanError, match="Cannot allow"):
            plan(work, "90%", allow=wrong, tune=False)  # pyright: ignore[reportArgumentType]


def tanh_layers(loss: Callable[[nn.Module, Tensor], Tensor]) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(8)))
    return Workload(model, loss, torch.randn(96, 24))


def seen_together(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean(0).square().sum()


def test_a_technique_that_the_loss_does_not_allow_is_found_out_before_the_first_step() -> None:
    work = tanh_layers(seen_together)
    before = snapshot(work.model)
    with pytest.raises(
        BudgetError, match=r"microbatch .* was left out: The loss of .* it is neither of them"
    ) as caught:
        plan(work, 1, allow="microbatch", tune=False)
    assert str(caught.value).count("microbatch") == 1  # not once for every size
    assert_restored(work.model, before)


def test_where_the_smallest_estimates_cannot_be_used_others_are_looked_at() -> None:
    def forward_mode(model: nn.Module, x: Tensor) -> Tensor:
        y, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        return (y + tangent).square().mean()

    work = tanh_layers(forward_mode)
    found = plan(work, "75%", allow="bitwise", tune=False)  # checkpoints do not go with forward-mode derivatives
    assert found.engine == "graph"
    assert found.peak_bytes <= found.budget_bytes


def test_what_fails_in_a_prediction_is_noted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    mixing = torch.randn(96, 96)
    work = Workload(nn.Linear(24, 24), lambda m, x: (mixing @ m(x)).square().mean(), torch.randn(96, 24))
    with pytest.raises(BudgetError, match=r"microbatch .* was left out: "):
        plan(work, 1, allow="microbatch", tune=False)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_unknown_permission_is_refused(plain: Profile) -> None:
    with pytest.raises(PlanError, match="neither a fidelity class nor a technique"):
        plan(chain(), "60%", profile=plain, allow="everything", tune=False)


def test_an_option_that_fails_is_left_out_and_noted(plain: Profile) -> None:
    class Tempting(Loose):
        def price(self, option, profile):
            return type(super().price(option, profile))(Fidelity.BITWISE)

    with register(Tempting(name="tempting", fails=True)):
        found = plan(chain(), "60%", profile=plain, tune=False)
    assert found.options[0].technique in ("sqrt", "optimal")
    # It looked free, and was tried only if its estimate said that it could fit.
    assert all("this one never works" in note for note in found.notes if "tempting" in note)


def test_techniques_that_conflict_are_not_applied_together(plain: Profile) -> None:
    work = chain()
    chosen = plan(work, "60%", profile=plain, tune=False).options
    with register(Loose()) as undo, pytest.raises(PlanError, match=r"loose and (sqrt|optimal) cannot be in one plan"):
        apply_options(work, [*chosen, *Loose().options(plain)])
    undo()
    with pytest.raises(PlanError, match="There is no technique 'loose' here"):
        apply_options(work, Loose().options(plain))
    assert "forward" not in work.model.__dict__


def in_fours(model: nn.Module, x: Tensor) -> Tensor:
    """Samples see each other in groups of four."""
    return torch.cat([(part - part.mean(0)).square() for part in model(x).split(4)]).mean()


def test_whether_a_loss_can_be_split_is_asked_of_each_size() -> None:
    work = tanh_layers(in_fours)
    found = plan(work, "50%", engine="eager", allow="microbatch", tune=False)
    assert [choice.option.technique for choice in found.choices] == ["microbatch"]
    with pytest.raises(BudgetError, match=r"microbatch .* was left out") as caught:
        plan(work, 1, engine="eager", allow="microbatch", tune=False)
    assert int(str(caught.value).split(", ")[1].split()[0]) <= found.peak_bytes


def test_a_batch_that_a_size_does_not_divide_is_predicted_to_the_byte() -> None:
    work = tanh_layers(lambda m, x: m(x).square().mean())
    work = Workload(work.model, work.loss, torch.randn(97, 24))
    options = [option for option in Microbatch().options(profile(work)) if option.config.size == 4]
    before = profile(work)
    predicted = predict(work, options, before, only_peaks=True)
    with apply_options(work, options) as applied:
        assert profile(applied.work).storage_peak_bytes == predicted.storage_peak_bytes


def test_planning_leaves_gradients_as_they_are() -> None:
    work = tanh_layers(lambda m, x: m(x).square().mean())
    work.compute_loss().backward()
    before = [(p.grad, p.grad.clone()) for p in work.model.parameters() if p.grad is not None]
    with pytest.raises(BudgetError):
        plan(work, 1, engine="eager", allow="changed", tune=False)
    now = [p.grad for p in work.model.parameters()]
    assert all(grad is held and torch.equal(grad, value) for grad, (held, value) in zip(now, before, strict=True))


def test_a_plan_says_why_the_graph_engine_is_not_used() -> None:
    class Branching(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() < 1e9 else -x)

    model = Branching(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    work = Workload(model, lambda model, x: model(x).square().mean(), torch.randn(64, 16))
    found = plan(work, "80%", allow="microbatch", tune=False)
    assert found.engine == "eager"
    assert any("graph engine is not used" in note and "Data-dependent" in note for note in found.notes)
    assert "graph engine is not used" in found.explain()


def test_ops_that_a_technique_brings_are_measured_before_their_bytes_are_promised() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    work = Workload(model, lambda model, x: model(x).square().mean(), torch.randn(60, 16), autocast=torch.bfloat16)
    before = profile(work)
    for option in techniques()["randomized"].options(before)[:2]:
        predicted = predict(work, [option], before)
        with apply_options(work, [option]) as applied:
            assert profile(applied.work).peak_bytes <= predicted.peak_bytes
