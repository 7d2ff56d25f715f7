"""Fake tensors: tensors without values, and the mode that answers for them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from lowtide.compat.versions import Feature
from lowtide.errors import TraceError

FAKE_KERNELS = "torch._subclasses.fake_tensor"
"""The logger that prints the stack of a failing fake kernel before it raises."""

_FAKES = Feature("predicting a step", torch=("2.11", "2.13"), python=("3.11", "3.12"), loud=True, error=TraceError)
_CAPTURE = Feature("capturing graphs", torch=("2.11", "2.13"), python=("3.11", "3.12"), error=TraceError)

if TYPE_CHECKING:
    from torch._subclasses import fake_tensor

    DataDependentOutputException = fake_tensor.DataDependentOutputException
    DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
    FakeTensor = fake_tensor.FakeTensor
    FakeTensorMode = fake_tensor.FakeTensorMode
else:
    FakeTensor = _FAKES.find(f"{FAKE_KERNELS}:FakeTensor")
    """A tensor without values, on a device that need not be here."""

    FakeTensorMode = _FAKES.find(f"{FAKE_KERNELS}:FakeTensorMode")
    """The mode that computes the shapes of fake tensors."""

    DataDependentOutputException = _FAKES.find(f"{FAKE_KERNELS}:DataDependentOutputException")
    """Raised by an op whose result needs values, such as ``item()``."""

    DynamicOutputShapeException = _FAKES.find(f"{FAKE_KERNELS}:DynamicOutputShapeException")
    """Raised by an op whose result's shape needs values, such as ``nonzero()``."""

fake_dispatch: Any = _CAPTURE.find(f"{FAKE_KERNELS}:FakeTensorMode.dispatch")
"""Run one op over fake tensors, as torch does: takes the mode, the op, the types and the arguments."""


@_CAPTURE
def replace_dispatch(function: Any) -> None:
    """Have every fake mode, those of Dynamo too, run each op by ``function``. Pass ``fake_dispatch`` to restore."""
    mode: Any = FakeTensorMode
    mode.dispatch = function


@_CAPTURE
def captured_fake_mode() -> Any:
    """Make a mode of fake tensors like Dynamo's. Inductor stores code on disk only for modes with an environment."""
    environment = import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv
    return FakeTensorMode(shape_env=environment())


@_FAKES
def current_fake_mode() -> Any:
    """Return the active mode of fake tensors, or None."""
    torch_c: Any = torch._C
    return torch_c._get_dispatch_mode(torch_c._TorchDispatchModeKey.FAKE)
