"""Names for the tensors of a step: from before it, by who owns them, and its gradients."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.autograd import gradient_hooks
from lowtide.compat.modules import own_parameters
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.step_state import held_tensors, modules_of
from lowtide.workload import Workload

Owners = dict[Tensor, tuple[str, str]]  # parameters, with their names and modules


def own_everything(recorder: Recorder, work: Workload, stored: Sequence[tuple[str, Tensor]]) -> Owners:
    """Register tensors from before the step, and those that modules ``stored`` in another step. Return parameters."""
    owners: Owners = {}
    for name, parameter in work.model.named_parameters():
        module = name.rpartition(".")[0]
        owners[parameter] = (name, module)
        recorder.own(parameter, "parameter", name, module)
    for name, buffer in work.model.named_buffers():
        recorder.own(buffer, "buffer", name, name.rpartition(".")[0])
    for module in modules_of(work):  # also of modules that the loss holds: a teacher, a criterion
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                recorder.own(parameter, "buffer", f"{type(module).__name__}.{name} of the loss")
    if work.optimizer is not None:
        _own_optimizer(recorder, work.optimizer, owners)
    for name, tensor in held_tensors(work):
        if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
            recorder.own(tensor, "buffer", name)
    for name, tensor in stored:
        recorder.own(tensor, "buffer", name)
    for tensor in work.tensors():
        recorder.own(tensor, "input", f"batch {list(tensor.shape)}")
    return owners


def _own_optimizer(recorder: Recorder, optimizer: torch.optim.Optimizer, owners: Owners) -> None:
    """Register an optimizer's state and parameters; those outside of the model join ``owners``."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owners.setdefault(parameter, ("parameter outside of the model", ""))
            recorder.own(parameter, "parameter", *owners[parameter])
    for parameter, state in optimizer.state.items():
        name, module = owners.get(parameter, ("", ""))
        for key, value in state.items():
            if isinstance(value, Tensor):
                recorder.own(value, "optimizer state", f"{name}.{key}", module, state_key=key)


@contextmanager
def named_gradients(recorder: Recorder, owners: Owners) -> Generator[set[Tensor]]:
    """Name the gradients of a backward pass, also those that hooks free before its end. Yield who got one."""
    reached: set[Tensor] = set()

    def note(parameter: Tensor) -> None:
        reached.add(parameter)
        if parameter.grad is not None:
            name, module = owners[parameter]
            recorder.label(parameter.grad, "gradient", f"{name}.grad", module)

    with ExitStack() as stack:
        for parameter in owners:
            hooks: Any = gradient_hooks(parameter)
            if hooks:
                others = dict(hooks)
                hooks.clear()  # and not moved to the end: the engine goes by the order of insertion
                stack.callback(parameter.register_post_accumulate_grad_hook(note).remove)
                hooks.update(others)
        yield reached
    for parameter in owners:
        if parameter.grad is not None:
            note(parameter)
