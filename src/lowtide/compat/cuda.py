"""CUDA: the current stream, cuDNN's batch norm, and a device guard where there is no GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.versions import CAPTURE, TRIED, Feature
from lowtide.errors import TraceError

_ABSENT_GPU = Feature("predicting a GPU's step without a GPU", error=TraceError)

current_stream: Any = TRIED.find("torch._C:_cuda_getCurrentRawStream")
"""Return the address of a GPU's current stream. Raises where torch has no CUDA."""

USES_CUDNN = "torch.backends.cudnn.is_acceptable"
"""The path of the function that recurrent layers ask whether to lay out weights for cuDNN."""

LACKS_AMP = "torch.cuda.amp.common.amp_definitely_not_available"
"""The path of the function that gradient scalers ask whether to turn themselves off."""

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_CUDA, _META = 1, 14  # c10::DeviceType


@TRIED
def sleep(cycles: int) -> None:
    """Keep the GPU busy for a number of its clock's cycles."""
    torch.cuda._sleep(cycles)


@TRIED
def clear_matmul_workspaces() -> None:
    """Free the memory that cuBLAS keeps for each stream. The next product of matrices takes it anew."""
    torch_c: Any = torch._C
    torch_c._cuda_clearCublasWorkspaces()


@TRIED
def abandon_capture(device: torch.device, pool: Any) -> None:
    """Have torch forget a CUDA graph whose capture failed, as far as it has not: its pool, and the generator's state.

    Otherwise caches can no longer be emptied, and random numbers no longer be drawn.
    """
    torch_c: Any = torch._C
    index = torch.cuda.current_device() if str(device) == "cuda" else device.index
    with suppress(RuntimeError):  # where torch has ended the capture itself
        torch_c._cuda_endAllocateToPool(index, pool)
        torch_c._cuda_releasePool(index, pool)
    generator = torch.cuda.default_generators[index]
    with suppress(RuntimeError):
        generator.graphsafe_set_state(generator.clone_state())  # a clone is not captured


@CAPTURE
def batchnorm_reserve_bytes(x: Tensor) -> int:
    """Return the bytes that cuDNN's batch norm keeps in training for its backward."""
    torch_c: Any = torch._C
    return torch_c._get_cudnn_batch_norm_reserve_space_size(x, True)


@CAPTURE
def takes_cudnn_batchnorm(tensors: Sequence[Tensor], eps: float) -> bool:
    """Tell whether torch takes cuDNN's batch norm in training for an input, weight, bias, mean and variance."""
    torch_c: Any = torch._C
    return torch_c._select_batch_norm_backend(*tensors, True, eps) == torch_c._BatchNormBackend.Cudnn


@contextmanager
def device_guard() -> Generator[None]:
    """Register torch's own do-nothing guard (the meta device's) for CUDA, and remove it after the block.

    A CUDA build of torch does just that for machines without a GPU (``torch._C._ensureCUDADeviceGuardSet``). A CPU
    build has no guard to replace, and autograd ends the process when it finds none.
    """
    if _ABSENT_GPU.is_off:
        raise _ABSENT_GPU.off()
    name = {"linux": "libc10.so", "darwin": "libc10.dylib"}.get(sys.platform, "")
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", name))
        guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    except (OSError, ValueError) as error:
        raise _ABSENT_GPU.off(str(error)) from error
    before = guards[_CUDA]
    if before is None:
        if guards[_META] is None:
            raise TraceError("This build of torch has no meta device", hint="Profile on the CPU: device='cpu'.")
        guards[_CUDA] = guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before
