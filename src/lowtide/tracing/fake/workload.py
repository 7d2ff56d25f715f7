"""A step without memory or compute: the model, the batch and the optimizer as fake tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.batches import map_tensors
from lowtide.compat.autograd import gradient_hooks
from lowtide.compat.dispatch import is_wrapper
from lowtide.compat.fake import FakeTensor, FakeTensorMode
from lowtide.compat.modules import flat_weights, own_buffers, own_parameters, set_flat_weights
from lowtide.compat.optimizers import FOREACH_TYPES
from lowtide.compat.tensors import storage_id
from lowtide.errors import TraceError
from lowtide.tracing.snapshot import Restoring
from lowtide.tracing.step_state import modules_of
from lowtide.undo import Undo
from lowtide.workload import Workload


@contextmanager
def fake_workload(work: Workload, mode: FakeTensorMode, device: torch.device) -> Generator[Workload]:
    """Give the step on fake tensors on ``device``. Allocates nothing and restores the original after.

    The model object is the caller's own, with its parameters and buffers swapped for fakes while inside. Its hooks,
    overrides and patched ``forward`` take part. Tied weights stay tied.
    """
    twins = _Twins(mode, device)
    with Restoring() as restoring:
        for module in modules_of(work):
            held: dict[str, Any]
            for held in (own_parameters(module), own_buffers(module)):
                restoring.add(f"the tensors of {type(module).__name__}", held.update, dict(held))
                held.update({name: twins(tensor) for name, tensor in held.items() if tensor is not None})
            if isinstance(module, nn.RNNBase):  # it keeps its weights a second time
                weights = flat_weights(module)
                restoring.add("a recurrent layer's weights", set_flat_weights, module, weights)
                set_flat_weights(module, [None if weight is None else twins(weight) for weight in weights])
        batch = map_tensors(twins, work.batch)
        optimizer = None
        if work.optimizer is not None:
            _make_code_tables(work.optimizer)
            optimizer = _fake_optimizer(work.optimizer, twins)
            restoring.add("the hooks of fake parameters", _carry_hooks(work.optimizer, optimizer))
        FOREACH_TYPES.append(FakeTensor)  # else optimizers would leave their foreach path
        restoring.add("torch's list of types", FOREACH_TYPES.remove, FakeTensor)
        yield replace(work, batch=batch, optimizer=optimizer)


class _Twins:
    """One fake tensor for each tensor; shared storages stay shared."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self._tensors: dict[int, Tensor] = {}
        self._bases: dict[tuple[int, str], Tensor] = {}
        self._originals: list[Tensor] = []  # so that no id is used twice

    def __call__(self, tensor: Tensor, *, state: bool = False, offloaded: bool = False) -> Tensor:
        """The fake twin of a tensor. In optimizer ``state``, step counts and tensors on the CPU stay there."""
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode:
            return tensor
        if id(tensor) not in self._tensors:
            self._originals.append(tensor)
            stays = state and tensor.device.type == "cpu" and (offloaded or tensor.ndim == 0)
            self._tensors[id(tensor)] = self._make(tensor, torch.device("cpu") if stays else self._device)
        return self._tensors[id(tensor)]

    def _make(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.layout is not torch.strided or is_wrapper(tensor):
            raise TraceError(
                f"A {type(tensor).__name__} with layout {tensor.layout} cannot be faked",
                hint="Profile a real step: leave out fake=True.",
            )
        storage = tensor.untyped_storage()
        key = (storage_id(storage), device.type)
        with self._mode, torch.no_grad():
            if key not in self._bases:
                self._bases[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
            whole = storage.nbytes() // tensor.element_size() * tensor.element_size()
            base = self._bases[key][:whole].view(tensor.dtype)
            twin = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.detach().requires_grad_(tensor.requires_grad)


def _make_code_tables(optimizer: Any) -> None:
    """Have torchao's optimizers make their tables of codes now.

    They make them in their first step, once for the whole process: in a fake one, of numbers that nobody knows.
    """
    if hasattr(optimizer, "_subclass_zeros"):
        block = torch.empty(optimizer.block_size)
        for signed in (True, False):
            optimizer._subclass_zeros(block, signed, block.numel())


def _fake_optimizer(optimizer: torch.optim.Optimizer, twins: _Twins) -> torch.optim.Optimizer:
    """A copy of the optimizer that works on fakes; the original is not touched."""
    fake = object.__new__(type(optimizer))  # copy.copy() would have torch change the class, for hooks
    fake.__dict__ = dict(optimizer.__dict__)
    fake.__dict__.pop("step", None)  # a scheduler's counter on the instance would reach the original
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):  # which this one steps with
            fake.__dict__[name] = _fake_optimizer(value, twins)
    fake.param_groups = [
        {key: [twins(p) for p in value] if key == "params" else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    fake.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        offloaded = parameter.device.type == "cuda"  # and a state of it on the CPU
        fake.state[twins(parameter)] = {
            key: _known(key, twins(value, state=True, offloaded=offloaded), value)
            if isinstance(value, Tensor)
            else value
            for key, value in state.items()
        }
    return fake


def _carry_hooks(optimizer: torch.optim.Optimizer, fake: torch.optim.Optimizer) -> Undo:
    """Copy lowtide's gradient hooks to fake parameters; users' hooks are left out.

    The undo lets torch free the fakes: a hook refers to the fake optimizer, and that to the hook's parameter.
    """
    undo = Undo()
    for group, twins in zip(optimizer.param_groups, fake.param_groups, strict=True):
        for parameter, twin in zip(group["params"], twins["params"], strict=True):
            for hook in gradient_hooks(parameter).values():
                if hasattr(hook, "of"):
                    undo.add(twin.register_post_accumulate_grad_hook(hook.of(fake)).remove)
    return undo


def _known(key: str, twin: Tensor, original: Tensor) -> Tensor:
    """Give a fake tensor its original's value (for step counts the next one), since optimizers branch on it."""
    if original.ndim == 0 and not original.is_meta:
        vars(twin)["value"] = original.item() + (1 if key == "step" else 0)
    return twin


def second_step(optimizer: torch.optim.Optimizer | None) -> None:
    """Set values of new optimizer state for the second step: ``mu`` is ASGD's, 1 for a long time."""
    for state in optimizer.state.values() if optimizer is not None else ():
        for key, value in (("step", 2.0), ("mu", 1.0)):
            if isinstance(scalar := state.get(key), FakeTensor):
                vars(scalar).setdefault("value", value)


def known_value(tensor: Tensor) -> float:
    """Value of an optimizer's scalar; if unknown, a number by which, and by 1 less, one can divide."""
    return tensor.__dict__.get("value", 0.5)
