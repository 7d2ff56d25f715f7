"""Gradients that wait for the step in 16 or 8 bits, each for itself: they are never all there in full."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lowtide.errors import LowtideError
from lowtide.kernels.adamw8bit import random_bits
from lowtide.kernels.reference.adamw8bit import BLOCK, round_by
from lowtide.optim.hooks import StepPart, refuse_scaled, take_part
from lowtide.optim.in_backward import is_stepped_in_backward
from lowtide.optim.single import SingleStep
from lowtide.techniques.technique import Undo

Bits = Literal["16bit", "8bit"]
_Packed = tuple[Tensor, Tensor | None]  # bfloat16, or int8 with the scales of its blocks

COUNT = "gradient_roundings"  # in the optimizer's first group, and so in what is saved


def store_gradients(optimizer: torch.optim.Optimizer, bits: Bits = "16bit", *, seed: int = 0) -> Undo:
    """Keep gradients in bfloat16 or in 8-bit blocks of 256 from when they are made until the step; right on average.

    ``backward`` leaves ``p.grad`` at None and ``optimizer.step()`` unpacks a parameter at a time. Several backwards
    before a step are summed, each sum rounded stochastically. Whoever reads ``p.grad`` in between, such as clipping by
    the norm, finds none. ``optimizer.zero_grad()`` lets them go; ``model.zero_grad()`` knows nothing of them.
    """
    if bits not in ("16bit", "8bit"):
        raise LowtideError(f"Gradients cannot be kept in {bits!r}", hint='Pass "16bit" or "8bit".')
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(map(is_stepped_in_backward, parameters)):
        raise LowtideError("Parameters that are stepped in backward have no gradients to keep")
    refuse_scaled(optimizer, "stored gradients")
    store = GradientStore(optimizer, bits, seed)
    undo = take_part(optimizer, store)
    undo.add(store.forget_at_zero_grad(optimizer))
    undo.add(lambda: optimizer.param_groups[0].pop(COUNT, None))
    for parameter in parameters:
        undo.add(parameter.register_post_accumulate_grad_hook(store).remove)
    return undo


class GradientStore(StepPart):
    """Takes gradients when they are made, and gives them back one at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer, bits: Bits, seed: int) -> None:
        super().__init__(optimizer)
        self.bits: Bits = bits
        self.seed = seed
        self.packed: dict[Tensor, _Packed] = {}
        optimizer.param_groups[0].setdefault(COUNT, 0)

    def __str__(self) -> str:
        return f"gradients in {self.bits}"

    def forget_at_zero_grad(self, optimizer: torch.optim.Optimizer) -> Undo:
        """Have ``optimizer.zero_grad()`` let go of what is stored, too."""
        plain, attributes = optimizer.zero_grad, vars(optimizer)

        def zero_grad(set_to_none: bool = True) -> None:
            self.packed.clear()
            plain(set_to_none)

        attributes["zero_grad"] = zero_grad
        return Undo(lambda: attributes.pop("zero_grad", None))

    def of(self, optimizer: torch.optim.Optimizer) -> GradientStore:
        """The hook for a copy of the optimizer, over other parameters: itself."""
        return self

    def __call__(self, parameter: Tensor) -> None:
        """Runs when a gradient is there: pack it, with what is there already."""
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        with torch.no_grad():
            wide = gradient.float()
            if parameter in self.packed:
                wide = wide + unpack(self.packed.pop(parameter), parameter)
            group = self.single.optimizer.param_groups[0]
            group[COUNT] = group.get(COUNT, 0) + 1  # a state that was saved without has none
            self.packed[parameter] = pack(wide, self.bits, seed=(self.seed * 2654435761 + group[COUNT]) % 2**31)

    def ready(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"] if p in self.packed]

    def run(self, single: SingleStep, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            gradient = unpack(self.packed.pop(parameter), parameter)
            parameter.grad = gradient.to(parameter.dtype)
            single(parameter)
            parameter.grad = None


def pack(gradient: Tensor, bits: Bits, *, seed: int) -> _Packed:
    """Round a float32 gradient stochastically: right on average."""
    if bits == "16bit":
        return round_by(gradient, random_bits(gradient, seed)), None
    flat = gradient.reshape(-1)
    missing = -flat.numel() % BLOCK
    rows = torch.nn.functional.pad(flat, (0, missing)).view(-1, BLOCK)
    scale = rows.abs().amax(1)
    share = rows / torch.where(scale == 0, 1.0, scale)[:, None] * 127
    noise = random_bits(share, seed).float() / 65536
    codes = (share + noise).floor().clamp(-127, 127).to(torch.int8)
    return codes.view(-1)[: flat.numel()].clone(), scale


def unpack(packed: _Packed, like: Tensor) -> Tensor:
    """The gradient in float32."""
    codes, scale = packed
    if scale is None:
        return codes.float()
    missing = -codes.numel() % BLOCK
    rows = torch.nn.functional.pad(codes, (0, missing)).view(-1, BLOCK).float()
    return (rows / 127 * scale[:, None]).view(-1)[: codes.numel()].view(like.shape)
