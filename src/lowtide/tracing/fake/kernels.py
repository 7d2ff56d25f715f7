"""Corrections of torch's fake kernels where sizes, dtypes or layouts differ from the real ones.

``tests/tracing/fake/test_kernels.py`` runs each of them against the real op, and fails if one is no longer needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.operators import elementwise_strides, suggest_memory_format
from lowtide.compat.tensors import sparse_parts

aten = torch.ops.aten

Fix = Callable[..., Any]  # called with an op's fake output and the op's arguments; returns the true output


# -- sizes ---------------------------------------------------------------------------------------------


def lstm_workspace_bytes(
    steps: int, batch: int, wide: int, hidden: int, *, itemsize: int = 4, cell_itemsize: int = 4
) -> int:
    """Bytes that oneDNN keeps for the backward pass of one layer and direction of an LSTM.

    ``wide`` is the width of the input. ``itemsize`` is that of the states, ``cell_itemsize`` that of the cell states.
    Each part starts on a new page (oneDNN's ``rnn_utils``: ``set_workspace_sizes``, ``set_offsets``):

    - the gates and the hidden states;
    - the states and the cell states, from before the first step to after the last, of the layer and of its input;
    - the gradients of both, in float32.

    >>> lstm_workspace_bytes(12, 2, 32, 32)
    57344
    """
    gates, states = steps * batch, 2 * (steps + 1) * batch
    widest = max(wide, hidden)
    parts = (
        gates * _row(4 * hidden, itemsize) * itemsize,
        gates * _row(hidden, itemsize) * itemsize,
        states * _row(widest, itemsize) * itemsize,
        states * hidden * cell_itemsize,
        states * _row(widest, 4) * 4,
        states * _row(widest, 4) * 4,
        states * hidden * 4,
        0,  # of GRUs alone; this empty part still ends the last one at a page
    )
    size = 0
    for part in parts:
        size = _up(size, 4096) + part
    return size


def _row(width: int, itemsize: int) -> int:
    """Length of a row in elements: whole cache lines, and no multiple of 256, whose rows would share them."""
    line = 64 // itemsize
    length = _up(width, line)
    return length + line if length % 256 == 0 else length


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _lstm_layer(out: Any, input: Tensor, *_args: Any, **_kwargs: Any) -> Any:
    """The workspace of the fake kernel is empty. Without gradients there is none."""
    output, hy, cy, workspace = out
    if not torch.is_grad_enabled():
        return output, hy, cy, None
    steps, batch, wide = input.shape
    size = lstm_workspace_bytes(
        steps, batch, wide, hy.shape[-1], itemsize=input.element_size(), cell_itemsize=cy.element_size()
    )
    return output, hy, cy, workspace.new_empty(size)


def _lstm_layer_backward(out: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Both biases have one gradient, and the fake kernel returns it twice; the real one copies it.

    Torch 2.11 gives gradients the type of the inputs, and absent biases the shape of a weight.
    """
    x, weight_ih, weight_hh, bias, _, hx, cx = (gradient.float() for gradient in out)
    return x, weight_ih, weight_hh, *(bias.new_empty(len(bias)) for _ in range(2)), hx, cx


def _loss(out: Tensor, input: Tensor, target: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """Losses that are computed element by element and shrunk to a scalar in the same storage."""
    return out if out.ndim else _grown(out, torch.broadcast_shapes(input.shape, target.shape).numel())


def _binary_cross_entropy(out: Tensor, input: Tensor, target: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return torch.empty_like(input) if out.ndim else _loss(out, input, target)


def _resized(out: Tensor, input: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """The output starts as large as the input and is resized; its storage does not shrink."""
    return _grown(out, input.numel())


def _whole(out: Tensor, tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """A copy of a part of a storage is a copy of all of it. Torch's cache of fake results knows the part alone."""
    return _grown(out, tensor.untyped_storage().nbytes() // tensor.element_size())


def _window(out: Tensor, length: int, periodic: bool = True, *_args: Any, **_kwargs: Any) -> Tensor:
    """A periodic window is one that is longer by an element, cut off."""
    return _grown(out, length + (periodic and length > 1))


def _embedding_bag(
    out: Any,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
    trains: bool = True,
) -> Any:
    """The bag of each index: omitted for plain sums, otherwise with one element more.

    The fake kernel does so for sums of bfloat16 too. The bags' sizes start as many as the offsets.
    """
    result, _, _, max_indices = out
    plain = padding_idx < 0 and weight.stride(1) == 1 and weight.dtype != torch.float64
    plain = plain and (per_sample_weights is None or per_sample_weights.stride(0) == 1)
    count = 0 if mode == 0 and plain else indices.numel()
    bags = offsets.numel() - (include_last_offset and (trains or mode > 0))
    return (
        result,
        _grown(offsets.new_empty(count), count + 1 if count else 0),
        _grown(offsets.new_empty(bags), offsets.numel()),
        max_indices if mode == 2 else offsets.new_empty(bags),
    )


def _embedding_bag_backward(out: Tensor, grad: Tensor, indices: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """A sparse gradient has a row for each index; the fake kernel counts those whose bag was written down."""
    if out.layout is not torch.sparse_coo:
        return out
    return _sparse(out, indices.view(1, -1), grad.new_empty(indices.numel(), grad.shape[1]))


def _clone(out: Tensor, tensor: Tensor, **_kwargs: Any) -> Tensor:
    """A copy of a sparse tensor has its entries; the fake one has none."""
    if tensor.layout is not torch.sparse_coo:
        return out
    return _sparse(tensor, *(part.clone() for part in sparse_parts(tensor)))


def _sparse(like: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return aten._sparse_coo_tensor_with_dims_and_tensors.default(
        like.sparse_dim(),
        like.dense_dim(),
        like.shape,
        indices,
        values,
        dtype=like.dtype,
        layout=like.layout,
        device=like.device,
        is_coalesced=like.is_coalesced(),
    )


def _grown(tensor: Tensor, count: int) -> Tensor:
    """The tensor, with room for at least ``count`` elements."""
    storage, size = tensor.untyped_storage(), count * tensor.element_size()
    if storage.nbytes() < size:
        storage.resize_(size)
    return tensor


# -- types ---------------------------------------------------------------------------------------------


def _norm(first: int, last: int, *, suggested: bool = False) -> Fix:
    """Kernels on the CPU keep statistics in the type of the parameters, the fake ones in the input's.

    The parameters are among the arguments ``first`` to ``last``.
    """

    def fix(out: Any, *args: Any, **_kwargs: Any) -> Any:
        result, mean, rstd, *rest = out
        dtype = next((p.dtype for p in args[first : last + 1] if p is not None), args[0].dtype)
        return _as_suggested(result, args[0]) if suggested else result, mean.to(dtype), rstd.to(dtype), *rest

    return fix


def _norm_backward(out: Any, _grad: Tensor, input: Tensor, *args: Any, **_kwargs: Any) -> Any:
    """The gradient has the input's type, and on a CPU its memory format; it is not made where nobody asks for it."""
    grad, *rest = out
    asked: list[bool] = args[-1]
    if grad is None or not asked[0]:
        return None, *rest
    return (_as_suggested(grad.to(input.dtype), input) if input.device.type == "cpu" else grad), *rest


def _batch_norm_backward(out: Any, grad: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A GPU's is channels-last where both are, else contiguous."""
    gradient, *rest = _norm_backward(out, grad, input, *args, **kwargs)
    if gradient is not None and gradient.is_cuda and suggest_memory_format(grad) != suggest_memory_format(input):
        gradient = _contiguous(gradient)
    return gradient, *rest


# -- layouts -------------------------------------------------------------------------------------------


def _contiguous(out: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Written row by row, whatever the layout of the inputs."""
    if isinstance(out, Tensor):
        return out if out.is_contiguous() else out.new_empty(out.shape)
    return tuple(None if part is None else _contiguous(part) for part in out)


def _suggested(position: int) -> Fix:
    """Channels-last where an argument is so, else contiguous."""

    def fix(out: Tensor, *args: Any, **_kwargs: Any) -> Tensor:
        return _as_suggested(out, args[position])

    return fix


def _as_suggested(out: Tensor, input: Tensor) -> Tensor:
    memory_format = suggest_memory_format(input)
    fits = out.is_contiguous(memory_format=memory_format)
    return out if fits else torch.empty_like(out, memory_format=memory_format)


def _like(position: int) -> Fix:
    """Laid out like an argument."""

    def fix(out: Tensor, *args: Any, **_kwargs: Any) -> Tensor:
        return torch.empty_like(args[position], dtype=out.dtype)

    return fix


def _pointwise(first: int = 0, second: int = 1) -> Fix:
    """Take the layout of the first of two operands, unless it is a broadcast one.

    Decompositions ask them in another order, or after a conversion that made a broadcast operand dense.
    """

    def fix(out: Tensor, *args: Any, **_kwargs: Any) -> Tensor:
        operands = args[first], args[second]
        if all(not isinstance(t, Tensor) or t.layout is not torch.strided or t.is_contiguous() for t in operands):
            return out
        if out.device.type == "cpu":  # there, a type that differs is converted before
            common = torch.result_type(*operands)
            operands = tuple(t.to(common) if isinstance(t, Tensor) else t for t in operands)
        stride = elementwise_strides(*(t.expand(out.shape) for t in operands if isinstance(t, Tensor)))
        return out if out.stride() == stride else out.new_empty_strided(out.shape, stride)

    return fix


def _fft_r2c(out: Tensor, input: Tensor, dims: list[int], *_args: Any, **_kwargs: Any) -> Tensor:
    """Transformed dimensions are the innermost ones, the last of them first; the others keep their order."""
    if not torch.backends.mkl.is_available():
        return out
    stride = input.stride()
    order = sorted(range(input.ndim), key=lambda dim: (dim == dims[-1], dim in dims, -stride[dim]))
    return out.new_empty([out.shape[dim] for dim in order]).permute(*(order.index(dim) for dim in range(input.ndim)))


# -- the table -----------------------------------------------------------------------------------------


def _on_cpu(fix: Fix) -> Fix:
    """For kernels that differ from their fakes on the CPU alone."""

    def on_cpu(out: Any, *args: Any, **kwargs: Any) -> Any:
        return fix(out, *args, **kwargs) if args[0].device.type == "cpu" else out

    return on_cpu


def _group_norm_backward(grad: Tensor, *args: Any) -> Any:
    """The fake kernel looks at the gradient as at one row per channel, and fails where a copy is needed for that."""
    return aten.native_group_norm_backward.default(grad.contiguous(), *args)


def _batch_norm_update_stats(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """The mean and the variance of each channel; there is no fake kernel, and torch would run the real one on zeros.

    A CPU gives them in the type of the running statistics, else of the input; a GPU in float32 at least.
    """
    if input.device.type != "cpu":
        dtype = torch.promote_types(input.dtype, torch.float32)
    else:
        dtype = input.dtype if running_mean is None else running_mean.dtype
    return input.new_empty(input.shape[1], dtype=dtype), input.new_empty(input.shape[1], dtype=dtype)


# Called instead of fake kernels that fail where the real ones do not, or that are missing.
SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    aten.batch_norm_update_stats.default: _batch_norm_update_stats,
    aten.native_group_norm_backward.default: _group_norm_backward,
}

_WINDOWS = ("bartlett", "blackman", "hamming", "hann", "kaiser")
_SCATTERS = ("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
_SCALAR_LOSSES = ("mse_loss", "smooth_l1_loss", "soft_margin_loss")
_ACTIVATIONS = ("gelu", "hardsigmoid", "hardswish", "hardtanh", "logit", "mish", "sigmoid", "silu", "softplus", "tanh")
_ARITHMETIC = ("add", "sub", "mul", "div", "copysign", "xlogy")
_PADDINGS = ("reflection", "replication")
_CONTIGUOUS = (
    "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "nll_loss2d_forward",
    "_log_softmax_backward_data", "native_layer_norm_backward", "glu_backward", "rrelu_with_noise",
)  # fmt: skip


def _named(names: Iterable[str], fix: Fix) -> dict[Any, Fix]:
    return {getattr(aten, name).default: fix for name in names}


# Called with what fake kernels return.
FIXES: dict[Any, Fix] = {
    # Results in a storage larger than they are.
    **_named(("copy", *_SCATTERS), _whole),
    **{getattr(aten, f"{kind}_window").default: _window for kind in _WINDOWS},
    **{getattr(aten, f"{kind}_window").periodic: _window for kind in _WINDOWS},
    **_named(("im2col", "col2im"), _resized),
    **_named(_SCALAR_LOSSES, _loss),
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    # Kept for backward.
    aten.mkldnn_rnn_layer.default: _lstm_layer,
    aten.mkldnn_rnn_layer_backward.default: _lstm_layer_backward,
    aten._embedding_bag.default: _on_cpu(_embedding_bag),
    aten._embedding_bag_forward_only.default: _on_cpu(partial(_embedding_bag, trains=False)),
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten.clone.default: _clone,
    # Norms.
    aten.native_batch_norm.default: _on_cpu(_norm(1, 4, suggested=True)),
    aten._native_batch_norm_legit_functional.default: _on_cpu(_norm(1, 4, suggested=True)),
    aten._native_batch_norm_legit.no_stats: _on_cpu(_norm(1, 2, suggested=True)),
    aten.native_layer_norm.default: _on_cpu(_norm(2, 3)),
    aten.native_group_norm.default: _on_cpu(_norm(1, 2)),
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm_backward.default: _norm_backward,
    # Layouts of losses, activations and arithmetic.
    **_named(_CONTIGUOUS, _contiguous),
    aten.pow.Scalar: _contiguous,
    aten.normal.Tensor_Tensor: _contiguous,
    aten.log_sigmoid_forward.default: _on_cpu(_contiguous),
    aten.log_sigmoid_backward.default: _like(0),
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.rrelu_with_noise_backward.default: _pointwise(2, 0),
    aten.elu_backward.default: _pointwise(0, 5),
    **_named((f"{name}_backward" for name in _ACTIVATIONS), _pointwise()),
    aten.native_dropout_backward.default: _on_cpu(_pointwise()),
    **{getattr(aten, name).Tensor: _pointwise() for name in _ARITHMETIC},
    aten.div.Tensor_mode: _pointwise(),
    # Layouts of images.
    **_named((f"{kind}_pad{dims}d_backward" for kind in _PADDINGS for dims in (2, 3)), _on_cpu(_suggested(1))),
    **_named((f"{kind}_pad3d" for kind in _PADDINGS), _on_cpu(_suggested(0))),
    **_named(("max_unpool2d", "channel_shuffle"), _on_cpu(_suggested(0))),
}
if torch.__version__ < "2.13":  # whose own are right
    FIXES.update(_named((f"{kind}_pad2d" for kind in _PADDINGS), _on_cpu(_suggested(0))))
    FIXES[aten._fft_r2c.default] = _on_cpu(_fft_r2c)
