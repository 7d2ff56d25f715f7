"""Activations that keep a few bits of each input for backward.

The forward pass is torch's, bit for bit. In the backward pass f'(x) is one of 2^bits slopes, chosen for the density of
the inputs (``nn/fewbit_tables.py``). Activations that are straight on both sides of their bends, such as ReLU, need one
bit, and their gradient is torch's own.

    from lowtide.nn import fewbit
    layer = nn.Sequential(nn.Linear(64, 256), fewbit.GELU(bits=3), nn.Linear(256, 64))

The classes here have the names and the arguments of those in ``torch.nn``, and are subclasses of them.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from lowtide.compat.tensors import is_view
from lowtide.compat.transforms import is_batched, is_exporting, is_transformed
from lowtide.kernels import fewbit as kernels
from lowtide.kernels.fewbit_activations import Curve, is_in_place, read_module
from lowtide.kernels.reference.fewbit import BOOKS, Codebook, codebook, packed_bytes
from lowtide.nn.fewbit_tables import Density, Samples, table_of
from lowtide.nn.second_order import refuse_create_graph

_ops: Any = torch.ops.lowtide


def few_bit(x: Tensor, book: Codebook, *, inplace: bool = False) -> Tensor:
    """The activation of a codebook, of which ⌈bits·n/8⌉ bytes are kept for backward.

    Second derivatives: of the straight ones alone. Others raise under ``create_graph=True``.

    >>> x = torch.randn(1000, requires_grad=True)
    >>> y = few_bit(x, book_for("gelu", bits=3))
    >>> torch.equal(y, nn.functional.gelu(x)), y.grad_fn.saved_tensors[0].nbytes
    (True, 375)
    """
    if _runs_plain(x):
        return book.curve.write(x) if inplace else book.curve(x)
    if torch.compiler.is_compiling():
        y = _ops.fewbit(x, book.key)[0]
        return x.copy_(y) if inplace else y
    if inplace and (x.is_leaf or is_view(x)):
        # What may not be written to is for torch to say, before it is.
        return book.curve.write(x) if x.is_leaf else x.copy_(_apply(x, book, False))
    return _apply(x, book, inplace)


def book_for(activation: object, bits: int = 3, density: str | Density | Tensor = "normal") -> Codebook:
    """Which inputs of an activation share a slope; a straight one has one bit, whatever ``bits`` says."""
    curve = Curve.of(activation)
    if curve.is_gate:
        return codebook(curve)
    table = table_of(curve, bits, density)
    return codebook(curve, table.boundaries, table.levels)


class FewBit(nn.Module):
    """An activation that keeps ``bits`` bits per input: a module of ``torch.nn``, its name, or a function.

    ``density`` says how inputs are spread: "normal", "uniform", ``Normal(mean, deviation)``, ``Uniform(low, high)``, or
    a tensor of inputs as the layer sees them. A function that is not torch's must act on each element alone.

    >>> layer = FewBit(nn.SiLU(), bits=4)
    >>> layer, layer(torch.zeros(3)).tolist()
    (FewBit(silu, bits=4), [0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        activation: object,
        bits: int = 3,
        density: str | Density | Tensor = "normal",
        *,
        inplace: bool | None = None,
    ) -> None:
        super().__init__()
        of_module = isinstance(activation, nn.Module) and is_in_place(activation)
        self.inplace = of_module if inplace is None else inplace
        self._density = _remembered(density)
        self.book = book_for(activation, bits, self._density)

    @property
    def bits(self) -> int:
        """Kept per input."""
        return self.book.bits

    @property
    def density(self) -> str | Density | Tensor:
        """What the slopes are for, as it was given; inputs are in order."""
        return _given(self._density)

    def calibrate(self, inputs: str | Density | Tensor) -> None:
        """Choose the slopes anew, for inputs as these or a density. A ``state_dict`` has them not: save ``density``."""
        density = _remembered(inputs)
        self.book, self._density = book_for(self.book.curve, self.bits, density), density

    def forward(self, input: Tensor) -> Tensor:
        return few_bit(input, self.book, inplace=self.inplace)

    def extra_repr(self) -> str:
        return f"{self.book.curve}, bits={self.bits}" + (", inplace=True" if self.inplace else "")


class _Named(nn.Module):
    """Before a class of ``torch.nn``: its activation with a few bits kept, its arguments, and two more by keyword."""

    plain: ClassVar[type[nn.Module]]

    def __init__(self, *args: Any, bits: int = 3, density: str | Density | Tensor = "normal", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bits, self._density = bits, _remembered(density)
        self._book = book_for(self._curve(), bits, self._density)

    @property
    def book(self) -> Codebook:
        """For the activation with the numbers it has now."""
        curve = self._curve()
        if curve != self._book.curve:
            self._book = book_for(curve, self._bits, self._density)
        return self._book

    @property
    def bits(self) -> int:
        """Kept per input."""
        return self._book.bits

    @property
    def density(self) -> str | Density | Tensor:
        """What the slopes are for, as it was given; inputs are in order."""
        return _given(self._density)

    def calibrate(self, inputs: str | Density | Tensor) -> None:
        """Choose the slopes anew, for inputs as these or a density. A ``state_dict`` has them not: save ``density``."""
        density = _remembered(inputs)
        self._book, self._density = book_for(self._curve(), self._bits, density), density

    def forward(self, input: Tensor) -> Tensor:
        return few_bit(input, self.book, inplace=is_in_place(self))

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return f"{own}, bits={self.bits}" if own else f"bits={self.bits}"

    def _curve(self) -> Curve:
        return cast(Curve, read_module(self, self.plain))


def _remembered(density: str | Density | Tensor) -> str | Density:
    return Samples(density) if isinstance(density, Tensor) else density


def _given(density: str | Density) -> str | Density | Tensor:
    return density.values if isinstance(density, Samples) else density


# -- the function ----------------------------------------------------------------------------------------


class _FewBit(torch.autograd.Function):
    """Torch's op forward, codes kept, slopes by code backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, book: Codebook, inplace: bool
    ) -> Tensor:
        if inplace:
            dense = kernels.laid_as(x, x)
            codes, ctx.strides = kernels.encode(dense, book), dense.stride()
            book.curve.write(x)
            ctx.mark_dirty(x)
            y = x
        else:
            y, codes = kernels.forward(x, book)
            ctx.strides = y.stride() if kernels.is_dense(y) else torch.empty(y.shape, device="meta").stride()
        ctx.save_for_backward(codes)
        ctx.book, ctx.dtype = book, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (codes,) = ctx.saved_tensors
        if not ctx.book.curve.is_gate:
            refuse_create_graph(
                f"{ctx.book.curve} with {ctx.book.bits} bits kept",
                hint="A step function has no slope: use torch's own activation there.",
            )
        scale: Any = _Scale.apply if torch.is_grad_enabled() else _scale
        dx = scale(gradients[0], codes, ctx.book, ctx.strides)
        return dx if dx.dtype == ctx.dtype else dx.to(ctx.dtype), None, None


# Without the step that is for ``torch.func`` alone, where torch's own ops run.
_apply: Any = super(torch.autograd.Function, _FewBit).apply  # pyright: ignore[reportAttributeAccessIssue]


class _Scale(torch.autograd.Function):
    """dx = dy·slope of a straight activation, where it may be differentiated in turn: it is linear in dy."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dy: Tensor, codes: Tensor, book: Codebook, strides: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.book, ctx.strides = book, strides
        return _scale(dy, codes, book, strides)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (codes,) = ctx.saved_tensors
        return _Scale.apply(gradients[0], codes, ctx.book, ctx.strides), None, None, None


def _scale(dy: Tensor, codes: Tensor, book: Codebook, strides: tuple[int, ...]) -> Tensor:
    if dy.stride() != strides:
        dy = dy.new_empty_strided(dy.shape, strides).copy_(dy)
    if is_batched(dy):
        return _ops.fewbit_decode(dy, codes, book.key)  # as an op: torch gives it one gradient of a batch at a time
    return kernels.decode(dy, codes, book)


def _each(info: Any, in_dims: tuple[Any, ...], dy: Tensor, codes: Tensor, book: str) -> tuple[Tensor, int]:
    return torch.stack([_ops.fewbit_decode(one, codes, book) for one in dy.unbind(in_dims[0])]), 0


torch.library.register_vmap("lowtide::fewbit_decode", _each)


def _runs_plain(x: Tensor) -> bool:
    """Where nothing is kept anyway, or nothing of ours can run: torch's own ops do."""
    if not (torch.is_grad_enabled() and x.requires_grad and x.numel()) or not x.is_floating_point():
        return True
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return True
    if torch.compiler.is_compiling():
        return is_exporting()
    return is_transformed()


# -- under torch.compile ---------------------------------------------------------------------------------


@torch.library.custom_op("lowtide::fewbit", mutates_args=())
def _fewbit(x: Tensor, book: str) -> tuple[Tensor, Tensor]:
    """The activation, and the codes that its backward needs."""
    y, codes = kernels.forward(x, BOOKS[book])
    return y, codes


@_fewbit.register_fake
def _(x: Tensor, book: str) -> tuple[Tensor, Tensor]:
    size = packed_bytes(x.numel(), BOOKS[book].bits)
    return BOOKS[book].curve(x), x.new_empty(size, dtype=torch.uint8)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.key = inputs
    y, codes = output
    ctx.save_for_backward(codes)
    ctx.strides, ctx.dtype = y.stride(), x.dtype


def _gradient(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, None]:
    (codes,) = ctx.saved_tensors
    if dy.stride() != ctx.strides:
        dy = torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device).copy_(dy)
    return _ops.fewbit_decode(dy, codes, ctx.key).to(ctx.dtype), None


_fewbit.register_autograd(_gradient, setup_context=_keep)


# -- by name ---------------------------------------------------------------------------------------------


class GELU(_Named, nn.GELU):
    plain = nn.GELU


class SiLU(_Named, nn.SiLU):
    plain = nn.SiLU


class Mish(_Named, nn.Mish):
    plain = nn.Mish


class ELU(_Named, nn.ELU):
    plain = nn.ELU


class SELU(_Named, nn.SELU):
    plain = nn.SELU


class CELU(_Named, nn.CELU):
    plain = nn.CELU


class Softplus(_Named, nn.Softplus):
    plain = nn.Softplus


class Tanh(_Named, nn.Tanh):
    plain = nn.Tanh


class Sigmoid(_Named, nn.Sigmoid):
    plain = nn.Sigmoid


class LogSigmoid(_Named, nn.LogSigmoid):
    plain = nn.LogSigmoid


class Hardswish(_Named, nn.Hardswish):
    plain = nn.Hardswish


class Softsign(_Named, nn.Softsign):
    plain = nn.Softsign


class Tanhshrink(_Named, nn.Tanhshrink):
    plain = nn.Tanhshrink


class ReLU(_Named, nn.ReLU):
    plain = nn.ReLU


class LeakyReLU(_Named, nn.LeakyReLU):
    plain = nn.LeakyReLU


class Hardtanh(_Named, nn.Hardtanh):
    plain = nn.Hardtanh


class ReLU6(_Named, nn.ReLU6):
    plain = nn.ReLU6


class Hardsigmoid(_Named, nn.Hardsigmoid):
    plain = nn.Hardsigmoid


class Hardshrink(_Named, nn.Hardshrink):
    plain = nn.Hardshrink


class Softshrink(_Named, nn.Softshrink):
    plain = nn.Softshrink


class Threshold(_Named, nn.Threshold):
    plain = nn.Threshold
