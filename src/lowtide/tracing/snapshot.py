"""The promise that looking at a step changes nothing, and restoring that survives errors of its own.

Restored are parameters, buffers, gradients, optimizer state, random generators, and tensors in modules' attributes and
in containers there. State elsewhere stays as the step leaves it: in objects, in variables of hooks, in files.
"""

from __future__ import annotations

import random
import signal
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import is_
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lowtide.batches import with_own_containers
from lowtide.compat.autograd import gradient_hooks, set_version_counters
from lowtide.compat.dispatch import is_wrapper
from lowtide.compat.tensors import version_of
from lowtide.errors import RestoreError
from lowtide.tracing.step_state import (
    clear_gradients,
    held_tensors,
    is_a,
    modules_of,
    optimizers_of,
    parameters_of,
    state_tensors,
    trainable,
    walk,
    watch_modules,
)
from lowtide.workload import Workload


@contextmanager
def unchanged(work: Workload, *, fake: bool = False) -> Generator[None]:
    """Restore the step's state after a block: see this module for the line.

    Modules that the loss names, such as a criterion, count as the model's. A ``fake`` step cannot change values, so
    nothing is copied for it.
    """
    names = _Names(work)
    held = [tensor for _, tensor in held_tensors(work)]
    optimizers = optimizers_of(work.optimizer)
    with Restoring() as restoring:
        restore_generators(restoring)
        for module in modules_of(work):
            for container in walk([vars(module)]):
                if is_a(container, (dict, list, set, deque)):
                    _restore_later(restoring, f"what {type(module).__name__} holds", container)
        for leaf in trainable(work):
            restoring.add(f"the gradient of {names[leaf]}", setattr, leaf, "grad", leaf.grad)
            leaf.grad = None
        for store in _gradient_stores(parameters_of(work)):
            restoring.add("stored gradients", store.set_aside())
        for optimizer in optimizers:
            _restore_optimizer(restoring, optimizer, names)
        if not fake:
            states = chain.from_iterable(map(state_tensors, optimizers))
            for backup in _backups(list(work.tensors()), [*held, *parameters_of(work), *states]):
                restoring.add(names[backup.tensor], backup.restore)
        for tensor in held:
            if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_inference():
                restoring.add(names[tensor], _restore_data, tensor, tensor.data)
        yield


@contextmanager
def steady(work: Workload) -> Generator[bool]:
    """Run a block with the model as a step leaves it, if the step replaces held tensors; then restore it.

    Yields whether it was so before.
    """
    with ExitStack() as stack:
        stack.enter_context(unchanged(work))
        held_since = watch_modules(work)
        work.compute_loss(batch=with_own_containers(work.batch)).backward()
        was_steady = not held_since()
        if was_steady:
            stack.close()
        else:
            clear_gradients(work)
        yield was_steady


# -- values --------------------------------------------------------------------------------------------


class _Backup:
    """A tensor's values, copied to the host, and its version."""

    def __init__(self, tensor: Tensor, *, always: bool) -> None:
        self.tensor = tensor
        self.always = always
        self.version = version_of(tensor)
        self.values = _distinct(tensor).to("cpu", copy=True)

    def restore(self) -> None:
        """Copy the values back, ``always`` or where the version changed."""
        if self.always or version_of(self.tensor) != self.version:
            _distinct(self.tensor).copy_(self.values)
            set_version_counters((self.tensor,), (self.version,))


def _backups(batch: list[Tensor], state: list[Tensor]) -> list[_Backup]:
    """Copy a batch and state. Batch norm, fused optimizers and writes through ``.data`` change state uncounted."""
    chosen = {id(tensor): (tensor, always) for always in (False, True) for tensor in (state if always else batch)}
    can_be_copied = ((t, always) for t, always in chosen.values() if not (t.is_meta or t.is_inference() or t.is_mkldnn))
    return [_Backup(tensor, always=always) for tensor, always in can_be_copied]


