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

from lowtide.compat.autograd import apply_of
from lowtide.compat.tensors import is_view
from lowtide.compat.transforms import is_batched, is_exporting, is_transformed
from lowtide.kernels import fewbit as kernels
from lowtide.kernels.activations import Activation, is_in_place, read_module
from lowtide.kernels.reference.fewbit import BOOKS, Codebook, codebook, packed_bytes
from lowtide.nn.fewbit_tables import Density, Samples, table_of
from lowtide.nn.second_order import refuse_create_graph

_ops: Any = torch.ops.lowtide


def few_bit(x: Tensor, book: Codebook, *, inplace: bool = False) -> Tensor:
    """Apply the activation of a codebook, saving ⌈bits·n/8⌉ bytes for backward.

    Second derivatives: of the straight ones alone. Others raise under ``create_graph=True``.

    >>> x = torch.randn(1000, requires_grad=True)
    >>> y = few_bit(x, book_for("gelu", bits=3))
    >>> torch.equal(y, nn.functional.gelu(x)), y.grad_fn.saved_tensors[0].nbytes
    (True, 375)
    """
    if _runs_plain(x):
        return _write(book.activation, x) if inplace else book.activation(x)
    if torch.compiler.is_compiling():
        y = _ops.fewbit(x, book.key)[0]
        return x.copy_(y) if inplace else y
    if inplace and (x.is_leaf or is_view(x)):
        # torch refuses to write to a leaf, before anything is written.
        return _write(book.activation, x) if x.is_leaf else x.copy_(_apply(x, book, False))
    return _apply(x, book, inplace)


def _write(activation: Activation, x: Tensor) -> Tensor:
    y = activation.write(x)
    return x if y is x else x.copy_(y)


def book_for(activation: object, bits: int = 3, density: str | Density | Tensor = "normal") -> Codebook:
    """Choose which inputs of an activation share a slope; a gate has one bit, whatever ``bits`` says."""
    pointwise = Activation.pointwise(activation)
    if pointwise.is_gate:
        return codebook(pointwise)
    table = table_of(pointwise, bits, density)
    return codebook(pointwise, table.boundaries, table.levels)


class _FewBitModule(nn.Module):
    """Shared by ``FewBit`` and the classes named as those of ``torch.nn``."""

    _bits: int
    _density: str | Density
    _book: Codebook

    @property
    def book(self) -> Codebook:
        """The codebook for the activation with the numbers it has now."""
        activation = self._activation()
        if activation != self._book.activation:
            self._book = book_for(activation, self._bits, self._density)
        return self._book

    @property
    def bits(self) -> int:
        """Bits kept per input."""
        return self._book.bits

    @property
    def density(self) -> str | Density | Tensor:
        """The density that the slopes are for; a tensor of inputs comes back sorted."""
        return self._density.values if isinstance(self._density, Samples) else self._density

    def calibrate(self, inputs: str | Density | Tensor) -> None:
        """Choose the slopes anew, for inputs or a density. A ``state_dict`` does not hold them: save ``density``."""
        self._choose(self._activation(), self._bits, inputs)

    def forward(self, input: Tensor) -> Tensor:
        return few_bit(input, self.book, inplace=is_in_place(self))

    def _choose(self, activation: object, bits: int, density: str | Density | Tensor) -> None:
        density = Samples(density) if isinstance(density, Tensor) else density
        self._book = book_for(activation, bits, density)
        self._bits, self._density = bits, density

    def _activation(self) -> Activation:
        return self._book.activation


class FewBit(_FewBitModule):
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
        self._choose(activation, bits, density)

    def extra_repr(self) -> str:
        return f"{self._activation()}, bits={self.bits}" + (", inplace=True" if self.inplace else "")


