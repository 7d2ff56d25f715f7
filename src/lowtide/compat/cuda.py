"""CUDA: the current device and stream, cuDNN's batch norm, and a device guard where there is no GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.versions import require_seen
from lowtide.errors import TraceError

_c: Any = torch._C

current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
"""Return the index of the current GPU. None where torch has no CUDA."""

current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Return the address of a GPU's current stream. None where torch has no CUDA."""

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_CUDA, _META = 1, 14  # c10::DeviceType


def sleep(cycles: int) -> None:
    """Keep the GPU busy for a number of its clock's cycles."""
    torch.cuda._sleep(cycles)


def batchnorm_reserve_bytes(x: Tensor) -> int:
    """Return the bytes that cuDNN's batch norm keeps in training for its backward."""
    return _c._get_cudnn_batch_norm_reserve_space_size(x, True)


def takes_cudnn_batchnorm(tensors: Sequence[Tensor], eps: float) -> bool:
    """Tell whether torch takes cuDNN's batch norm in training for an input, weight, bias, mean and variance."""
    return _c._select_batch_norm_backend(*tensors, True, eps) == _c._BatchNormBackend.Cudnn


@contextmanager
def device_guard() -> Generator[None]:
    """Register torch's own do-nothing guard (the meta device's) for CUDA, and remove it after the block.

    A CUDA build of torch does just that for machines without a GPU (``torch._C._ensureCUDADeviceGuardSet``). A CPU
    build has no guard to replace, and autograd ends the process when it finds none.
    """
    require_seen("predicting a GPU's step without a GPU", TraceError)
    name = {"linux": "libc10.so", "darwin": "libc10.dylib"}.get(sys.platform, "")
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", name))
        guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    except (OSError, ValueError) as error:
        raise TraceError(
            f"This build of torch ({torch.__version__}) cannot predict a GPU's step without a GPU",
            hint="Profile on the CPU (device='cpu'), or on a machine with the GPU.",
        ) from error
    before = guards[_CUDA]
    if before is None:
        if guards[_META] is None:
            raise TraceError("This build of torch has no meta device", hint="Profile on the CPU: device='cpu'.")
        guards[_CUDA] = guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before
