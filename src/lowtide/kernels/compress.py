"""Few-bit storage of a tensor in groups by the kernels that fit it: Triton's on a GPU, ATen's elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.compat.fake import FakeTensor
from lowtide.errors import LowtideError
from lowtide.kernels import launches
from lowtide.kernels.reference import compress as reference
from lowtide.kernels.reference.compress import UNIT, buffer_bytes

__all__ = ["BITS", "DTYPES", "GROUP", "Draws", "buffer_bytes", "check", "compress", "decompress"]

BITS = (2, 4, 8)
GROUP = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Draws:
    """Random numbers for one tensor after the other, the same again from the same seed; no GPU is waited for."""

    def __init__(self, seed: int) -> None:
        self.seed = seed & (2**62 - 1)
        self.calls = 0
        self._seeds: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The seed where a kernel reads it. A captured CUDA graph draws a new one each time it is replayed."""
        if device not in self._seeds:
            captured = device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            self._seeds[device] = (
                torch.randint(2**62, (), device=device)
                if captured
                else torch.full((), self.seed, dtype=torch.int64, device=device)
            )
        return self._seeds[device]

    def noise(self, x: Tensor, group: int) -> reference.Noise:
        """By torch's own generator, which is faster than Philox in ATen. Fake tensors draw from none."""
        generator = None if isinstance(x, FakeTensor) else torch.Generator(x.device).manual_seed(self.seed + self.calls)

        def noise(_first: int, count: int) -> Tensor:
            empty = torch.empty(count, group, dtype=torch.int32, device=x.device)
            return empty.random_(0, UNIT, generator=generator)

        return noise


def compress(x: Tensor, draws: Draws, *, bits: int, group: int = GROUP) -> Tensor:
    """A flat, contiguous tensor as ``buffer_bytes(...)`` bytes, rounded at random: right on average.

    >>> x = torch.linspace(0, 1, 512)
    >>> stored = compress(x, Draws(0), bits=8)
    >>> stored.nbytes, (decompress(stored, 512, x.dtype, bits=8) - x).abs().max() < 0.5 / 254
    (528, tensor(True))
    """
    check(bits, group)
    if not x.numel():
        return x.new_empty(0, dtype=torch.uint8)
    draws.calls += 1
    fast = launches.fast_kernels("compress", x)
    if fast is not None:
        return fast.compress(x, bits, group, draws.on(x.device), draws.calls)
    return reference.compress(x, bits, group, draws.noise(x, group))


def decompress(buffer: Tensor, numel: int, dtype: torch.dtype, *, bits: int, group: int = GROUP) -> Tensor:
    """Decompress to a flat tensor. Each value is within a step of the original."""
    if not numel:
        return buffer.new_empty(0, dtype=dtype)
    kernels = launches.fast_kernels("compress", buffer, dtype) or reference
    return kernels.decompress(buffer, numel, dtype, bits, group)


def check(bits: int, group: int) -> None:
    """Refuse what cannot be packed."""
    if bits not in BITS or not 64 <= group <= 4096 or group & (group - 1):
        raise LowtideError(
            f"bits={bits}, group={group} cannot be stored",
            hint="bits is 2, 4 or 8; group is a power of two from 64 to 4096.",
        )
