"""Fake tensors are torch's, and their dispatch can be replaced."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lowtide.compat import fake
from lowtide.errors import TraceError
from tests.refusals import refused


def test_a_fake_mode_makes_fake_tensors_and_is_the_current_one() -> None:
    assert fake.current_fake_mode() is None
    with fake.FakeTensorMode() as mode:
        assert fake.current_fake_mode() is mode
        assert isinstance(torch.ones(2, device="cuda"), fake.FakeTensor)


def test_a_mode_like_dynamos_has_an_environment_and_is_not_active() -> None:
    mode = fake.captured_fake_mode()
    assert mode.shape_env is not None
    assert fake.current_fake_mode() is None
    assert mode.from_tensor(torch.ones(2, 3)).shape == (2, 3)


def test_values_of_fake_tensors_are_refused() -> None:
    with fake.FakeTensorMode():
        x = torch.ones(2)
        with pytest.raises(fake.DataDependentOutputException):
            x.sum().item()
        with pytest.raises(fake.DynamicOutputShapeException):
            x.nonzero()


def test_every_op_of_every_fake_mode_goes_through_a_replaced_dispatch() -> None:
    seen: list[str] = []

    def see(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func.__name__)
        return fake.fake_dispatch(mode, func, types, args, kwargs or {})

    fake.replace_dispatch(see)
    try:
        with fake.FakeTensorMode():
            assert torch.ones(2).exp().shape == (2,)
    finally:
        fake.replace_dispatch(fake.fake_dispatch)
    with fake.FakeTensorMode():
        torch.ones(2).sin()
    assert "exp.default" in seen
    assert "sin.default" not in seen


def test_the_dispatch_of_other_versions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    with refused("3.0.0", kind=TraceError):
        fake.replace_dispatch(None)
    assert fake.FakeTensorMode.dispatch is fake.fake_dispatch


def test_the_logger_of_fake_kernels_is_one_of_torch() -> None:
    assert fake.FAKE_KERNELS in logging.root.manager.loggerDict
