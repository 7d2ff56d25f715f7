"""Batch norm + activation by torch's own ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lowtide.compat.transforms import is_exporting, is_transformed
from lowtide.kernels.reference.batchnorm import Running
from lowtide.nn.statistics import compiled_statistics
from lowtide.nn.strategies import Spec


def runs_plain(x: Tensor, residual: Tensor | None, spec: Spec, needs_grad: bool) -> bool:
    """Tell whether torch's own ops run: there is nothing to save, or no kernel of lowtide can run."""
    if spec.group is not None and spec.training:
        return False
    if torch.compiler.is_compiling() or is_transformed():
        return True
    if residual is not None and torch.promote_types(x.dtype, residual.dtype) is not x.dtype:
        return True  # z is wider than x
    if spec.statistics is not None:
        return False  # torch's ops would compute their own
    return spec.strategy == "standard" or not x.numel() or not needs_grad


def plain(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running,
    residual: Tensor | None,
    spec: Spec,
    learned: Sequence[Tensor] = (),
) -> Tensor:
    """Run torch's own ops, with ``learned`` in place of the activation's parameters."""
    y = _batch_norm(x, weight, bias, running, spec)
    y = y if residual is None else y + residual
    if _marks_for_recompute(residual, spec):
        # A region without an op would mark nothing. A slope of 1 is an identity that Inductor does not remove.
        identity = spec.activation.name == "identity"
        return checkpoint(_identity if identity else spec.activation, y, use_reentrant=False)
    if not learned:
        return spec.activation.write(y) if spec.activation.may_overwrite else spec.activation(y)
    assert spec.activation.module is not None
    names = (name for name, _ in spec.activation.module.named_parameters())
    return functional_call(spec.activation.module, dict(zip(names, learned, strict=True)), (y,))


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running, spec: Spec) -> Tensor:
    """Run torch's batch norm. Plain ops apply a momentum whose value a compiler does not know."""
    if isinstance(running.momentum, Tensor):
        y = F.batch_norm(x, None, None, weight, bias, True, 0.0, spec.eps)
        if x.numel():
            compiled_statistics(x, running)
        return y
    return F.batch_norm(x, running.mean, running.var, weight, bias, spec.training, running.momentum, spec.eps)


def _identity(y: Tensor) -> Tensor:
    return F.leaky_relu(y, 1.0)


def _marks_for_recompute(residual: Tensor | None, spec: Spec) -> bool:
    """Tell whether a compiler's partitioner is to recompute z. It keeps joins, since it recomputes none from another.

    Backward keeps x for the batch norm, and y is pointwise in x. So it suffices to mark the activation.
    """
    if not (torch.compiler.is_compiling() and spec.rebuild) or residual is not None:
        return False
    return not is_exporting() and spec.activation.name != "module"
