"""States in 4 bits, by torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.errors import MissingExtra
from lowtide.optim.single import PLAIN_STATES
from lowtide.techniques.technique import Undo


class Adam4bit:
    """What it takes to make torch's Adam or AdamW torchao's with 4-bit states.

    torchao compiles its step, which needs a C++ compiler on a CPU (or the environment variable TORCHDYNAMO_DISABLE=1),
    and wants the rate as a tensor, which schedulers fill.
    """

    def __init__(self, *, decoupled: bool) -> None:
        try:
            from torchao import optim
        except ImportError as error:
            raise MissingExtra("torchao", extra="optim") from error
        base: Any = optim.AdamW4bit if decoupled else optim.Adam4bit
        self.optimizer: Any = _steps_drop_plain_states(base)([torch.empty(0)], lr=1e-3)

    def lowered(self, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The state of torch's AdamW for one parameter, in 4 bits; nothing where there is none yet."""
        if "exp_avg" not in state:
            return {}
        found: dict[str, Any] = {"step": torch.tensor(float(state["step"]))}
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            found[key] = self.optimizer._new_buffer(p, signed)
            found[key].copy_(state[key])
        return found

    def raised(self, p: Tensor, state: dict[str, Any], *, fused: bool) -> dict[str, Any]:
        """The state of torch's AdamW again."""
        if "exp_avg" not in state:
            return {}
        found: dict[str, Any] = {"step": state["step"].to(p.device) if fused else state["step"].clone()}
        for key in ("exp_avg", "exp_avg_sq"):
            value = state[key]
            whole = value.dequantize() if hasattr(value, "dequantize") and type(value) is not Tensor else value
            found[key] = torch.empty_like(p).copy_(whole)
        return found

    def rates_as_tensors(self, optimizer: torch.optim.Optimizer) -> Undo:
        """Rates as torchao wants them, and as numbers again."""
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)

        def restore() -> None:
            for group in optimizer.param_groups:
                group["lr"] = float(group["lr"])

        return Undo(restore)


def _steps_drop_plain_states(base: type) -> type:
    """The class of torchao, whose first step lets go of what the states were before."""

    def step(self: Any, closure: Any = None) -> Any:
        vars(self).pop(PLAIN_STATES, None)
        return base.step(self, closure)

    return type(base.__name__, (base,), {"step": step, "__doc__": base.__doc__})
