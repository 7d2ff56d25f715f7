"""Optimizers' hooks and marks."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.compat import optimizers
from lowtide.errors import LowtideError


def sgd(**options: Any) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1, **options)


def nothing(*_: Any) -> None:
    pass


def test_hooks_are_found() -> None:
    optimizer = sgd()
    optimizer.register_step_pre_hook(nothing)
    optimizer.register_load_state_dict_pre_hook(nothing)
    optimizer.register_load_state_dict_post_hook(nothing)
    held = (optimizers.step_pre_hooks, optimizers.load_pre_hooks, optimizers.load_post_hooks)
    assert [list(hooks(optimizer).values()) for hooks in held] == [[nothing]] * 3


def test_the_first_hook_runs_first() -> None:
    optimizer, seen = sgd(), list[str]()
    optimizer.register_step_pre_hook(lambda *_: seen.append("second"))
    handle = optimizers.register_first_step_pre_hook(optimizer, lambda *_: seen.append("first"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert seen == ["first", "second", "second"]


def test_all_hooks_around_a_step_are_those_that_run() -> None:
    optimizer, seen = sgd(), list[str]()
    optimizer.register_step_pre_hook(lambda *_: seen.append("own"))
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("global"))
    optimizer.step()
    for hooks in optimizers.all_step_hooks([optimizer, object.__new__(torch.optim.SGD)]):
        hooks.clear()
    optimizer.step()
    handle.remove()
    assert seen == ["own", "global"]


def test_a_copy_loses_its_hooks_and_the_original_keeps_them() -> None:
    optimizer = sgd()
    optimizer.register_step_pre_hook(nothing)
    shadow = copy.copy(optimizer)
    optimizers.remove_step_hooks(shadow)
    assert not optimizers.step_pre_hooks(shadow)
    assert optimizers.step_pre_hooks(optimizer)


def test_a_copy_with_its_own_hooks_leaves_the_original_alone() -> None:
    optimizer = sgd()
    optimizer.register_step_pre_hook(nothing)
    shadow = object.__new__(torch.optim.SGD)
    shadow.__dict__ = dict(optimizer.__dict__)
    optimizers.copy_step_hooks(shadow)
    assert list(optimizers.step_pre_hooks(shadow).values()) == [nothing]
    optimizers.step_pre_hooks(shadow).clear()
    assert optimizers.step_pre_hooks(optimizer)


def test_a_step_calls_hooks_once_its_class_is_patched() -> None:
    class Plain(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    optimizer, seen = sgd(), list[int]()
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    optimizer.__class__ = Plain
    optimizer.step()
    assert not seen
    optimizers.call_hooks_in_step(optimizer)
    optimizer.step()
    assert seen == [1]


def test_marks_are_those_of_schedulers() -> None:
    optimizer = sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not hasattr(optimizer, optimizers.STEP_CALLED)
    optimizer.step()
    by_torch = getattr(optimizer, optimizers.STEP_CALLED)
    delattr(optimizer, optimizers.STEP_CALLED)
    optimizers.mark_step(optimizer)
    assert getattr(optimizer, optimizers.STEP_CALLED) == by_torch
    scheduler.step()  # without a warning, which would be an error


def test_a_step_that_is_marked_as_wrapped_is_not_wrapped_again() -> None:
    optimizer = sgd()

    @functools.wraps(type(optimizer).step)
    def step(self: Any, closure: Any = None) -> None:
        optimizers.mark_step(self)

    optimizers.mark_wrapped(step)
    optimizer.step = bound = types.MethodType(step, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer.step == bound


def test_a_fused_optimizer_has_the_mark_of_scalers() -> None:
    assert getattr(sgd(fused=True), optimizers.AMP_SCALING)
    assert not hasattr(sgd(), optimizers.AMP_SCALING)


def test_parameters_are_among_the_types_that_are_stepped_together() -> None:
    assert nn.Parameter in optimizers.FOREACH_TYPES


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_is_seen_until_it_is_no_longer_watched(name: str) -> None:
    clip = getattr(nn.utils, name)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 5.0)
    seen: list[list[Tensor]] = []
    end = optimizers.watch_clipping(lambda parameters: seen.append(list(parameters)))
    clip([parameter], 1.0)
    end()
    times = len(seen)
    clip([parameter], 1.0)
    assert len(seen) == times > 0
    assert seen[0][0] is parameter
    assert parameter.grad.norm() < 2


def test_clipping_that_cannot_be_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        monkeypatch.setattr(nn.utils, name, nothing)
    with pytest.raises(LowtideError):
        optimizers.watch_clipping(nothing)
