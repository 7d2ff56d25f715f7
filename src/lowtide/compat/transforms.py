"""Transforms and exports of the code that runs now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_c: Any = torch._C
_functorch: Any = vars(torch._C)["_functorch"]

functorch_is_active: Callable[[], bool] = _c._are_functorch_transforms_active
"""Tell whether code runs inside ``torch.func`` (``vmap``, ``grad`` and the like)."""

jit_state: Callable[[], Any] = _c._get_tracing_state
"""Return the state of ``torch.jit.trace`` while it traces, else None."""


def in_forward_mode() -> bool:
    """Tell whether code runs inside forward-mode differentiation."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Tell whether ``torch.func``, forward-mode differentiation or ``torch.jit.trace`` sees the ops that run."""
    return functorch_is_active() or forward_ad._current_level >= 0 or jit_state() is not None


def is_exporting() -> bool:
    """Tell whether ``torch.export`` runs. ``torch.compiler.is_exporting`` is true in all that torch 2.11 compiles."""
    return torch.compiler._is_exporting_flag


def is_batched(tensor: Tensor) -> bool:
    """Tell whether a tensor stands for a batch of them, under ``vmap`` or in ``is_grads_batched``."""
    return _functorch.is_legacy_batchedtensor(tensor) or _functorch.is_batchedtensor(tensor)