class _NamedActivation(_FewBitModule):
    """Before a class of ``torch.nn``: its activation with a few bits kept, its arguments, and two more by keyword."""

    plain: ClassVar[type[nn.Module]]

    def __init__(self, *args: Any, bits: int = 3, density: str | Density | Tensor = "normal", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._choose(self._activation(), bits, density)

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return f"{own}, bits={self.bits}" if own else f"bits={self.bits}"

    def _activation(self) -> Activation:
        return cast(Activation, read_module(self, self.plain))


# -- the function ----------------------------------------------------------------------------------------


class _FewBitFunction(torch.autograd.Function):
    """Torch's op forward, codes kept, slopes by code backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, book: Codebook, inplace: bool
    ) -> Tensor:
        if inplace:
            dense = kernels.laid_as(x, x)
            codes, ctx.strides = kernels.encode(dense, book), dense.stride()
            _write(book.activation, x)
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
        if not ctx.book.activation.is_gate:
            refuse_create_graph(
                f"{ctx.book.activation} with {ctx.book.bits} bits kept",
                hint="A step function has no slope: use torch's own activation there.",
            )
        scale: Any = _TimesSlope.apply if torch.is_grad_enabled() else _scale
        dx = scale(gradients[0], codes, ctx.book, ctx.strides)
        return dx if dx.dtype == ctx.dtype else dx.to(ctx.dtype), None, None


_apply = apply_of(_FewBitFunction)  # under ``torch.func``, torch's own ops run


class _TimesSlope(torch.autograd.Function):
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
        return _TimesSlope.apply(gradients[0], codes, ctx.book, ctx.strides), None, None, None


def _scale(dy: Tensor, codes: Tensor, book: Codebook, strides: tuple[int, ...]) -> Tensor:
    dy = _laid_out(dy, strides)
    if is_batched(dy):
        return _ops.fewbit_decode(dy, codes, book.key)  # as an op: torch gives it one gradient of a batch at a time
    return kernels.decode(dy, codes, book)


def _laid_out(dy: Tensor, strides: tuple[int, ...]) -> Tensor:
    return dy if dy.stride() == strides else dy.new_empty_strided(dy.shape, strides).copy_(dy)


def _each(info: Any, in_dims: tuple[Any, ...], dy: Tensor, codes: Tensor, book: str) -> tuple[Tensor, int]:
    return torch.stack([_ops.fewbit_decode(one, codes, book) for one in dy.unbind(in_dims[0])]), 0


torch.library.register_vmap("lowtide::fewbit_decode", _each)


def _runs_plain(x: Tensor) -> bool:
    """Tell whether torch's own ops run: nothing would be saved, or no kernel of lowtide can run."""
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
    return BOOKS[book].activation(x), x.new_empty(size, dtype=torch.uint8)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.key = inputs
    y, codes = output
    ctx.save_for_backward(codes)
    ctx.strides, ctx.dtype = y.stride(), x.dtype


def _gradient(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, None]:
    (codes,) = ctx.saved_tensors
    return _ops.fewbit_decode(_laid_out(dy, ctx.strides), codes, ctx.key).to(ctx.dtype), None


_fewbit.register_autograd(_gradient, setup_context=_keep)


# -- by name ---------------------------------------------------------------------------------------------


def _named(plain: type[nn.Module]) -> type[_NamedActivation]:
    return type(plain.__name__, (_NamedActivation, plain), {"__module__": __name__, "plain": plain})


GELU, SiLU, Mish = _named(nn.GELU), _named(nn.SiLU), _named(nn.Mish)
ELU, SELU, CELU, Softplus = _named(nn.ELU), _named(nn.SELU), _named(nn.CELU), _named(nn.Softplus)
Tanh, Sigmoid, LogSigmoid = _named(nn.Tanh), _named(nn.Sigmoid), _named(nn.LogSigmoid)
Hardswish, Softsign, Tanhshrink = _named(nn.Hardswish), _named(nn.Softsign), _named(nn.Tanhshrink)
ReLU, LeakyReLU, ReLU6, Threshold = _named(nn.ReLU), _named(nn.LeakyReLU), _named(nn.ReLU6), _named(nn.Threshold)
Hardtanh, Hardsigmoid = _named(nn.Hardtanh), _named(nn.Hardsigmoid)
Hardshrink, Softshrink = _named(nn.Hardshrink), _named(nn.Softshrink)
