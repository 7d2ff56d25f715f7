"""Ops that move elements: the samples are followed to where torch puts them, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.techniques.microbatch.steps import images, proofs

KEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda y: y.transpose(0, 1).transpose(0, 1),
    "permute": lambda y: y[:, :, None].permute(2, 0, 1)[0],
    "unsqueeze": lambda y: y.unsqueeze(0).squeeze(0),
    "expand": lambda y: y[:, None].expand(-1, 3, -1).mean(1),
    "repeat": lambda y: y.repeat(2, 1)[:, :2],
    "slice": lambda y: y[:, 1:3],
    "select": lambda y: y.select(1, 2),
    "split": lambda y: y.split(2, dim=1)[1],
    "unbind": lambda y: y.unbind(1)[0],
    "stack": lambda y: torch.stack([y, y], 1).flatten(1),
    "pad": lambda y: torch.nn.functional.pad(y, (1, 1)),
    "index_select": lambda y: y.index_select(1, torch.tensor([0, 2])),
    "scatter": lambda y: y.scatter(1, torch.zeros_like(y, dtype=torch.long), y),
}
MIX: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda y: y[1:],
    "select": lambda y: y.select(0, 0),
    "split": lambda y: y.split(2, dim=0)[0],
    "unbind": lambda y: y.unbind(0)[0],
    "pad": lambda y: torch.nn.functional.pad(y, (0, 0, 1, 0)),
    "flip": lambda y: y * y.flip(0),
    "view": lambda y: y.reshape(2, -1).softmax(1),
    "index_select": lambda y: y.index_select(0, torch.tensor([0, 2])),
}


def test_samples_are_followed_where_they_stay_apart_and_not_where_they_meet_or_fall_away() -> None:
    moves = {**{f"keep {name}": move for name, move in KEEP.items()}, **{f"mix {name}": m for name, m in MIX.items()}}
    losses = {name: lambda m, b, move=move: move(m(b[0])).square().mean() for name, move in moves.items()}
    reductions = {name: each.reduction for name, each in proofs(losses, images()).items()}
    assert reductions == {name: "mean" if name.startswith("keep") else None for name in moves}
