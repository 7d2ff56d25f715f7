"""Fake tensors: tensors without values, and the mode that answers for them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from lowtide.compat.versions import CAPTURE, TRIED

FAKE_KERNELS = "torch._subclasses.fake_tensor"
"""The logger that prints the stack of a failing fake kernel before it raises."""


if TYPE_CHECKING:
    from torch._subclasses import fake_tensor

    DataDependentOutputException = fake_tensor.DataDependentOutputException
    DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
    FakeTensor = fake_tensor.FakeTensor
    FakeTensorMode = fake_tensor.FakeTensorMode
else:
    FakeTensor = TRIED.find(f"{FAKE_KERNELS}:FakeTensor")
    """A tensor without values, on a device that need not be here."""

    FakeTensorMode = TRIED.find(f"{FAKE_KERNELS}:FakeTensorMode")
    """The mode that computes the shapes of fake tensors."""

    DataDependentOutputException = TRIED.find(f"{FAKE_KERNELS}:DataDependentOutputException")
    """Raised by an op whose result needs values, such as ``item()``."""

    DynamicOutputShapeException = TRIED.find(f"{FAKE_KERNELS}:DynamicOutputShapeException")
    """Raised by an op whose result's shape needs values, such as ``nonzero()``."""

fake_dispatch: Any = CAPTURE.find(f"{FAKE_KERNELS}:FakeTensorMode.dispatch")
"""Run one op over fake tensors, as torch does: takes the mode, the op, the types and the arguments."""


@CAPTURE
def replace_dispatch(function: Any) -> None:
    """Have every fake mode, those of Dynamo too, run each op by ``function``. Pass ``fake_dispatch`` to restore."""
    mode: Any = FakeTensorMode
    mode.dispatch = function


@CAPTURE
def captured_fake_mode() -> Any:
    """Make a mode of fake tensors like Dynamo's. Inductor stores code on disk only for modes with an environment."""
    environment = import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv
    return FakeTensorMode(shape_env=environment())


@TRIED
def current_fake_mode() -> Any:
    """Return the active mode of fake tensors, or None."""
    torch_c: Any = torch._C
    return torch_c._get_dispatch_mode(torch_c._TorchDispatchModeKey.FAKE)
