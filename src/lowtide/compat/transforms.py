"""Transforms and exports of the code that runs now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.compat.versions import TRIED

functorch_is_active: Callable[[], bool] = TRIED.find("torch._C:_are_functorch_transforms_active")
"""Tell whether code runs inside ``torch.func`` (``vmap``, ``grad`` and the like)."""

is_jit_traced: Callable[[], bool] = TRIED.find("torch.jit:is_tracing")
"""Tell whether ``torch.jit.trace`` runs."""

_is_batch: Any = TRIED.find("torch._C:_functorch.is_batchedtensor")
_is_legacy_batch: Any = TRIED.find("torch._C:_functorch.is_legacy_batchedtensor")


def is_transformed() -> bool:
    """Tell whether ``torch.func``, forward-mode differentiation or ``torch.jit.trace`` sees the ops that run."""
    return functorch_is_active() or forward_ad._current_level >= 0 or is_jit_traced()


def is_exporting() -> bool:
    """Tell whether ``torch.export`` runs. ``torch.compiler.is_exporting`` is true in all that torch 2.11 compiles."""
    return torch.compiler._is_exporting_flag


def is_batched(tensor: Tensor) -> bool:
    """Tell whether a tensor stands for a batch of them, under ``vmap`` or in ``is_grads_batched``."""
    return _is_legacy_batch(tensor) or _is_batch(tensor)
