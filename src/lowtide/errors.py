"""Errors of lowtide: each says what is wrong, where, and what to try."""

from collections.abc import Iterable
from difflib import get_close_matches


class LowtideError(Exception):
    """The base of all of lowtide's errors.

    >>> print(LowtideError("The loss is not a scalar", where="train.py:loss", hint="Return loss.mean()."))
    The loss is not a scalar (train.py:loss). Return loss.mean().
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        message = what.rstrip(".") if where or hint else what
        if where:
            message += f" ({where})"
        if hint:
            message += f". {hint}"
        super().__init__(message)


class WorkloadError(LowtideError, ValueError):
    """The training step, its batch or its loss cannot be used as given."""


class TraceError(LowtideError, RuntimeError):
    """The step could not be traced or predicted."""


class BudgetError(LowtideError, ValueError):
    """No plan fits the budget. ``smallest_bytes`` is a budget that works, where one is known: the smallest."""

    def __init__(self, what: str, *, where: str = "", hint: str = "", smallest_bytes: int | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.smallest_bytes = smallest_bytes


class ModifiedError(LowtideError, RuntimeError):
    """A tensor that the backward pass needs was changed since the forward pass."""


class RestoreError(LowtideError, RuntimeError):
    """State that a step changed could not be restored; the message names it."""


class PlanError(LowtideError, ValueError):
    """A plan is malformed, or belongs to another model or batch."""


class MissingExtra(LowtideError, ImportError):
    """An optional dependency is not installed.

    >>> print(MissingExtra("rich", extra="cli"))
    This needs rich, which is not installed. Install it with: pip install "lowtide[cli]"
    """

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"This needs {package}, which is not installed",
            hint=f'Install it with: pip install "lowtide[{extra}]"',
        )


def unknown_name(kind: str, name: str, known: Iterable[str], *, where: str = "") -> WorkloadError:
    """Build the error for an unknown name, with the names near it."""
    known = list(known)
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(known)}."
    return WorkloadError(f"There is no {kind} {name!r}", where=where, hint=hint)
