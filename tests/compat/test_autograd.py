"""Autograd's private parts do what their docstrings say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.compat import autograd
from lowtide.compat.tensors import tensor_holders
from lowtide.techniques.microbatch.counts import nodes_behind
from tests.refusals import refused


def keep(value: Any) -> Any:
    return value


def test_saved_hooks_are_pushed_seen_and_popped() -> None:
    assert autograd.top_saved_hooks(True) is None
    autograd.push_saved_hooks(keep, keep)
    assert autograd.top_saved_hooks(True) == (keep, keep)
    autograd.pop_saved_hooks()
    assert autograd.top_saved_hooks(True) is None


def test_disabled_saved_hooks_say_why() -> None:
    assert autograd.why_saved_hooks_are_disabled() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert autograd.why_saved_hooks_are_disabled() == "not here"


def test_a_backward_pass_has_a_number_a_node_and_its_own_end() -> None:
    events: list[Any] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            autograd.call_after_backward(lambda: events.append("end"))
            events.append((autograd.graph_task_id() >= 0, autograd.in_backward(), autograd.keeps_graph()))
            assert autograd.sequence_number(autograd.current_node()) == number
            return gradients[0]

    number = autograd.next_sequence_number()
    apply = autograd.apply_of(Square)  # without a step of its class
    y: Any = apply(torch.ones(2, requires_grad=True))
    assert apply != Square.apply
    assert torch.equal(y, Square.apply(torch.ones(2)))  # pyright: ignore[reportArgumentType]
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert events == [(True, True, True), "end", (True, True, False), "end"]
    assert (autograd.graph_task_id(), autograd.in_backward(), autograd.current_node()) == (-1, False, None)


def test_a_backward_pass_in_python_is_one_too() -> None:
    with autograd.backward_in_python():
        assert autograd.in_backward()
    assert not autograd.in_backward()


def test_nodes_tell_what_they_take_and_save() -> None:
    x = torch.rand(2, 3, requires_grad=True)
    node: Any = (x.exp() * 2).prod(dim=1).grad_fn
    metadata = autograd.input_metadata(node)
    assert [(tuple(each.shape), each.dtype) for each in metadata] == [((2,), torch.float32)]
    assert autograd.saved_value(node, "dim") == 1
    assert torch.equal(autograd.saved_value(node, "self"), x.exp() * 2)
    assert autograd.saved_value(node, "nothing", None) is None
    with refused("nothing", kind=AttributeError):
        autograd.saved_value(node, "nothing")


def test_saved_slots_take_hooks_and_show_what_those_packed() -> None:
    node: Any = torch.rand(2, requires_grad=True).exp().grad_fn
    seen: list[Tensor] = []
    autograd.raw_saved(node, "result").register_hooks(lambda t: seen.append(t) or t, keep)
    assert len(seen) == 1
    with torch.autograd.graph.saved_tensors_hooks(lambda _: "packed", keep):
        node = torch.rand(2, requires_grad=True).sin().grad_fn
    assert list(autograd.packed_tensors(node)) == ["packed"]


def test_nothing_is_packed_once_backward_freed_it() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda _: "packed", lambda _: torch.ones(2)):
        y = torch.rand(2, requires_grad=True).sin()
    y.sum().backward()
    assert "packed" not in autograd.packed_tensors(y.grad_fn)


def test_saved_tensors_are_released() -> None:
    values = torch.rand(2)
    plain: Any = (values * torch.rand(2, requires_grad=True)).grad_fn
    held = tensor_holders(values)
    autograd.release_saved(plain)
    assert tensor_holders(values) == held - 1
    for pack in (lambda t: autograd.Packed(t), lambda t: ("outer", autograd.Packed(t))):
        with torch.autograd.graph.saved_tensors_hooks(pack, keep):
            node: Any = torch.rand(2, requires_grad=True).exp().grad_fn
        (packed,) = autograd.packed_tensors(node)
        autograd.release_saved(node)
        assert (packed[1] if isinstance(packed, tuple) else packed).tensor is None


def test_a_custom_node_may_die_though_python_holds_it() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

    x = torch.ones(2, requires_grad=True)
    held = Same.apply(x)
    assert held.grad_fn.next_functions
    node = held.grad_fn
    del held
    if autograd.custom_nodes_die():
        with refused("next_functions", kind=RuntimeError):
            _ = node.next_functions
    else:
        assert node.next_functions


def test_hooks_of_tensors_are_found() -> None:
    x = torch.ones(2, requires_grad=True)
    assert (autograd.tensor_hooks(x), autograd.gradient_hooks(x)) == ({}, {})
    x.register_hook(keep)
    x.register_post_accumulate_grad_hook(keep)
    assert [*autograd.tensor_hooks(x).values()] == [*autograd.gradient_hooks(x).values()] == [keep]
    autograd.tensor_hooks(x).clear()
    assert not autograd.tensor_hooks(x)


def test_checkpoints_take_their_hooks_off_after_an_error() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("inner")

    def outer(x: Tensor) -> Any:
        return checkpoint(fail, x, use_reentrant=False)

    with pytest.raises(ValueError, match="inner") as caught:
        checkpoint(outer, torch.ones(2, requires_grad=True), use_reentrant=False)
    autograd.close_checkpoints(caught.value)
    assert autograd.top_saved_hooks(True) is None


def test_version_counters_are_set() -> None:
    x = torch.ones(2)
    x += 1
    autograd.set_version_counters((x,), (7,))
    assert x._version == 7


def test_nodes_are_told_by_their_classes() -> None:
    x, targets = torch.ones(4, 3, requires_grad=True), torch.zeros(4, dtype=torch.long)
    for loss in (F.cross_entropy(x, targets), F.cross_entropy(x.T[None, :, :, None], targets[None, :, None])):
        assert isinstance(loss.grad_fn, autograd.NLL_NODES)
        assert isinstance(loss.grad_fn.next_functions[0][0], autograd.LOG_SOFTMAX_NODES)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        assert any(isinstance(node, autograd.NLL_NODES) for node in nodes_behind(gradient))
        assert isinstance((loss / x.sum()).grad_fn, autograd.DIVISION_NODES)
        assert not isinstance((loss / 2 + 1).grad_fn, autograd.DIVISION_NODES)


def test_hooks_and_frames_of_checkpoints_are_in_their_module() -> None:
    seen: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        hooks = autograd.top_saved_hooks(True)
        assert hooks is not None
        seen.extend([hooks[0].__module__, hooks[0].__globals__["__name__"]])
        return x.exp()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert seen == [autograd.CHECKPOINT] * 2
