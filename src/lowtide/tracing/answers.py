"""Answers where fake kernels are silent or wrong: by a mode above the fake tensors, or in the fake tensors' own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

Answer = Callable[..., Any]


class Answers(TorchDispatchMode):
    """``answers`` maps an op to a function called instead of it, ``fixes`` to one that mends its outputs.

    Updates of whole lists of tensors in place (``_foreach_add_``, ``_fused_adamw_``) make nothing and are left out:
    they would take most of the time of a fake step.
    """

    def __init__(self, answers: dict[Any, Answer], fixes: dict[Any, Answer]) -> None:
        super().__init__()
        self._answers = answers
        self._fixes = fixes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a fake step compiles nothing, so that nothing has to be kept from being compiled

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func._schema.returns and func._schema.name.startswith(("aten::_foreach", "aten::_fused")):
            return None
        answer: Any = self._answers.get(func, func)
        out = answer(*args, **kwargs)
        fix: Any = self._fixes.get(func)
        return out if fix is None else fix(out, *args, **kwargs)


@contextmanager
def answering(answers: dict[Any, Answer], fixes: dict[Any, Answer]) -> Generator[None]:
    """Have every mode of fake tensors answer so, those that Dynamo makes too: no mode can be put above them."""
    original: Any = FakeTensorMode.dispatch
    asked: list[Any] = []  # an answer may call the op itself, otherwise

    def dispatch(
        mode: FakeTensorMode, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        answer, fix, kwargs = answers.get(func), fixes.get(func), kwargs or {}
        if answer is None or func in asked:
            out = original(mode, func, types, args, kwargs)
        else:
            asked.append(func)
            try:
                out = answer(*args, **kwargs)
            finally:
                asked.pop()
        return out if fix is None else fix(out, *args, **kwargs)

    FakeTensorMode.dispatch = dispatch  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        FakeTensorMode.dispatch = original
