"""Max pooling that keeps its input alone.

torch also saves the places of the maxima, in 64 bits each. Here backward finds them by one more pass over the input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.compat.transforms import is_transformed

_aten: Any = torch.ops.aten
_OPS: dict[type[nn.Module], tuple[Any, Any, Any]] = {
    nn.MaxPool2d: (F.max_pool2d, _aten.max_pool2d_with_indices, _aten.max_pool2d_with_indices_backward),
    nn.MaxPool3d: (F.max_pool3d, _aten.max_pool3d_with_indices, _aten.max_pool3d_with_indices_backward),
}


def can_pool(module: nn.Module) -> bool:
    """Tell whether a module is a max pooling that this one can replace."""
    return type(module) in _OPS and not getattr(module, "return_indices", False)


def max_pool(module: nn.MaxPool2d | nn.MaxPool3d, x: Tensor) -> Tensor:
    """Return the module's result, saving its input alone.

    >>> pool, x = nn.MaxPool2d(2), torch.randn(1, 3, 4, 4, requires_grad=True)
    >>> torch.equal(max_pool(pool, x), pool(x))
    True
    """
    settings = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    if torch.compiler.is_compiling() or is_transformed() or not (torch.is_grad_enabled() and x.requires_grad):
        return _OPS[type(module)][0](x, *settings)
    return _MaxPool.apply(x, type(module), settings)  # pyright: ignore[reportReturnType]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type[nn.Module], settings: tuple[Any, ...]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.kind, ctx.settings = kind, _sizes(kind, settings)
        ctx.save_for_backward(x)
        return _OPS[kind][1](x, *ctx.settings)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        _, find, spread = _OPS[ctx.kind]
        with torch.no_grad():
            places = find(x, *ctx.settings)[1]
        return spread(gradients[0], x, *ctx.settings, places), None, None


def _sizes(kind: type[nn.Module], settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """The settings as ATen's ops take them: a list for each number of pixels."""
    dims = 2 if kind is nn.MaxPool2d else 3
    *sizes, ceil_mode = settings
    return (*([size] * dims if isinstance(size, int) else list(size) for size in sizes), ceil_mode)
