from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import zoo
from lowtide.engines import fit, plan, verify
from lowtide.engines.graph import PlannedLoss
from lowtide.engines.lowering import compiled
from lowtide.errors import BudgetError, PlanError, WorkloadError
from lowtide.planning import Choice, Plan
from lowtide.profiling import profile
from lowtide.techniques import Applied, Check, Fidelity, Forward, Option, register, replace_forward, techniques
from lowtide.techniques.registry import study
from lowtide.workload import Workload
from tests.models import InTurn, Then, squares, standardized
from tests.refusals import refused, warned

from ..contract.outcomes import assert_restored, snapshot
from ..contract.workloads import WORKLOADS, larger
from ..planning.steps import Loose, chain
from .lowered import interpreted
from .lowered import language_model as dropout_model


class Scaled(Forward):
    """The model's forward times a factor near one."""

    factor = 1 + 1e-4

    def __call__(self, x: Tensor) -> Tensor:
        return self.plain(x) * self.factor


class Off(Loose):
    """Changes the result a little, whatever it declares."""

    def apply(self, work: Workload, options: Any) -> Applied:
        return Applied(work, replace_forward(Scaled(work.model)))

    def check(self, option: Option) -> Check:
        return Check(self.fidelity, rtol=0.0 if self.fidelity is Fidelity.BITWISE else 1e-2)


def plan_of(work: Workload, technique: Loose) -> Plan:
    base = plan(work, "100%", fake=True, tune=False)
    option = Option(technique.name, ("",))
    return replace(base, choices=(Choice(option, technique.fidelity, 0, 0.0, "for the test"),))


def test_a_recomputed_step_is_verified_bit_for_bit() -> None:
    work = larger(WORKLOADS["convnet"]())
    verification = verify(work, plan(work, "80%", engine="eager", tune=False))
    assert verification.plan.choices
    assert verification.ok, verification
    assert [a.what for a in verification.agreements] == ["loss", "gradients", "buffers", "parameters", "generators"]
    assert all(a.equal and a.error == 0 for a in verification.agreements)
    assert verification.storage_peak_bytes == verification.plan.storage_peak_bytes
    assert verification.seconds > 0
    assert str(verification).startswith("verified (bitwise)")


def test_everything_is_put_back() -> None:
    work = chain()
    work.compute_loss().backward()
    assert work.optimizer is not None
    work.optimizer.step()
    before, rng = snapshot(work.model), torch.get_rng_state()
    gradients = [p.grad for p in work.model.parameters()]
    values = [g.clone() for g in gradients]
    momenta = {p: s["momentum_buffer"].clone() for p, s in work.optimizer.state.items()}
    verify(work, plan(work, "60%", fake=True, tune=False))
    assert_restored(work.model, before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is g for p, g in zip(work.model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, gradients, values))
    assert all(torch.equal(work.optimizer.state[p]["momentum_buffer"], m) for p, m in momenta.items())


def test_a_broken_promise_is_reported() -> None:
    work = chain()
    with register(Off(Fidelity.BITWISE)):
        verification = verify(work, plan_of(work, Off(Fidelity.BITWISE)))
    assert not verification.ok
    assert not verification.results_agree
    broken = {a.what for a in verification.agreements if not a.holds}
    assert broken == {"loss", "gradients", "parameters"}
    assert "breaks the promise" in str(verification)


def test_an_error_within_the_declared_bound_holds() -> None:
    work = chain()
    with register(Off(Fidelity.APPROXIMATE)):
        verification = verify(work, plan_of(work, Off(Fidelity.APPROXIMATE)))
    assert verification.results_agree
    loss = verification.agreements[0]
    assert not loss.equal
    assert 1e-4 < loss.error < 1e-3


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (0.2, False)])
def test_an_approximate_gradient_that_nearly_cancels_is_held_to_the_size_of_the_others(
    factor: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(16)
    model = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), Then(standardized))
    x, y = torch.randn(10, 12, 16), torch.randint(16, (120,))
    work = Workload(model, lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1]), (x, y))
    technique, plain = techniques()["fewbit"], profile(work)
    option = next(o for o in technique.options(plain) if "bits 4" in str(o))
    check = technique.check(option)
    choice = Choice(option, Fidelity.APPROXIMATE, 0, 0.0, "for the test")
    monkeypatch.setattr(technique, "check", lambda option: replace(check, rtol=factor * check.rtol))
    verification = verify(work, replace(plan(work, "100%", profile=plain), choices=(choice,)))
    assert verification.results_agree is holds, verification


def language_model() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Tanh(), nn.Linear(16, 50))
    return Workload(model, lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()), torch.randint(50, (8, 4)))


