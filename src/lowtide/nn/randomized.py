"""A linear layer that keeps a random sketch of its input for the weight's gradient, and not the input."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.compat.autograd import top_saved_hooks
from lowtide.compat.dynamo import disable_dynamo
from lowtide.compat.modules import own_parameters
from lowtide.compat.tensors import version_of
from lowtide.compat.transforms import is_exporting, is_transformed
from lowtide.errors import LowtideError
from lowtide.kernels import randomized as kernels
from lowtide.kernels.reference.randomized import Sketch, SketchKind
from lowtide.nn.hidden_writes import CheckedCalls, Values, read
from lowtide.nn.second_order import refuse_create_graph


class RandomizedLinear(nn.Linear):
    """``nn.Linear`` that saves a sketch S·X of its input X, with ``ratio`` times the rows, and ∂W = (S·∂Y)ᵀ(S·X).

    The output and the gradients of the input and of the bias are those of ``nn.Linear``. The weight's gradient is
    unbiased: E[SᵀS] = I, with a new S in every step. To ``state_dict`` and in evaluation mode it is a ``nn.Linear``.
    Layers with the same sketch that read one tensor in a row, as Q, K and V do, share one S·X.

    In training, each call draws one seed from torch's generator of the input's device. A recomputed forward pass that
    restores the generator's state has the same S. Rows are sketched in blocks of ``block`` rows. None sketches all at
    once, which costs much more and is hardly better.

    >>> layer = RandomizedLinear(16, 4, ratio=0.25)
    >>> layer(torch.randn(32, 16)).shape, list(layer.state_dict())
    (torch.Size([32, 4]), ['weight', 'bias'])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ratio: float = 0.2,
        sketch: SketchKind = "rademacher",
        block: int | None = 128,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.sketch, self.calls = Sketch(sketch, ratio, block), CheckedCalls()

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """Return a layer that shares the parameters and the mode of a ``nn.Linear``; ``options`` as constructed."""
        if not isinstance(linear, nn.Linear):
            raise LowtideError(f"{cls.__name__} is made from a nn.Linear, not from a {type(linear).__name__}")
        bias = own_parameters(linear).get("bias") is not None
        layer = cls(linear.in_features, linear.out_features, bias, device="meta", **options)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        return randomized_linear(input, self.weight, self.bias, self.sketch, self.calls, training=self.training)

    def extra_repr(self) -> str:
        sketch = self.sketch
        return f"{super().extra_repr()}, ratio={sketch.ratio}, sketch={sketch.kind!r}, block={sketch.block}"


def randomized_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, sketch: Sketch, calls: CheckedCalls, *, training: bool = True
) -> Tensor:
    """``F.linear(x, weight, bias)``, bit for bit, with the weight's gradient from a sketch of x.

    Plain in evaluation mode, for a weight without gradient, and for inputs of too few rows. The layer owns ``calls``.
    """
    if not training or not weight.requires_grad or is_exporting():
        return F.linear(x, weight, bias)
    return _randomized(x, weight, bias, sketch, calls)


def _runs_plain(x: Tensor, weight: Tensor, sketch: Sketch) -> bool:
    """Tell whether torch's own op runs: to refuse wrong inputs, for few rows, under transforms and traces."""
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or x.is_inference():
        return True
    rows = x.shape[:-1].numel()
    if sketch.sketch_rows(rows) >= rows or not x.numel() or not weight.numel():
        return True
    return is_transformed()


@disable_dynamo  # a seed and a shared sketch are nothing for a compiled graph: it breaks here
def _randomized(x: Tensor, weight: Tensor, bias: Tensor | None, sketch: Sketch, calls: CheckedCalls) -> Tensor:
    if _runs_plain(x, weight, sketch):
        return F.linear(x, weight, bias)
    # Always drawn, so that both runs of a checkpoint leave the generator in the same state. The first run may be
    # without gradients, or share a sketch.
    seed = kernels.draw_seed(x.device)
    if not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    uncast = x
    # As autocast does, but with gradients: inside of a function its cache would hold a weight that has none.
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    if x.dtype != weight.dtype or x.device != weight.device:
        return F.linear(x, weight, bias)

    def make() -> _StoredSketch:
        with torch.no_grad():
            sketched, scale = kernels.project_scaled(x.reshape(-1, x.shape[-1]), seed, sketch)
            return _StoredSketch(sketched, seed, scale)

    latest = _latest.of_thread
    return _RandomizedLinearFunction.apply(
        x, weight, bias, latest.sketch(uncast, (sketch, x.dtype), make, calls), sketch, latest
    )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


class _RandomizedLinearFunction(torch.autograd.Function):
    """One node, which saves the weight, the sketch and its seed."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Tensor, bias: Any, stored: _StoredSketch, sketch: Sketch, latest: _LatestSketch
    ) -> Tensor:
        ctx.sketch, ctx.latest = sketch, latest
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *(t for t in stored if t is not None))
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_create_graph("A randomized linear layer", hint="Use nn.Linear there.")
        weight, stored, seed, *scale = ctx.saved_tensors
        ctx.latest.forget()
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = rows.mm(weight).view(*dy.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            dweight = kernels.product(*kernels.project_scaled(rows, seed, ctx.sketch), stored, *scale)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        return dx, dweight, dbias, None, None, None


# -- one sketch for all that read the same input -----------------------------------------------------------


class _StoredSketch(NamedTuple):
    sketch: Tensor
    seed: Tensor
    scale: Tensor | None = None  # of a sketch in float16


class _LatestSketch:
    """The last sketch of a thread, for the next layer that reads the same input.

    Freed when that input dies, when another one is sketched, or when a backward pass begins.
    """

    def __init__(self) -> None:
        self._input: weakref.ref[Tensor] | None = None
        self._key: object = None
        self._stored: _StoredSketch | None = None
        self._values: Values | None = None

    def sketch(self, x: Tensor, how: object, make: Callable[[], _StoredSketch], calls: CheckedCalls) -> _StoredSketch:
        """Return the latest sketch if it is one of x, else a new one. ``calls`` belong to the layer that asks."""
        # Not across the border of a checkpoint: its second run begins without what was before it.
        key = (version_of(x), top_saved_hooks(True), how)
        stored = self._stored
        is_known = stored is not None and self._input is not None and self._input() is x and self._key == key
        if is_known and self._values is not None and not calls.is_written:
            calls.is_written = read(x) != self._values
        if stored is None or not is_known or calls.is_written:
            stored = make()
            self._input, self._key, self._stored = weakref.ref(x, self._died), key, stored
            self._values = calls.read(x.detach())
        return stored

    def forget(self) -> None:
        self._input = self._key = self._stored = self._values = None

    def _died(self, reference: weakref.ref[Tensor]) -> None:
        if reference is self._input:
            self.forget()


class _SketchOfThread(threading.local):
    def __init__(self) -> None:
        self.of_thread = _LatestSketch()


_latest = _SketchOfThread()
