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

Kernel = Callable[..., Any]


class FakeKernels(UncompiledMode):
    """``substitutes`` maps an op to a function called instead of it, ``fixes`` to one that corrects its outputs.

    Updates of whole lists of tensors in place (``_foreach_add_``, ``_fused_adamw_``) allocate nothing and are left out.
    They would take most of the time of a fake step.
    """

    def __init__(self, substitutes: dict[Any, Kernel], fixes: dict[Any, Kernel]) -> None:
        super().__init__()
        self._substitutes = substitutes
        self._fixes = fixes

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not schema_of(func).returns and schema_of(func).name.startswith(("aten::_foreach", "aten::_fused")):
            return None
        kernel: Any = self._substitutes.get(func, func)
        out = kernel(*args, **kwargs)
        fix: Any = self._fixes.get(func)
        return out if fix is None else fix(out, *args, **kwargs)


class _Replaced(threading.local):
    """Substitutes and fixes of this thread's fake kernels. Dynamo makes the modes, so no argument can carry them."""

    kernels: tuple[dict[Any, Kernel], dict[Any, Kernel]] = ({}, {})
    running: tuple[Any, ...] = ()  # ops whose substitute runs now: where it calls the op itself, torch's kernel runs


_replaced = _Replaced()


@contextmanager
def replaced_kernels(substitutes: dict[Any, Kernel], fixes: dict[Any, Kernel]) -> Generator[None]:
    """Apply replacements in every fake mode of this thread, Dynamo's included.

    No mode can be put above those, so their own dispatch is replaced for the time; other threads keep theirs.
    """
    before = _replaced.kernels
    with _OWN_DISPATCH:
        _replaced.kernels = substitutes, fixes
        try:
            yield
        finally:
            _replaced.kernels = before


def _dispatch(
    mode: FakeTensorMode, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    kwargs = kwargs or {}
    substitutes, fixes = ({}, {}) if func in _replaced.running else _replaced.kernels
    fix = fixes.get(func)
    if func not in substitutes:
        out = fake_dispatch(mode, func, types, args, kwargs)
    else:
        _replaced.running = (*_replaced.running, func)
        try:
            out = substitutes[func](*args, **kwargs)
        finally:
            _replaced.running = _replaced.running[:-1]
    return out if fix is None else fix(out, *args, **kwargs)


def _replace_dispatch() -> Callable[[], None]:
    replace_dispatch(_dispatch)
    return lambda: replace_dispatch(fake_dispatch)


_OWN_DISPATCH = ProcessPatch(_replace_dispatch)