@pytest.mark.parametrize("name", ["microbatch", "chunked_loss", "batchnorm"])
@pytest.mark.parametrize(("factor", "broken"), [(1.0, set()), (1.005, {"loss", "gradients"})])
def test_roundoff_in_float32_is_held_to_the_steps_own_rounding(
    name: str, factor: float, broken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WORKLOADS["convnet"]() if name == "batchnorm" else language_model()
    technique, plain = techniques()[name], profile(work)
    study(work, plain)
    option, apply = technique.options(plain)[0], technique.apply
    choice = Choice(option, technique.check(option).fidelity, 0, 0.0, "for the test")
    assert choice.fidelity is Fidelity.ROUNDOFF

    def apply_and_scale(work: Workload, options: Any) -> Applied:
        done = apply(work, options)
        inner = done.work.loss
        return Applied(replace(done.work, loss=lambda model, batch: factor * inner(model, batch)), done)

    monkeypatch.setattr(technique, "apply", apply_and_scale)
    verification = verify(work, replace(plan(work, "100%", profile=plain), choices=(choice,)))
    assert {a.what for a in verification.agreements if not a.holds} == broken, verification


def test_a_peak_above_the_budget_is_reported() -> None:
    work = chain()
    tight = replace(plan(work, "100%", fake=True, tune=False), budget_bytes=1000)
    verification = verify(work, tight)
    assert verification.results_agree
    assert not verification.within_budget
    assert "EXCEEDED" in str(verification)


def chain_with_noise(size: float) -> Workload:
    """Draw from a generator that nobody restores."""
    work, generator = chain(), torch.Generator().manual_seed(0)
    return replace(work, loss=lambda m, x: work.loss(m, x) * (1 + size * torch.rand((), generator=generator)))


def test_a_step_that_differs_from_itself_is_not_held_against_the_plan() -> None:
    noisy = chain_with_noise(1e-5)
    verification = verify(noisy, plan(noisy, "60%", fake=True, tune=False))
    assert verification.results_agree
    assert verification.repeatable
    assert not verification.agreements[0].equal
    assert any("differs from itself" in note for note in verification.notes)


def test_an_error_far_above_the_noise_is_held_against_the_plan() -> None:
    noisy = chain_with_noise(1e-7)
    with register(Off(Fidelity.BITWISE)):
        assert not verify(noisy, plan_of(noisy, Off(Fidelity.BITWISE))).results_agree


def test_a_step_that_is_not_repeatable_cannot_be_verified() -> None:
    noisy = chain_with_noise(1e-2)
    verification = verify(noisy, plan(noisy, "100%", fake=True, tune=False))
    assert not verification.ok
    assert not verification.repeatable
    assert verification.to_json()["repeatable"] is False
    assert str(verification).startswith("CANNOT be verified (bitwise): the plain step is not repeatable")
    with refused("verify=False", kind=PlanError):
        fit(noisy.model, noisy.loss, noisy.batch, noisy.optimizer, budget="100%")


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_nan_in_one_step_alone_breaks_the_promise(noise: float) -> None:
    noisy = chain_with_noise(noise)
    off = Off(Fidelity.APPROXIMATE)
    with register(off), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scaled, "factor", math.nan)
        verification = verify(noisy, plan_of(noisy, off))
    assert not verification.results_agree
    assert {a.what: a.error for a in verification.agreements if not a.holds}.keys() == {
        "loss",
        "gradients",
        "parameters",
    }
    assert all(a.error == math.inf for a in verification.agreements if not a.holds)


def test_nan_at_the_same_places_is_equal() -> None:
    work = chain()
    inner = work.loss
    broken = replace(work, loss=lambda m, x: inner(m, x) * math.nan)
    verification = verify(broken, plan(broken, "60%", fake=True, tune=False))
    assert verification.ok
    assert all(a.equal for a in verification.agreements)


def test_the_noise_of_a_gradient_that_is_nothing_but_roundoff_is_let_pass() -> None:
    """A bias before a softmax over its rows has no gradient but roundoff, which is as large as its own noise."""
    module = sys.modules["lowtide.engines.verify"]
    plain = {"weight": torch.ones(1000), "bias": torch.full((4,), 1e-9)}
    again = {"weight": torch.ones(1000), "bias": torch.full((4,), -1e-9)}
    assert module._distance("gradients", plain, again) < 1e-8
    assert module._agreement("gradients", plain, again, Check.EXACT).error == pytest.approx(2.0)


