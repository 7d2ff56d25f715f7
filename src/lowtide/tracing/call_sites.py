"""Call sites of ops: the module that runs one, and the line of user code that called it."""

from __future__ import annotations

import os
from types import FrameType
from typing import Any

import torch
from torch import nn

from lowtide.compat.frames import frame_at

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LOWTIDE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ZOO = os.path.join(_LOWTIDE, "zoo") + os.sep


def module_hooks(
    running: list[str], model: nn.Module, skip: set[int]
) -> tuple[dict[str, str], list[torch.utils.hooks.RemovableHandle]]:
    """Keep the paths of the modules that run in ``running``, innermost last: path -> class, and handles to remove."""
    paths: dict[str, str] = {}
    handles: list[torch.utils.hooks.RemovableHandle] = []
    for path, module in model.named_modules():
        paths[path] = type(module).__name__
        if id(module) in skip or isinstance(module, torch.jit.ScriptModule):
            continue

        def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
            if not torch.compiler.is_compiling():  # as torch.cond does with its branches
                running.append(path)

        def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
            if running and not torch.compiler.is_compiling():
                running.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    return paths, handles


def short_name(op: str) -> str:
    """``aten.convolution.default`` -> ``convolution``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def source_line() -> str:
    """The innermost line of user code on the stack."""
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
