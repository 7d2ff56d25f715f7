"""Candidates that a plan may use: by class, or by the technique's name."""

from __future__ import annotations

import pytest

from lowtide.engines import plan
from lowtide.errors import BudgetError, PlanError
from lowtide.planning.candidate import Candidate, Permission
from lowtide.profiling import Profile
from lowtide.techniques import Fidelity, Price, register
from tests.refusals import refused

from .steps import Loose, chain


def test_loose_techniques_wait_for_permission(plain: Profile) -> None:
    with register(Loose()):
        assert plan(chain(), "60%", profile=plain, tune=False).options[0].technique in ("sqrt", "optimal")


@pytest.mark.parametrize("allow", ["changed", "loose", ["approximate", "loose"]])
def test_a_class_or_a_name_gives_permission(plain: Profile, allow: str | list[str], only) -> None:
    only()
    with register(Loose()):
        with refused("loose (changed)", kind=BudgetError):
            plan(chain(), "70%", profile=plain, tune=False)
        with pytest.raises(BudgetError):
            plan(chain(), "70%", profile=plain, allow="unbiased", tune=False)
        chosen = plan(chain(), "70%", profile=plain, allow=allow, tune=False)
        assert chosen.fidelity is Fidelity.CHANGED
        assert chosen.options[0].technique == "loose"


def test_roundoff_needs_no_permission(plain: Profile, only) -> None:
    only()
    with register(Loose(Fidelity.ROUNDOFF)):
        assert plan(chain(), "70%", profile=plain, tune=False).fidelity is Fidelity.ROUNDOFF


def test_no_permission_is_none_and_unknown_ones_are_refused(plain: Profile) -> None:
    work = chain()
    assert plan(work, "90%", allow=None, tune=False).fidelity <= Fidelity.ROUNDOFF
    for wrong in (3, [3], "everything"):
        with refused(str(wrong), kind=PlanError):
            plan(work, "90%", allow=wrong, tune=False)  # pyright: ignore[reportArgumentType]


def test_what_is_forbidden_is_not_used_and_unknown_names_are_refused(plain: Profile) -> None:
    work = chain()
    chosen = plan(work, "80%", profile=plain, engine="eager", tune=False)
    forbidden = chosen.options[0].technique
    other = plan(work, "80%", profile=plain, engine="eager", forbid=forbidden, tune=False)
    assert forbidden not in [option.technique for option in other.options]
    with refused("sqrt", "forbidden", kind=PlanError):
        plan(work, "80%", profile=plain, allow="sqrt", forbid=["sqrt"], tune=False)
    for wrong in ("changed", "everything", 3):
        with refused(str(wrong), kind=PlanError):
            plan(work, "80%", profile=plain, forbid=wrong, tune=False)  # pyright: ignore[reportArgumentType]


def test_programs_that_offload_wait_for_their_name_and_codes_for_their_class_or_name() -> None:
    def program(*holds: str, fidelity: Fidelity = Fidelity.BITWISE) -> Candidate:
        return Candidate("graph", "a program", Price(fidelity), 0, "ops", holds)

    assert Permission()(program("fewbit"))
    assert not Permission()(program("fewbit", fidelity=Fidelity.APPROXIMATE))
    assert Permission.of("fewbit")(program("fewbit", fidelity=Fidelity.APPROXIMATE))
    assert not Permission.of((), "fewbit")(program("fewbit"))
    assert not Permission.of("changed")(program("offload"))
    assert Permission.of("offload")(program("offload"))
    assert not Permission.of("offload")(program("offload", "fewbit"))
    assert Permission.of(["offload", "fewbit"])(program("offload", "fewbit"))


def test_rewrites_of_a_graph_are_forbidden_by_name_and_need_roundoff() -> None:
    rewritten = Candidate("graph", "a program", Price(Fidelity.ROUNDOFF), 0, "rewritten", (), ("batchnorm",))
    assert Permission()(rewritten)
    assert not Permission.of("bitwise")(rewritten)
    assert not Permission.of((), "batchnorm")(rewritten)
    coded = Candidate("graph", "a program", Price(Fidelity.APPROXIMATE), 0, "rewritten", ("fewbit",), ("batchnorm",))
    assert Permission.of("fewbit")(coded)
    assert not Permission.of(["bitwise", "fewbit"])(coded)


@pytest.mark.parametrize(
    ("allow", "is_default"),
    [((), True), ("roundoff", True), ("bitwise", False), ("changed", False), (["offload"], False)],
    ids=str,
)
def test_a_default_permission_opens_roundoff_and_nothing_else(allow: str | list[str], is_default: bool) -> None:
    assert Permission.of(allow, "microbatch").is_default is is_default
