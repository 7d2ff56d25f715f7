"""Frames are read, and evaluated by Python."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.compat.frames import evaluate_frames_by_default, frame_at


def test_frames_are_found_by_their_depth() -> None:
    def inner() -> str:
        return frame_at(1).f_code.co_name

    assert frame_at(0).f_code.co_name == "test_frames_are_found_by_their_depth"
    assert inner() == "test_frames_are_found_by_their_depth"


def test_calls_hold_no_more_than_python_does_after_dynamo_failed() -> None:
    def references(value: object) -> int:
        return sys.getrefcount(value)

    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("on purpose")

    def double(x: Tensor) -> Tensor:
        return x * 2

    evaluate_frames_by_default()
    before = references(object())
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(double, backend=broken)(torch.ones(2))
    evaluate_frames_by_default()
    after = references(object())
    assert after == before
