"""Fake tensors: tensors without values, and the mode that answers for them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor

from lowtide.compat.versions import require_seen
from lowtide.errors import TraceError

_c: Any = torch._C

FakeTensor = fake_tensor.FakeTensor
"""A tensor without values, on a device that need not be here."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""The mode that computes the shapes of fake tensors."""

DataDependentOutputException = fake_tensor.DataDependentOutputException
"""Raised by an op whose result needs values, such as ``item()``."""

DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
"""Raised by an op whose result's shape needs values, such as ``nonzero()``."""

FAKE_KERNELS = fake_tensor.__name__
"""The logger that prints the stack of a failing fake kernel before it raises."""

fake_dispatch: Any = getattr(FakeTensorMode, "dispatch", None)
"""Run one op over fake tensors, as torch does: takes the mode, the op, the types and the arguments."""


def replace_dispatch(function: Any) -> None:
    """Have every fake mode, those of Dynamo too, run each op by ``function``. Pass ``fake_dispatch`` to restore."""
    require_seen("capturing graphs", TraceError)
    mode: Any = FakeTensorMode
    mode.dispatch = function


def current_fake_mode() -> Any:
    """Return the active mode of fake tensors, or None."""
    return _c._get_dispatch_mode(_c._TorchDispatchModeKey.FAKE)
