"""Every error says what is wrong, where, and what to try, and is of the kind that callers catch."""

import pytest

from lowtide.errors import BudgetError, LowtideError, PlanError, TraceError, WorkloadError


def test_an_error_says_what_where_and_what_to_try():
    assert str(LowtideError("It broke.")) == "It broke."
    assert str(LowtideError("It broke.", where="a.py")) == "It broke (a.py)"
    assert str(LowtideError("It broke.", where="a.py", hint="Mend it.")) == "It broke (a.py). Mend it."


@pytest.mark.parametrize(
    ("kind", "base"),
    [(WorkloadError, ValueError), (BudgetError, ValueError), (PlanError, ValueError), (TraceError, RuntimeError)],
)
def test_an_error_is_caught_as_pythons_own_kind(kind, base):
    with pytest.raises(base):
        raise kind("no")
    assert issubclass(kind, LowtideError)
