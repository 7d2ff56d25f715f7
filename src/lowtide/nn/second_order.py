"""Refuse second derivatives where a backward pass cannot give them."""

from __future__ import annotations

import torch

from lowtide.errors import LowtideError


def refuse_create_graph(what: str, *, hint: str) -> None:
    """Raise inside of a backward pass with ``create_graph=True``.

    torch's ``once_differentiable`` is silent where the incoming gradient requires none, as that of a sum. The result
    would then be a constant, although it depends on the input and on the parameters.
    """
    if torch.is_grad_enabled():
        raise LowtideError(f"{what} has no gradients of gradients", hint=hint)
