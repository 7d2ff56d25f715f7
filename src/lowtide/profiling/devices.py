"""The device table: rates of GPUs, for predictions on machines without them."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from lowtide.errors import TraceError


@dataclass(frozen=True, slots=True)
class Device:
    """Rates of one device. Rates are what large kernels reach, in operations and bytes per second."""

    name: str
    memory_bytes: int
    bandwidth: float  # bytes per second, read plus written
    rates: dict[str, float]  # dtype -> floating-point operations per second of a large matrix product
    launch_seconds: float  # the least that an op takes
    host_bandwidth: float  # pinned copies, each way


_T = 1e12
_GIB = 2**30

# Datasheet figures times 0.8 for matrix products and 0.88 for memory. The H200 was measured to reach these shares: 788
# of 990 TFLOP/s, 4.23 of 4.8 TB/s. The rate of float32 is that of TF32 where a device has it: cuDNN's convolutions use
# it by default.
DEVICES: dict[str, Device] = {
    "cpu": Device("CPU", 16 * _GIB, 2e10, {"float32": 1e11, "bfloat16": 5e10, "float16": 2e10}, 5e-6, 2e10),
    "t4": Device(
        "NVIDIA T4", 15 * _GIB, 0.28e12, {"float32": 6.5 * _T, "float16": 52 * _T, "bfloat16": 6 * _T}, 6e-6, 6e9
    ),
    "v100": Device(
        "NVIDIA V100", 16 * _GIB, 0.79e12, {"float32": 12.5 * _T, "float16": 100 * _T, "bfloat16": 12 * _T}, 6e-6, 12e9
    ),
    "a100": Device(
        "NVIDIA A100", 40 * _GIB, 1.37e12, {"float32": 125 * _T, "float16": 250 * _T, "bfloat16": 250 * _T}, 5e-6, 24e9
    ),
    "h100": Device(
        "NVIDIA H100", 80 * _GIB, 2.95e12, {"float32": 390 * _T, "float16": 790 * _T, "bfloat16": 790 * _T}, 5e-6, 55e9
    ),
    "h200": Device(
        "NVIDIA H200", 139 * _GIB, 4.23e12, {"float32": 390 * _T, "float16": 790 * _T, "bfloat16": 790 * _T}, 5e-6, 55e9
    ),
}  # fmt: skip


def find_device(name: str) -> Device:
    """Look a device up: ``cpu``, ``h200``, or ``cuda`` for the GPU of this machine (the H200 where there is none)."""
    key = name.lower()
    if key.startswith("cuda"):
        key = "h200"
        if torch.cuda.is_available():
            model = torch.cuda.get_device_name().lower()
            key = next((k for k in DEVICES if k != "cpu" and k in model), key)
    if key not in DEVICES:
        raise TraceError(f"Unknown device {name!r}", hint=f"Use one of {', '.join(DEVICES)}, or cuda.")
    return DEVICES[key]


def hardware_name(device: str) -> str:
    """Name the hardware of a step as people do."""
    if device == "cpu":
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return find_device(device).name
