"""Random batches for the zoo's models, their losses, and checks of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import WorkloadError

Inputs = Literal["images", "pixels", "signals", "text", "tokens"]
Batch = tuple[Tensor, Tensor]


def random_batch(inputs: Inputs, batch: int, size: int, options: Mapping[str, Any]) -> Batch:
    """Draw inputs and targets from the current generator, on the current default device.

    ``options`` are the model's: its channels and classes, or its vocabulary, set what is drawn.
    """
    if inputs == "tokens":
        # The targets are the ids one step later, so draw one more; copied, so that no storage is shared.
        ids = torch.randint(options["vocab"], (batch, size + 1))
        return ids[:, :-1].clone(), ids[:, 1:].clone()
    if inputs == "text":
        x = torch.randint(options["vocab"], (batch, size))
    else:
        x = torch.randn(batch, options["channels"], *[size] * options.get("dims", 2))
    target = (batch, size, size) if inputs == "pixels" else (batch,)
    return x, torch.randint(options["classes"], target)


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of logits (batch, classes, ...) and targets (batch, ...); masks count pixels."""
    x, target = batch
    return F.cross_entropy(model(x), target)


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of logits (batch, tokens, vocab) and the ids one step later, over all tokens."""
    ids, target = batch
    return F.cross_entropy(model(ids).flatten(0, 1), target.flatten())


def check_heads(width: int, heads: int) -> None:
    """Raise unless a width divides into heads of attention."""
    if width % heads:
        raise WorkloadError(f"A width of {width} does not divide into {heads} heads")


def check_length(ids: Tensor, longest: int) -> None:
    """Raise if token ids (batch, tokens) are longer than a model takes."""
    if ids.shape[1] > longest:
        hint = f"Build it with block_size={ids.shape[1]}."
        raise WorkloadError(f"The sequence has {ids.shape[1]} tokens and the model takes {longest}", hint=hint)
