"""Dispatch modes are seen, and set aside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.compat import dispatch
from lowtide.compat.fake import FakeTensor, FakeTensorMode


class Names(dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_ops_but_where_modes_are_set_aside() -> None:
    assert dispatch.active_modes() == []
    with Names() as mode:
        torch.ones(2).exp()
        assert dispatch.active_modes() == [mode]
        with dispatch.without_modes():
            torch.ones(2).sin()
            assert dispatch.active_modes() == []
        with dispatch.without_dispatch():
            torch.ones(2).cos()
    assert mode.seen == ["ones.default", "exp.default"]


def test_a_mode_without_dynamo_sees_ops_too() -> None:
    class Count(dispatch.UncompiledMode):
        ops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops += 1
            return func(*args, **(kwargs or {}))

    with Count() as mode:
        torch.ones(2).exp()
    assert mode.ops == 2
    assert not hasattr(Count.__torch_dispatch__, "_torchdynamo_disable")


def test_wrappers_are_told_from_tensors() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    assert isinstance(fake, FakeTensor)
    assert not dispatch.is_wrapper(fake)
    assert not dispatch.is_wrapper(torch.ones(2))
    assert dispatch.is_wrapper(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))


def test_autocast_is_off_in_a_block() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with dispatch.without_autocast():
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16


def test_torch_function_is_off_in_a_block() -> None:
    seen: list[str] = []

    class Mine(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append("subclass")
            return super().__torch_function__(func, types, args, kwargs or {})

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append("mode")
            return func(*args, **(kwargs or {}))

    x = torch.ones(2).as_subclass(Mine)
    with dispatch.without_subclass_function():
        torch.exp(x)
        assert seen == []
    with Mode(), dispatch.without_torch_function():
        torch.exp(x)
    assert seen == []
    torch.exp(x)
    assert seen == ["subclass"]
