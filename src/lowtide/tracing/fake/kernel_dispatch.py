"""Replace or correct torch's fake kernels, by a mode above the fake tensors or in their own dispatch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from lowtide.compat.dispatch import UncompiledMode
from lowtide.compat.fake import FakeTensorMode, fake_dispatch, replace_dispatch
from lowtide.compat.operators import schema_of
from lowtide.tracing.process_patch import ProcessPatch

Answer = Callable[..., Any]


class Answers(UncompiledMode):
    """``answers`` maps an op to a function called instead of it, ``fixes`` to one that corrects its outputs.

    Updates of whole lists of tensors in place (``_foreach_add_``, ``_fused_adamw_``) make nothing and are left out:
    they would take most of the time of a fake step.
    """

    def __init__(self, answers: dict[Any, Answer], fixes: dict[Any, Answer]) -> None:
        super().__init__()
        self._answers = answers
        self._fixes = fixes

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not schema_of(func).returns and schema_of(func).name.startswith(("aten::_foreach", "aten::_fused")):
            return None
        answer: Any = self._answers.get(func, func)
        out = answer(*args, **kwargs)
        fix: Any = self._fixes.get(func)
        return out if fix is None else fix(out, *args, **kwargs)


class _Asking(threading.local):
    """Replacements for this thread's fake kernels; None for torch's own."""

    answers: dict[Any, Answer] | None = None
    fixes: dict[Any, Answer] | None = None
    answered: tuple[Any, ...] = ()  # ops whose answer runs now: if it calls the op itself, torch answers that


_asking = _Asking()


@contextmanager
def answering(answers: dict[Any, Answer], fixes: dict[Any, Answer]) -> Generator[None]:
    """Apply replacements in every fake mode of this thread, Dynamo's included.

    No mode can be put above those, so their own dispatch is replaced for the time; other threads are not asked.
    """
    before = _asking.answers, _asking.fixes
    with _OWN_DISPATCH:
        _asking.answers, _asking.fixes = answers, fixes
        try:
            yield
        finally:
            _asking.answers, _asking.fixes = before


def _answer(
    mode: FakeTensorMode, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    kwargs = kwargs or {}
    answer = None if _asking.answers is None or func in _asking.answered else _asking.answers.get(func)
    fix = None if _asking.fixes is None or func in _asking.answered else _asking.fixes.get(func)
    if answer is None:
        out = fake_dispatch(mode, func, types, args, kwargs)
    else:
        _asking.answered = (*_asking.answered, func)
        try:
            out = answer(*args, **kwargs)
        finally:
            _asking.answered = _asking.answered[:-1]
    return out if fix is None else fix(out, *args, **kwargs)


def _replace_dispatch() -> Callable[[], None]:
    replace_dispatch(_answer)
    return lambda: replace_dispatch(fake_dispatch)


_OWN_DISPATCH = ProcessPatch(_replace_dispatch)