def _distinct(tensor: Tensor) -> Tensor:
    """Return the tensor without repeated elements, such as those of an expanded one."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided and not is_wrapper(tensor):
        for dim, stride in enumerate(tensor.stride()):
            tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else tensor
    return tensor


def _restore_data(tensor: Tensor, data: Tensor) -> None:
    """Undo ``tensor.data = ...``, which no version counts."""
    if tensor.device != data.device or tensor.shape != data.shape or tensor.data_ptr() != data.data_ptr():
        tensor.data = data


def _gradient_stores(parameters: list[Tensor]) -> set[Any]:
    """Find objects that hold gradients elsewhere than in ``.grad`` until the step."""
    hooks = (hook for parameter in parameters for hook in gradient_hooks(parameter).values())
    return {hook for hook in hooks if hasattr(hook, "set_aside")}


def restore_generators(restoring: Restoring) -> None:
    """Restore torch's, Python's and numpy's generators at the end."""
    restoring.add("torch's generator", torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        restoring.add("CUDA's generators", torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    restoring.add("Python's generator", random.setstate, random.getstate())
    restoring.add("numpy's generator", np.random.set_state, np.random.get_state())


class _Names:
    """Tensors as an error names them."""

    def __init__(self, work: Workload) -> None:
        named = [(tensor, name) for name, tensor in held_tensors(work)]
        named += [(tensor, "the batch") for tensor in work.tensors()]
        named += [(tensor, name) for name, tensor in (*work.model.named_buffers(), *work.model.named_parameters())]
        self._names = {id(tensor): name for tensor, name in named}
        for parameter, state in work.optimizer.state.items() if work.optimizer is not None else ():
            for key, value in state.items():
                self._names[id(value)] = f"the optimizer's {key} of {self[parameter]}"

    def __getitem__(self, tensor: Any) -> str:
        return self._names.get(id(tensor), "a parameter outside of the model")


# -- containers ----------------------------------------------------------------------------------------


def _restore_later(restoring: Restoring, what: str, container: Any) -> None:
    restoring.add(what, restore_content, container, content_of(container))


def content_of(container: Any) -> dict[Any, Any] | list[Any]:
    return dict(container) if isinstance(container, dict) else list(container)


def has_content(container: Any, content: dict[Any, Any] | list[Any]) -> bool:
    """Tell whether a container holds the same objects in the same order."""
    return len(container) == len(content) and all(map(is_, _items(container), _items(content)))


def restore_content(container: Any, content: dict[Any, Any] | list[Any]) -> None:
    """Restore a container, by methods of the built-in class: its own may forbid it."""
    if has_content(container, content):
        return
    base: Any = next(each for each in (OrderedDict, dict, list, set, deque) if isinstance(container, each))
    base.clear(container)
    if isinstance(content, dict):
        for key, value in content.items():
            base.__setitem__(container, key, value)
    elif isinstance(container, set):
        set.update(container, content)
    else:
        base.extend(container, content)


def _items(container: Any) -> Iterable[Any]:
    return chain(container, container.values()) if isinstance(container, dict) else container


def _restore_optimizer(restoring: Restoring, optimizer: torch.optim.Optimizer, names: _Names) -> None:
    """Restore attributes, states and groups, in this order: the attributes hold the others."""
    for group in optimizer.param_groups:
        _restore_later(restoring, "a parameter group of the optimizer", group)
    _restore_later(restoring, "the parameter groups of the optimizer", optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        _restore_later(restoring, f"the optimizer's state of {names[parameter]}", state)
    _restore_later(restoring, "the optimizer's states", optimizer.state)
    _restore_later(restoring, "the optimizer's attributes", vars(optimizer))


# -- restoring -----------------------------------------------------------------------------------------

_ATTEMPTS = 3
_NAMED = 5  # in an error; there may be hundreds


class Restoring:
    """Run restorations at the end, last first. An error in one skips no other.

    Each restoration must give the same result when it is started again: one that fails is tried three times. An
    interrupt waits until all is restored. ``RestoreError`` names whatever could not be.
    """

    def __init__(self) -> None:
        self._left: list[tuple[str, Callable[[], object]]] = []
        self._failed: list[tuple[str, BaseException]] = []
        self._interrupt: BaseException | None = None

    def add(self, what: str, restore: Callable[..., object], *args: Any) -> None:
        """Call ``restore(*args)`` at the end; ``what`` names the state in an error."""
        self._left.append((what, lambda: restore(*args)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.close()
        except BaseException:
            self.close()  # an interrupt can come before it is made to wait
            raise

    def close(self) -> None:
        """Run the remaining restorations."""
        with _interrupts_wait():
            while self._left:
                self._attempt(*self._left[-1])
                self._left.pop()
        failed, interrupt = self._failed, self._interrupt
        self._failed, self._interrupt = [], None
        if failed:
            named = [what for what, _ in failed]
            more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
            error = failed[0][1]
            raise RestoreError(
                f"Not restored after a step: {', '.join(named[:_NAMED])}{more} ({type(error).__name__}: {error})",
                hint="Load them from a checkpoint before training on.",
            ) from error
        if interrupt is not None:
            raise interrupt

    def _attempt(self, what: str, restore: Callable[[], object]) -> None:
        error: BaseException | None = None
        for _ in range(_ATTEMPTS):
            try:
                restore()
            except Exception as problem:
                error = problem
            except BaseException as problem:
                error = self._interrupt = problem
            else:
                return
        if error is not None:
            self._failed.append((what, error))


@contextmanager
def _interrupts_wait() -> Generator[None]:
    """Delay a Ctrl-C until the end; only the main thread gets one."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting: list[tuple[Any, ...]] = []
    try:
        signal.signal(signal.SIGINT, lambda *args: waiting.append(args))
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(*waiting[0])
