"""Open a scope of rebuilding around the outermost forward of models with a layer that needs it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from lowtide.compat.autograd import CHECKPOINT, in_backward, top_saved_hooks, why_saved_hooks_are_disabled
from lowtide.compat.frames import frame_at
from lowtide.compat.modules import CALL, runs_compiled
from lowtide.compat.transforms import functorch_is_active, is_jit_traced
from lowtide.nn.rebuild import scope
from lowtide.undo import Undo


@contextmanager
def keep_one_buffer() -> Generator[None]:
    """Open a scope by hand, for layers that are called outside of any module's forward.

    Nothing happens inside another scope, in a backward pass or under ``torch.func``.
    """
    if (scope.is_open and scope.replaces) or not may_open():
        yield
        return
    around = scope.owner
    scope.open("by hand")
    try:
        yield
    finally:
        scope.close()
        scope.owner, scope.replaces = around, False


def may_open() -> bool:
    """Tell whether nothing else owns saved tensors: no checkpoint, ``torch.func``, compiler or ban on hooks."""
    top = top_saved_hooks(True)
    return (
        torch.is_grad_enabled()
        and not in_backward()
        and (top is None or getattr(top[0], "__module__", "") != CHECKPOINT)
        and why_saved_hooks_are_disabled() is None
        and not functorch_is_active()
        and not is_jit_traced()
        and not torch.compiler.is_compiling()
    )


def watch(layer: nn.Module) -> None:
    """Open a scope around the outermost forward of each model that holds this layer, while the layer lives.

    A layer does not know the models around it, so this takes hooks on the forward of every module. The first layer
    installs them. After the last one died, the next forward of any module removes them.
    """
    _watched.add(layer)


class _Watched:
    """The layers that live, and the hooks on all modules that they need."""

    def __init__(self) -> None:
        self._layers: set[weakref.ref[nn.Module]] = set()
        self._kinds: tuple[type[nn.Module], ...] = ()  # replicas of nn.DataParallel are made without a constructor
        self._undo, self._installed = Undo(), False

    def add(self, layer: nn.Module) -> None:
        if not self._installed:
            self._installed = True
            self._undo.add(nn_module.register_module_forward_pre_hook(self._before).remove)
            self._undo.add(nn_module.register_module_forward_hook(self._after, always_call=True).remove)
            self._undo.add(_ignore_warning(r"Using `torch\.compile\(module\)` when there are global hooks"))
        self._layers.add(weakref.ref(layer, self._layers.discard))
        self._kinds = tuple({*self._kinds, type(layer)})

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # A layer may die while another model is compiled, whose guards name the hooks. So they go here, and not there.
        if not self._layers:
            self._undo()
            self._installed = False
        elif not scope.is_open and may_open() and not runs_compiled(module):
            replaces = any(isinstance(part, self._kinds) for part in module.modules())
            scope.open(frame_at(1), replaces=replaces)

    def _after(self, module: nn.Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if scope.owner is frame_at(1):
            scope.close()
        elif scope.owner is not None and frame_at(1).f_code is CALL:
            _ = scope.is_open  # after an exception: closed, if the frame that ended is the scope's


_watched = _Watched()


def _ignore_warning(message: str) -> Callable[[], None]:
    """Ignore torch's warning that hooks on all modules run once more around a compiled model: ours do nothing there.

    Calling the result ends it.
    """
    warnings.filterwarnings("ignore", message, UserWarning)
    entry = warnings.filters[0]

    def restore() -> None:
        with suppress(ValueError):  # others reset the filters since
            warnings.filters.remove(entry)  # pyright: ignore[reportAttributeAccessIssue]

    return restore
