"""Call sites of ops: the module that runs one, and the line of user code that called it."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from lowtide.compat.frames import frame_at

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LOWTIDE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ZOO = os.path.join(_LOWTIDE, "zoo") + os.sep


@contextmanager
def running_modules(running: list[str], model: nn.Module, skip: set[int]) -> Generator[None]:
    """Hold the paths of the modules that run in ``running``, innermost last, by hooks; not of those in ``skip``."""

    def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
        if running and not torch.compiler.is_compiling():
            running.pop()

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if id(module) in skip or isinstance(module, torch.jit.ScriptModule):
                continue

            def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
                if not torch.compiler.is_compiling():  # as torch.cond does with its branches
                    running.append(path)

            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def short_name(op: str) -> str:
    """``aten.convolution.default`` -> ``convolution``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def source_line() -> str:
    """Return the innermost line of user code on the stack."""
    frame: FrameType | None = frame_at(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_library(filename: str) -> bool:
    """Tell whether a file is torch's or lowtide's, rather than user code. The zoo counts as user code."""
    return filename.startswith(_TORCH) or (filename.startswith(_LOWTIDE) and not filename.startswith(_ZOO))
