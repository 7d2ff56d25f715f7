"""Dispatch modes, and blocks without dispatch, autocast or ``__torch_function__``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lowtide.compat.versions import TRIED

if TYPE_CHECKING:
    from torch.utils import _python_dispatch

    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    is_wrapper = _python_dispatch.is_traceable_wrapper_subclass
else:
    TorchDispatchMode = TRIED.find("torch.utils._python_dispatch:TorchDispatchMode")
    """The base of modes that see every op."""

    is_wrapper = TRIED.find("torch.utils._python_dispatch:is_traceable_wrapper_subclass")
    """Tell whether a tensor is a subclass made of other tensors, which ``__tensor_flatten__`` names."""

without_modes: Callable[[], AbstractContextManager[Any]] = TRIED.find(
    "torch.utils._python_dispatch:_disable_current_modes"
)
"""Run a block without the dispatch modes that are active."""

active_modes: Callable[[], list[Any]] = TRIED.find("torch.utils._python_dispatch:_get_current_dispatch_mode_stack")
"""Return the active dispatch modes, innermost last."""

without_autocast: Callable[[], AbstractContextManager[Any]] = TRIED.find("torch._C:_DisableAutocast")
"""Run a block without autocast, for all kinds of device at once."""

without_dispatch: Callable[[], AbstractContextManager[Any]] = TRIED.find("torch._C:_DisableTorchDispatch")
"""Run a block without any ``__torch_dispatch__``."""

without_torch_function: Callable[[], AbstractContextManager[Any]] = TRIED.find("torch._C:DisableTorchFunction")
"""Run a block without any ``__torch_function__``, of modes or of subclasses."""

without_subclass_function: Callable[[], AbstractContextManager[Any]] = TRIED.find(
    "torch._C:DisableTorchFunctionSubclass"
)
"""Run a block without the ``__torch_function__`` of subclasses; modes stay."""


class UncompiledMode(TorchDispatchMode):
    """The base of modes under which nothing is compiled, which saves guarding each call against Dynamo."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
