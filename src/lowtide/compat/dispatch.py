"""Dispatch modes, and blocks without dispatch, autocast or ``__torch_function__``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _python_dispatch

_c: Any = torch._C

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base of modes that see every op."""

is_wrapper = _python_dispatch.is_traceable_wrapper_subclass
"""Tell whether a tensor is a subclass made of other tensors, which ``__tensor_flatten__`` names."""

without_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
"""Run a block without the dispatch modes that are active."""

active_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
"""Return the active dispatch modes, innermost last."""

count_modes: Callable[[], int] = _c._len_torch_dispatch_stack
"""Count the active dispatch modes."""

without_autocast: Callable[[], AbstractContextManager[Any]] = _c._DisableAutocast
"""Run a block without autocast, for all kinds of device at once."""

without_dispatch: Callable[[], AbstractContextManager[Any]] = _c._DisableTorchDispatch
"""Run a block without any ``__torch_dispatch__``."""

without_torch_function: Callable[[], AbstractContextManager[Any]] = _c.DisableTorchFunction
"""Run a block without any ``__torch_function__``, of modes or of subclasses."""

without_subclass_function: Callable[[], AbstractContextManager[Any]] = _c.DisableTorchFunctionSubclass
"""Run a block without the ``__torch_function__`` of subclasses; modes stay."""


class UncompiledMode(TorchDispatchMode):
    """The base of modes under which nothing is compiled, which saves guarding each call against Dynamo."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
