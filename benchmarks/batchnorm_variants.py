"""The batch norms that ``bench_batchnorm_report`` sets side by side: PyTorch's, the report's, and lowtide's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

Convert = Callable[[nn.Module], nn.Module]


def plain(model: nn.Module) -> nn.Module:
    return model


def like_the_report(model: nn.Module) -> nn.Module:
    return _replace(model, lambda norm, _: KeepsNormalised(norm), joined=False)


def own(strategy: Literal["standard", "checkpoint"]) -> Convert:
    def convert(model: nn.Module) -> nn.Module:
        from lowtide.nn import BatchNormAct1d

        def layer(norm: nn.BatchNorm1d, activation: str) -> nn.Module:
            replacement = BatchNormAct1d(
                norm.num_features,
                activation=activation,
                strategy=strategy,
                eps=norm.eps,
                momentum=norm.momentum,
                affine=norm.affine,
                track_running_stats=norm.track_running_stats,
            )
            replacement.load_state_dict(norm.state_dict())
            return replacement

        return _replace(model, layer, joined=True)

    return convert


VARIANTS: dict[str, Convert] = {
    "PyTorch": plain,
    "like the report's, normalised data kept": like_the_report,
    "own, without recomputation": own("standard"),
    "own, with recomputation": own("checkpoint"),
}


def _replace(model: nn.Module, layer: Callable[[nn.BatchNorm1d, str], nn.Module], *, joined: bool) -> nn.Module:
    """Put a layer in the place of each BatchNorm1d, and if ``joined`` of the ReLU right after it."""
    for parent in model.modules():
        if not isinstance(parent, nn.Sequential):
            continue
        for index, child in enumerate(parent):
            if isinstance(child, nn.BatchNorm1d):
                active = joined and index + 1 < len(parent) and isinstance(parent[index + 1], nn.ReLU)
                parent[index] = layer(child, "relu" if active else "identity")
                if active:
                    parent[index + 1] = nn.Identity()
    return model


class KeepsNormalised(nn.Module):
    """BatchNorm1d as the report has it without recomputation: input and normalised data are kept, by plain ops."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not self.training:
            return norm(x)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        assert norm.momentum is not None
        y, mean, var = _KeepNormalised.apply(x, norm.weight, norm.bias, norm.eps)
        with torch.no_grad():
            count = x.numel() // x.shape[1]
            norm.num_batches_tracked.add_(1)
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(var * (count / (count - 1)), norm.momentum)
        return y


class _KeepNormalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        var, mean = torch.var_mean(x, _dims(x), correction=0, keepdim=True)
        normalised = (x - mean) * torch.rsqrt(var + eps)
        ctx.save_for_backward(x, normalised, var, weight)
        ctx.eps = eps
        y = normalised * _wide(weight, x) + _wide(bias, x)
        mean, var = mean.flatten(), var.flatten()
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dy, *_ = gradients
        x, normalised, var, weight = ctx.saved_tensors
        dims, count = _dims(x), x.numel() // x.shape[1]
        dbias, dweight = dy.sum(dims), (dy * normalised).sum(dims)
        inner = dy - _wide(dbias, x) / count - normalised * _wide(dweight, x) / count
        return inner * _wide(weight, x) * torch.rsqrt(var + ctx.eps), dweight, dbias, None


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (x.dim() - 2))