def test_a_plain_step_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["lowtide.engines.verify"]  # the name itself is the function
    run: Callable[..., Any] = module._run

    def full(work: Workload, *others: Any, **settings: Any) -> Any:
        if "forward" not in work.model.__dict__:
            raise torch.OutOfMemoryError("the GPU is full")
        return run(work, *others, **settings)

    monkeypatch.setattr(module, "_run", full)
    work = chain()
    verification = verify(work, plan(work, "60%", fake=True, tune=False))
    assert verification.agreements == ()
    assert math.isnan(verification.plain_seconds)
    assert any("does not fit" in note for note in verification.notes)
    assert not verification.compared
    assert not verification.ok
    assert not verification.to_json()["results_agree"]
    assert "NOT compared" in str(verification)
    assert "verified" not in str(verification)
    with warned("compared"):
        fit(work.model, work.loss, work.batch, work.optimizer, budget="60%", allow="bitwise", engine="eager").undo()


def test_only_a_plan_and_its_own_workload_are_verified() -> None:
    work: Any = chain()
    wrong: Any = "plan.json"
    fits = plan(work, "100%", fake=True, tune=False)
    with refused("str", kind=PlanError):
        verify(work, wrong)
    with refused("Sequential", kind=WorkloadError):
        verify(work.model, fits)
    with refused("model", kind=PlanError):
        verify(chain(depth=3), fits)


# -- fit: all of it in one call ------------------------------------------------------------------------


def test_sparse_gradients_are_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 24, sparse=True), *(nn.Linear(24, 24) for _ in range(4)))
    work = Workload(model, squares, torch.randint(40, (96,)))
    assert verify(work, plan(work, "100%", engine="eager", tune=False)).ok


def divided(dtype: torch.dtype = torch.float32) -> Workload:
    """``addcdiv`` is several ops to Dynamo, which round otherwise. A norm takes the biases' gradients away."""
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(8, affine=True)
    parts = (nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), norm) for channels in (3, 8, 8))
    model = InTurn(*parts, each=lambda part, x: torch.addcdiv(y := part(x), y, y.abs() + 1, value=0.3))
    return Workload(model.to(dtype), squares, torch.randn(4, 3, 32, 32).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_that_rounds_otherwise_is_planned_as_roundoff_and_verified(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = divided(dtype)
    chosen = plan(work, "99%", engine="graph", tune=False)
    assert chosen.fidelity is Fidelity.ROUNDOFF
    assert any("rounds otherwise" in note for note in chosen.notes)
    checked = verify(work, chosen)
    assert checked.ok, str(checked)
    assert not checked.agreements[1].equal
    with refused("roundoff", kind=BudgetError):
        plan(work, "99%", engine="graph", allow="bitwise", tune=False)
    monkeypatch.setattr(PlannedLoss, "__call__", lambda self, model, x: 1.1 * self.work.compute_loss(batch=x))
    assert not verify(work, chosen).results_agree


@pytest.mark.parametrize("wrong", [False, True])
def test_a_compiled_plan_with_dropout_is_compared_with_itself_op_by_op(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_place_of_inductor(module: Any, inputs: Any) -> Any:
        code = interpreted(module, inputs)
        if not wrong:
            return code
        return lambda values: [each * 1.1 if each.is_floating_point() else each for each in code(values)]

    monkeypatch.setattr(compiled, "compile_graph", in_place_of_inductor)
    work = dropout_model(dropout=0.2, layers=1)
    chosen = plan(work, "85%", engine="graph", compile=True, tune=False)
    assert chosen.program is not None
    assert chosen.program.lowering == "compiled"
    checked = verify(work, chosen)
    assert any("op by op" in note for note in checked.notes)
    assert checked.results_agree is not wrong, str(checked)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_plan_as_near_to_32_bits_as_the_plain_step_in_16_holds(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a small net with batch norms, half precision carries so far that two ways to round agree in no digit."""

    def in_place_of_inductor(module: Any, inputs: Any) -> Any:
        code = interpreted(module, inputs)
        return (lambda values: [-each if is_image(each) else each for each in code(values)]) if wrong else code

    def is_image(value: Tensor) -> bool:
        return value.dim() == 4 and value.is_floating_point()  # indices of a max pool would write out of bounds

    monkeypatch.setattr(compiled, "compile_graph", in_place_of_inductor)
    work = short_resnet()
    if wrong:
        checked = verify(work, plan(work, "85%", engine="graph", compile=True, tune=False))
        assert not checked.results_agree, str(checked)
        assert not any("in 32 bits" in note for note in checked.notes)
        return
    with pytest.warns(RuntimeWarning, match="above its budget"):  # ops in place of Inductor's take more bytes
        step = fit(
            work.model, work.loss, work.batch, budget="85%", autocast=work.autocast, engine="graph", compile=True,
            tune=False,
        )  # fmt: skip
    assert any("in 32 bits" in note for note in step.plan.notes)
    step.undo()


def short_resnet() -> Workload:
    """One block in each stage, under autocast."""
    work = zoo.small("resnet18", batch=8, autocast=torch.bfloat16)
    stages: Any = work.model.stages
    for stage in stages:
        del stage[1]
    return work
