"""Gradients that wait for the step in 16 or 8 bits, each for itself: they are never all there in full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from lowtide.errors import LowtideError
from lowtide.kernels.adamw8bit import random_bits
from lowtide.kernels.reference.adamw8bit import BLOCK, blocks_as_rows, round_by
from lowtide.optim.hooks import (
    StepPart,
    refuse_unsharded,
    refuse_where,
    take_part,
    trainable_parameters,
    use_gradients,
)
from lowtide.optim.in_backward import is_stepped_in_backward
from lowtide.optim.one_parameter import SingleStep, parameters_in
from lowtide.undo import Undo

Bits = Literal["16bit", "8bit"]
_Packed8 = tuple[Tensor, Tensor]
_Packed = tuple[Tensor, Tensor | None]  # bfloat16, or int8 with the scales of its blocks; both flat

PIECES = {"cpu": 2**16, "cuda": 2**20}  # values packed at a time: what caches hold; few launches
COUNT = "gradient_roundings"  # in the optimizer's first group, and so in its ``state_dict``


def store_gradients(optimizer: torch.optim.Optimizer, bits: Bits = "16bit", *, seed: int = 0) -> Undo:
    """Keep gradients in bfloat16 or in 8-bit blocks of 256 from when they are made until the step; right on average.

    ``backward`` leaves ``p.grad`` at None and ``optimizer.step()`` unpacks a parameter at a time. Several backwards
    before a step are summed, each sum rounded stochastically. Whoever reads ``p.grad`` in between finds none, and
    torch's clipping raises. ``optimizer.zero_grad()`` frees them; ``model.zero_grad()`` knows nothing of them. The
    undo puts what waits for a step into ``p.grad``. Keep a reference to the optimizer: once it is freed without an
    undo, ``backward`` raises.
    """
    if bits not in ("16bit", "8bit"):
        raise LowtideError(f"Gradients cannot be kept in {bits!r}", hint='Pass "16bit" or "8bit".')
    parameters = trainable_parameters(optimizer)
    if any(p.is_complex() for p in parameters):
        raise LowtideError("Gradients of complex parameters are not stored in less", hint="Use another technique.")
    if any(map(is_stepped_in_backward, parameters)):
        raise LowtideError(
            "Parameters that are stepped in backward have no gradients to keep",
            hint="Use stored gradients or steps in backward, not both.",
        )
    refuse_unsharded(parameters)
    refuse_where(optimizer, "needs_gradients", "stored gradients")
    store = GradientStore(optimizer, bits, seed)
    with Undo(store.give_back) as undo:
        undo.add(take_part(optimizer, store))
        undo.add(store.forget_at_zero_grad(optimizer))
        optimizer.param_groups[0].setdefault(COUNT, 0)
        undo.add(lambda: optimizer.param_groups[0].pop(COUNT, None))  # loading a state replaces the group
        undo.add(use_gradients(optimizer, store))
        return undo.keep()


class GradientStore(StepPart):
    """Packs gradients in backward, and unpacks them one at a time in the step."""

    needs_step = "Stored gradients wait for the step"
    leaves_no_gradient = "has its gradient stored until the step"

    def __init__(self, optimizer: torch.optim.Optimizer, bits: Bits, seed: int) -> None:
        super().__init__(optimizer)
        self.bits: Bits = bits
        self.seed = seed
        self.packed: dict[Tensor, _Packed] = {}
        self.used: list[Tensor] = []  # parameters that the last step unpacked

    def __str__(self) -> str:
        return f"gradients in {self.bits}"

    def forget_at_zero_grad(self, optimizer: torch.optim.Optimizer) -> Undo:
        """Have ``optimizer.zero_grad()`` free stored gradients, too."""
        plain, attributes = optimizer.zero_grad, vars(optimizer)

        def zero_grad(set_to_none: bool = True) -> None:
            self.packed.clear()
            plain(set_to_none)

        attributes["zero_grad"] = zero_grad
        return Undo(lambda: attributes.pop("zero_grad", None))

    def of(self, optimizer: torch.optim.Optimizer) -> GradientStore:
        """The hook for a copy of the optimizer, over other parameters: itself."""
        return self

    def set_aside(self) -> Undo:
        """Begin without gradients, as a trace does; the undo restores those that wait now."""
        waiting, self.packed = self.packed, {}

        def restore() -> None:
            self.packed = waiting

        return Undo(restore)

    def give_back(self) -> None:
        """Put what waits for a step where it would be without."""
        for parameter, packed in self.packed.items():
            parameter.grad = unpack(packed, parameter).to(parameter.dtype)
        self.packed.clear()

    def __call__(self, parameter: Tensor) -> None:
        """Pack a gradient that was accumulated, and add it to the stored one."""
        refuse_unsharded([parameter])  # processes may have been started since
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise LowtideError(
                f"A gradient with layout {gradient.layout} is not stored in {self.bits}",
                hint="Make the layer's gradients dense: sparse=False.",
            )
        group = self.single.optimizer.param_groups[0]
        group[COUNT] = group.get(COUNT, 0) + 1  # a state that was saved without has none
        seed = (self.seed * 2654435761 + group[COUNT]) % 2**31
        with torch.no_grad():
            self.packed[parameter] = pack(gradient, self.bits, seed=seed, onto=self.packed.get(parameter))
        parameter.grad = None

    def ready(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [p for p in parameters_in(optimizer) if p in self.packed]

    def run(self, single: SingleStep, parameters: list[Tensor]) -> None:
        if single is self.single:  # and no copy of a trace
            self.used = parameters
        for parameter in parameters:
            gradient = unpack(self.packed.pop(parameter), parameter)
            parameter.grad = gradient.to(parameter.dtype)
            single(parameter)
            parameter.grad = None


def pack(gradient: Tensor, bits: Bits, *, seed: int, onto: _Packed | None = None) -> _Packed:
    """Round a gradient stochastically, right on average, added to a stored one, ``onto``.

    A piece at a time, so that what lies between is small beside a large gradient.
    """
    flat = gradient.reshape(-1)
    codes = torch.empty_like(flat, dtype=torch.bfloat16 if bits == "16bit" else torch.int8)
    scale = None if bits == "16bit" else torch.empty(-(-flat.numel() // BLOCK), dtype=torch.float32, device=flat.device)
    for number, (start, end) in enumerate(_pieces(flat)):
        wide = flat[start:end].float()
        if onto is not None:
            wide = wide + _unpacked(onto, start, end)
        each = (seed + number * 97003) % 2**31
        if scale is None:
            codes[start:end] = round_by(wide, random_bits(wide, each))
        else:
            rounded, scale[start // BLOCK : -(-end // BLOCK)] = _to_8_bits(wide, each)
            codes[start:end] = rounded
    return codes, scale


def unpack(packed: _Packed, like: Tensor) -> Tensor:
    """The gradient in float32."""
    whole = torch.empty(like.shape, dtype=torch.float32, device=packed[0].device)
    flat = whole.view(-1)
    for start, end in _pieces(flat):
        flat[start:end] = _unpacked(packed, start, end)
    return whole


def packed_bytes(count: int, bits: Bits) -> int:
    """Return the bytes of a stored gradient of so many values."""
    return 2 * count if bits == "16bit" else count + 4 * -(-count // BLOCK)


def _pieces(flat: Tensor) -> Iterator[tuple[int, int]]:
    size = PIECES.get(flat.device.type, PIECES["cuda"])
    for start in range(0, flat.numel(), size):
        yield start, min(start + size, flat.numel())


def _to_8_bits(wide: Tensor, seed: int) -> _Packed8:
    rows = blocks_as_rows(wide)
    scale = rows.abs().amax(1)
    share = rows / torch.where(scale == 0, 1.0, scale)[:, None] * 127
    noise = random_bits(share, seed).float() / 65536
    return (share + noise).floor().clamp(-127, 127).to(torch.int8).view(-1)[: wide.numel()], scale


def _unpacked(packed: _Packed, start: int, end: int) -> Tensor:
    """Some of the values in float32; ``start`` is the first of a block."""
    codes, scale = packed[0][start:end], packed[1]
    if scale is None:
        return codes.float()
    share = blocks_as_rows(codes).float() / 127
    return (share * scale[start // BLOCK : -(-end // BLOCK), None]).view(-1)[: codes.numel()]
