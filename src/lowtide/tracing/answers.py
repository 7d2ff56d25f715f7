"""The mode between the recorder and the fake tensors: it answers where fake kernels are silent or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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
