"""A training step as a value: the model, its loss, one batch, the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowtide.batches import tensors as tensors_of
from lowtide.compat.autograd import close_checkpoints
from lowtide.compat.messages import is_about_inference
from lowtide.errors import WorkloadError


@dataclass(frozen=True, eq=False)
class Workload:
    """One training step. ``loss(model, batch)`` returns a scalar with a graph.

    ``batch`` is any structure of tensors: a pytree, another mapping (a tokenizer's encoding), an object that has them.
    ``autocast`` is the dtype to run the loss under (``torch.bfloat16``, ``torch.float16``), or None.
    An optimizer that only wraps another, as accelerate's does after ``prepare``, is replaced by the inner one.
    The model, the batch and the optimizer stay the caller's.

    >>> model = nn.Linear(4, 1)
    >>> work = Workload(model, lambda model, batch: model(batch).mean(), torch.zeros(2, 4))
    >>> work.device
    device(type='cpu')
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Any
    optimizer: torch.optim.Optimizer | None = None
    autocast: torch.dtype | None = None
    name: str = ""
    captures: Captures = field(default_factory=lambda: Captures(), init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise WorkloadError(
                f"The model is a {type(self.model).__name__}, not a torch.nn.Module",
                hint="Write Workload(model, loss, batch, optimizer).",
            )
        if not callable(self.loss):
            raise WorkloadError(
                f"The loss is a {type(self.loss).__name__}, not a function",
                hint="Write def loss(model, batch): ... that returns a scalar.",
            )
        if self.optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise WorkloadError(
                f"The optimizer is a {type(self.optimizer).__name__}, not a torch.optim.Optimizer",
                hint="Pass the optimizer itself, or None to leave its memory out.",
            )
        object.__setattr__(self, "optimizer", _unwrapped(self.optimizer))
        if self.optimizer is not None and not _steps(self.optimizer, self.model):
            raise WorkloadError(
                "The optimizer steps none of the model's parameters: it is that of another model",
                hint="Make it from model.parameters() of this model.",
            )
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise WorkloadError(
                f"Cannot autocast to {self.autocast!r}",
                hint="Pass torch.bfloat16, torch.float16, or None.",
            )
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if is_lazy(tensor):
                raise WorkloadError(
                    f"The model's {name} has no shape yet: its module is lazy",
                    hint="Run one forward first: model(x), then Workload(model, ...).",
                )
        devices = {str(tensor.device) for tensor in self.tensors()} - {str(self.device)}
        if devices:
            raise WorkloadError(
                f"The batch is on {', '.join(sorted(devices))} and the model on {self.device}",
                hint=f"Move the batch: batch.to({str(self.device)!r}).",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "captures": Captures()}  # compiled code belongs to this step: a copy has none

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters (of the batch, if it has none)."""
        for tensors in (self.model.parameters, self.model.buffers, self.tensors):
            for tensor in tensors():
                return tensor.device
        raise WorkloadError("Neither the model nor the batch holds a tensor", hint="Pass a batch of tensors.")

    def tensors(self) -> list[Tensor]:
        """The tensors of the batch."""
        return tensors_of(self.batch)

    def compute_loss(self, model: nn.Module | None = None, batch: Any = None) -> Tensor:
        """Run the forward pass, under autocast if asked, and return the checked loss."""
        model = self.model if model is None else model
        batch = self.batch if batch is None else batch
        try:
            with autocast(self.device.type, self.autocast):
                loss = self.loss(model, batch)
        except Exception as error:
            close_checkpoints(error)
            frozen = [tensor for tensor in tensors_of(batch) if tensor.is_inference()]
            if not frozen or not is_about_inference(error):
                raise
            raise WorkloadError(
                f"The batch's tensor of shape {list(frozen[0].shape)} was made under torch.inference_mode(), "
                "and can be neither saved for backward nor written to",
                where=place_of(self.loss),
                hint="Make the batch outside of it, or pass batch.clone().",
            ) from error
        return check_loss(loss, where=place_of(self.loss))


@dataclass(eq=False)
class Captures:
    """Captured losses of a step that planning leaves for an engine, while a call of lowtide's shares them."""

    shared: bool = False
    losses: list[Any] = field(default_factory=list[Any])
    refused: str = ""  # why the loss was not captured, so that the call does not try again


def check_workload(work: object, *, call: str) -> Workload:
    """Return the step if it can be traced. The error shows how to write the ``call``."""
    if not isinstance(work, Workload):
        raise WorkloadError(
            f"The step is a {type(work).__name__}, not a Workload",
            hint=f"Write {call} with work = lowtide.Workload(model, loss, batch, optimizer).",
        )
    if any(tensor.grad_fn is not None for tensor in work.tensors()):
        raise WorkloadError(
            "The batch was made by ops that are recorded for backward, and a trace would use that up",
            hint="Detach it (batch.detach()), or make it inside of the loss.",
        )
    return work


def check_loss(loss: object, *, where: str = "") -> Tensor:
    """Return the loss if a backward pass can start from it; otherwise say what to write."""
    if not isinstance(loss, Tensor):
        raise WorkloadError(
            f"The loss function returned a {type(loss).__name__}, not a tensor",
            where=where,
            hint="Return the loss alone, for example F.cross_entropy(model(x), y).",
        )
    if loss.numel() != 1:
        raise WorkloadError(
            f"The loss has shape {list(loss.shape)}, not a scalar",
            where=where,
            hint="Return loss.mean() or loss.sum().",
        )
    if loss.is_complex():
        raise WorkloadError(
            f"The loss is a complex number ({loss.dtype}), and gradients are of a real one",
            where=where,
            hint="Return loss.abs() or loss.real.",
        )
    if not loss.requires_grad:
        raise WorkloadError(
            "The loss has no graph: nothing in it requires a gradient",
            where=where,
            hint="Leave out torch.no_grad(), .detach() and .item(), and check requires_grad of the parameters.",
        )
    return loss


@contextlib.contextmanager
def autocast(device_type: str, dtype: torch.dtype | None) -> Generator[None]:
    """Autocast to ``dtype``, or nothing when it is None."""
    if dtype is None:
        yield
        return
    with torch.autocast(device_type, dtype=dtype):
        yield


def _steps(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Tell whether an optimizer has a parameter of the model; True if either has none."""
    own = {id(parameter) for parameter in model.parameters()}
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return not own or not stepped or not own.isdisjoint(stepped)


def _unwrapped(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return the optimizer behind wrappers whose groups and state are properties that forward to it."""
    inner = vars(optimizer).get("optimizer") if optimizer is not None else None
    if not isinstance(inner, torch.optim.Optimizer) or not {"param_groups", "state"}.isdisjoint(vars(optimizer)):
        return optimizer
    return _unwrapped(inner)


def place_of(function: object) -> str:
    """File and line of a function; "" for a callable object."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
