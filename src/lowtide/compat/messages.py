"""Errors that torch tells apart by their wording alone. The words are tested against torch's own errors."""

from __future__ import annotations

from collections.abc import Callable


def _says(words: str) -> Callable[[BaseException], bool]:
    return lambda error: words in str(error).lower()


refuses_saved_hooks = _says("support saved tensor hooks")
"""Tell whether ``torch.func`` refused the saved-tensor hooks around it."""

is_about_inference = _says("inference tensor")
"""Tell whether a tensor made under ``torch.inference_mode`` was saved or written to."""

is_about_writes = _says("modified by an inplace operation")
"""Tell whether a saved tensor was written to before its backward."""

is_about_devices = _says("devices")
"""Tell whether an op was given fake tensors of two devices."""
