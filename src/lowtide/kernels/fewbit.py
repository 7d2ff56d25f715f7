"""Few-bit backward by the kernels that fit the tensor: Triton's on a GPU, torch's ops elsewhere.

As ops (``torch.ops.lowtide.fewbit_encode``) they can be compiled, captured and traced; there a codebook goes
by its key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.compat.fake import FakeTensor
from lowtide.kernels import launches
from lowtide.kernels.reference import fewbit as reference
from lowtide.kernels.reference.fewbit import BOOKS, Codebook, packed_bytes

_ops: Any = torch.ops.lowtide


def forward(x: Tensor, book: Codebook) -> tuple[Tensor, Tensor]:
    """Y, as torch computes it, and the codes of x in the order in which y lies in memory."""
    fast = _fast_kernels(x)
    if fast is not None and is_dense(x) and (activation := _with_torchs_bits(book, x, fast)) is not None:
        return fast.forward(x, book, activation)
    y = book.activation(x)
    return y, encode(laid_as(y, x), book)


def encode(x: Tensor, book: Codebook) -> Tensor:
    """The codes of a dense x, ⌈bits·n/8⌉ bytes."""
    fast = _fast_kernels(x)
    if fast is None:
        # On a CPU a trace sees each of its ops, and so predicts its bytes. An absent GPU takes one op.
        return reference.encode(x, book) if x.device.type == "cpu" else _ops.fewbit_encode(x, book.key)
    if book.activation.is_gate and x.dtype is not torch.float32:
        return _encode_gate(x, book, fast)
    return fast.encode(x, book)


def decode(dy: Tensor, codes: Tensor, book: Codebook) -> Tensor:
    """Dx of a dense dy that lies in memory as the coded x did."""
    fast = _fast_kernels(dy)
    if fast is None:
        return reference.decode(dy, codes, book) if dy.device.type == "cpu" else _ops.fewbit_decode(dy, codes, book.key)
    return fast.decode(dy, codes, book)


def is_dense(x: Tensor) -> bool:
    """Tell whether x fills its part of memory, in any order of dimensions."""
    return x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(x)


def laid_as(y: Tensor, x: Tensor) -> Tensor:
    """A dense x: in the order of y in memory where that is dense."""
    if not is_dense(y):
        return x.contiguous()
    return x if x.stride() == y.stride() else torch.empty_like(y, dtype=x.dtype).copy_(x)


def _fast_kernels(x: Tensor) -> Any:
    return None if torch.compiler.is_compiling() else launches.fast_kernels("fewbit", x)


# -- proofs by looking at all inputs ---------------------------------------------------------------------

_proofs: dict[tuple[Any, ...], Any] = {}


def _with_torchs_bits(book: Codebook, x: Tensor, fast: Any) -> int | None:
    """In which way the kernel that computes the activation too gives what torch's does, if in any.

    In 16 bits there are 65,536 inputs, and at the first use on a device all of them are compared.
    """
    if x.element_size() != 2 or book.activation.name == "softplus":  # autocast widens that one
        return None
    key = book.activation, x.dtype, x.device
    if key not in _proofs:
        if not _may_look(x):
            return None
        inputs = _all_inputs(x)
        with torch.no_grad():
            expected = book.activation(inputs)
            ways = fast.activations(book.activation)
            _proofs[key] = next((w for w in ways if _same_bits(fast.forward(inputs, book, w)[0], expected)), None)
    return _proofs[key]


def _encode_gate(x: Tensor, book: Codebook, fast: Any) -> Tensor:
    """A gate's ends in 16 bits are rounded or not as torch does it, which is looked up the same way."""
    key = book.activation, x.dtype, x.device, "ends"
    if key not in _proofs:
        if not _may_look(x):
            return fast.encode(x, book)
        inputs = _all_inputs(x)
        expected = reference.encode(inputs, book)
        matches = [r for r in (False, True) if torch.equal(fast.encode(inputs, book, rounded=r), expected)]
        _proofs[key] = matches[0] if matches else None
    rounded = _proofs[key]
    return reference.encode(x, book) if rounded is None else fast.encode(x, book, rounded=rounded)


def _may_look(x: Tensor) -> bool:
    """Not while a CUDA graph is captured, nor where nothing is computed."""
    is_fake = isinstance(x, FakeTensor) or launches.watcher is not None
    return not is_fake and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _all_inputs(x: Tensor) -> Tensor:
    return torch.arange(2**16, dtype=torch.int32, device=x.device).to(torch.int16).view(x.dtype)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN is NaN."""
    if a.dtype != b.dtype:
        return False
    nan = torch.isnan(a)
    same = (a.view(torch.int16) == b.view(torch.int16)) | nan
    return bool(torch.equal(nan, torch.isnan(b)) and same.all())


# -- ops -------------------------------------------------------------------------------------------------


@torch.library.custom_op("lowtide::fewbit_encode", mutates_args=())
def _encode(x: Tensor, book: str) -> Tensor:
    return encode(x, BOOKS[book]) if _fast_kernels(x) else reference.encode(x, BOOKS[book])


@_encode.register_fake
def _(x: Tensor, book: str) -> Tensor:
    return x.new_empty(packed_bytes(x.numel(), BOOKS[book].bits), dtype=torch.uint8)


@torch.library.custom_op("lowtide::fewbit_decode", mutates_args=())
def _decode(dy: Tensor, codes: Tensor, book: str) -> Tensor:
    """Dx of a dense dy."""
    return (_fast_kernels(dy) or reference).decode(dy, codes, BOOKS[book])


@_decode.register_fake
def _(dy: Tensor, codes: Tensor, book: str) -> Tensor:
    return torch.empty_like(dy)
