"""Frames of Python: reading them, and who evaluates them."""

from __future__ import annotations

import ctypes
import sys

from lowtide.compat.versions import CAPTURE

frame_at = sys._getframe
"""Return the frame at a depth; 0 is the caller's own."""


def evaluate_frames_by_default() -> None:
    """Have Python evaluate its own frames again.

    Once it has failed, Dynamo leaves its evaluator in place. Calls then hold their arguments until they return, so that
    every later step of the process, compiled or not, takes more memory. Dynamo installs it anew when it next runs.
    """
    if CAPTURE.is_off:
        return  # steps only take a little more
    api = ctypes.pythonapi
    try:
        interpreter, use = api.PyInterpreterState_Get, api._PyInterpreterState_SetEvalFrameFunc
        default = ctypes.cast(api._PyEval_EvalFrameDefault, ctypes.c_void_p)
    except AttributeError:
        return
    interpreter.restype = ctypes.c_void_p
    use.argtypes, use.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    use(interpreter(), default)
