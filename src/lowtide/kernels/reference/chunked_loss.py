"""Cross entropy of rows of logits, and its gradient written over them, in plain torch.

A row has the logits z, the target t, p = softmax(z), and c, the gradient of its loss. The class weights are w (1 if
there are none), with the sum W over V classes. The label smoothing is ε:

    loss  = (1-ε)·w_t·(lse z - z_t) + ε/V·(W·lse z - Σ w_k·z_k)
    dz_k  = c·((1-ε)·w_t + ε·W/V)·p_k - c·ε/V·w_k - [k = t]·c·(1-ε)·w_t

A row whose target is the ignored index has neither. With a cap a, z = a·tanh(y/a) of the logits y that are given, and
dy = dz·(1 - (z/a)²) takes their place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rules(NamedTuple):
    """Settings of ``F.cross_entropy``; the weights are as wide as the losses."""

    ignore_index: int = -100
    smoothing: float = 0.0
    weight: Tensor | None = None
    weight_sum: Tensor | None = None
    cap: float = 0.0  # of logits; 0 for none


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of losses."""
    return dtype if dtype.itemsize >= 4 else torch.float32  # torch.promote_types would be an op in a trace


def rows_(logits: Tensor, target: Tensor, losses: Tensor, rules: Rules, scale: Tensor | None, padding: int = 0) -> None:
    """Write the losses of the rows; and, with a ``scale`` (c, of one row or of each), the gradient over the logits.

    The logits are overwritten either way. Nothing is allocated beside them, but in 16 bits a copy in 32, and with a cap
    one more copy. The last ``padding`` columns are no classes: their values are not used, and their gradient is 0.
    """
    if padding:
        logits[:, -padding:] = 0
        logits = logits[:, :-padding]
    z, classes = logits.to(wide(logits.dtype)), logits.shape[1]
    tanh = None
    if rules.cap:
        z.div_(rules.cap).tanh_()
        tanh = None if scale is None else z.clone()
        z.mul_(rules.cap)
    counts = target != rules.ignore_index
    at = target.where(counts, 0).unsqueeze(1)
    highest = z.amax(1)
    hit = highest - z.gather(1, at).squeeze(1)
    share = rules.smoothing / classes
    spread, total = None, classes if rules.weight_sum is None else rules.weight_sum
    if rules.smoothing:
        spread = total * highest - (z.sum(1) if rules.weight is None else z @ rules.weight)
    z.sub_(highest.unsqueeze(1)).exp_()
    sums = z.sum(1)
    mine = 1 - rules.smoothing if rules.weight is None else (1 - rules.smoothing) * rules.weight[at.squeeze(1)]
    loss = mine * (hit + sums.log())
    if spread is not None:
        loss = loss + share * (spread + total * sums.log())
    losses.copy_(loss.masked_fill_(~counts, 0))
    if scale is None:
        return
    c = scale.expand(len(logits)).masked_fill(~counts, 0)
    z.mul_((c * (mine + share * total) / sums).unsqueeze(1))
    if rules.smoothing and rules.weight is not None:
        z.addr_(c, rules.weight, alpha=-share)
    elif rules.smoothing:
        z.sub_((share * c).unsqueeze(1))
    z.scatter_add_(1, at, -(c * mine).unsqueeze(1))
    if tanh is not None:
        z.mul_(tanh.square_().neg_().add_(1))
    if z is not logits:
        logits.copy_(z)
