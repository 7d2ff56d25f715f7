"""Memory that nvidia-smi shows above the allocated bytes: the allocator's reserve, the context, other processes."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from lowtide.profiling.profile import Outside


def read_outside(device: torch.device) -> Outside | None:
    """Read this memory for a CUDA device; None elsewhere. Through NVML where it is installed (the extra ``gpu``)."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    ours = _process_bytes(device)
    if ours is None:  # without NVML, the context cannot be told from other processes
        return Outside(torch.cuda.max_memory_reserved(device), 0, max(0, total - free - reserved), total)
    context = max(0, ours - reserved)
    return Outside(torch.cuda.max_memory_reserved(device), context, max(0, total - free - ours), total)


def _process_bytes(device: torch.device) -> int | None:
    """Bytes of this process as the driver counts them."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    except Exception:  # NVML is an extra: in a container or without rights it may refuse in many ways
        return None
    return None
