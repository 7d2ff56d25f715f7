"""Identity of a training step: its model, its batch, its optimizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.batches import tensors
from lowtide.workload import Workload


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The step of a plan or a profile.

    Two steps with equal fingerprints need the same memory, as far as modules, batch and optimizer can tell. The code
    of ``forward`` and of the loss function is not compared.
    """

    model: str  # hash of the names, shapes and dtypes of parameters and buffers, and of what is trained
    modules: str  # hash of the names and types of modules
    batch: str
    optimizer: str
    autocast: str

    @classmethod
    def of(cls, work: Workload) -> Fingerprint:
        named = (*work.model.named_parameters(), *work.model.named_buffers())
        return cls(
            model=_digest(f"{name} {list(t.shape)} {t.dtype} {t.requires_grad}" for name, t in named),
            modules=_digest(f"{name} {_type(module)}" for name, module in work.model.named_modules()),
            batch=batch_shapes(work.batch),
            optimizer="none" if work.optimizer is None else _optimizer(work.optimizer),
            autocast="none" if work.autocast is None else _dtype(work.autocast),
        )

    def difference(self, other: Fingerprint, *, was: str) -> str:
        """Say in words how another step differs from this one, which ``was`` planned or profiled; "" if equal."""
        if other.model != self.model:
            return (
                "another model: names, shapes or dtypes of parameters and buffers differ, or which of them are trained"
            )
        if other.modules != self.modules:
            return "another model: its modules are of other types, or set otherwise"
        for what in ("batch", "optimizer", "autocast"):
            ours, theirs = getattr(self, what), getattr(other, what)
            if ours != theirs:
                return f"another {what}: {ours or 'no tensor'} was {was}, {theirs or 'no tensor'} is given"
        return ""


def batch_shapes(batch: Any) -> str:
    """Dtypes and shapes of a batch's tensors.

    >>> batch_shapes((torch.zeros(2, 3), {"y": torch.zeros(2, dtype=torch.int64)}))
    'float32[2, 3], int64[2]'
    """
    return ", ".join(f"{_dtype(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors(batch))


def _type(module: nn.Module) -> str:
    """A module's class, without FSDP2's subclass; for torch's modules also their settings, such as strides."""
    kind = next(each for each in type(module).__mro__ if all(base.__name__ != "FSDPModule" for base in each.__mro__))
    is_torchs = kind.__module__.startswith("torch.nn.modules.")  # another's text may hold values that change
    return f"{kind.__name__}({module.extra_repr() if is_torchs else ''})"


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    """The class, and how many numbers are stepped with which knobs on. Rates may change, a scheduler may come."""
    sizes: dict[str, int] = {}
    for group in optimizer.param_groups:
        knobs = [_knob(name, group.get(name)) for name in sorted(optimizer.defaults) if not name.endswith("lr")]
        on = ", ".join(knob for knob in knobs if knob)
        sizes[on] = sizes.get(on, 0) + sum(parameter.numel() for parameter in group["params"])
    groups = "; ".join(f"{size} numbers{on and ': '}{on}" for on, size in sorted(sizes.items()))
    return f"{type(optimizer).__name__}({groups})"


def _knob(name: str, value: Any) -> str:
    if value is False and name in ("foreach", "fused"):  # None leaves that to torch
        return f"no {name}"
    return name if value else ""


def _digest(parts: Any) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
