"""Where torch's fake kernels lie: the sizes, types and layouts that the real ones give."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format

aten = torch.ops.aten

Fix = Callable[..., Any]


# -- sizes ---------------------------------------------------------------------------------------------


def _lstm_layer(out: Any, input: Tensor, *args: Any, **_kwargs: Any) -> Any:
    """OneDNN keeps a workspace for the backward pass; the fake one is empty. Without gradients there is none."""
    output, hy, cy, workspace = out
    if not torch.is_grad_enabled():
        return output, hy, cy, None
    steps, batch, wide = input.shape
    hidden, cell = hy.shape[-1], cy.element_size()
    size = lstm_workspace_bytes(steps, batch, wide, hidden, item=input.element_size(), cell=cell)
    return output, hy, cy, workspace.new_empty(size)


def lstm_workspace_bytes(steps: int, batch: int, wide: int, hidden: int, *, item: int = 4, cell: int = 4) -> int:
    """Bytes that oneDNN keeps for the backward pass of one layer and direction of an LSTM.

    Parts one after the other, each from a new page on: the gates, the hidden states before projection, the
    states and the cell states (from before the first step to after the last, of the layer and of its input),
    and the gradients of both in float32 (``rnn_utils::set_workspace_sizes`` and ``set_offsets`` in oneDNN).
    """
    gates, states = steps * batch, 2 * (steps + 1) * batch
    widest = max(wide, hidden)
    parts = (
        gates * _leading(4 * hidden, item) * item,
        gates * _leading(hidden, item) * item,
        states * _leading(widest, item) * item,
        states * hidden * cell,
        states * _leading(widest, 4) * 4,
        states * _leading(widest, 4) * 4,
        states * hidden * 4,
        0,  # of GRUs alone; that it is there still ends the last part at a page
    )
    size = 0
    for part in parts:
        size = _up(size, 4096) + part
    return size


def _leading(width: int, item: int) -> int:
    """OneDNN's row length in elements: whole cache lines, and no multiple of 256, which would alias in the cache."""
    line = 64 // item
    padded = _up(width, line)
    return padded + line if padded % 256 == 0 else padded


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _lstm_layer_backward(out: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Both biases have one gradient, and the fake kernel returns it twice; the real one copies it."""
    x, weight_ih, weight_hh, bias_ih, _, hx, cx = out
    return x, weight_ih, weight_hh, bias_ih, torch.empty_like(bias_ih), hx, cx


def _reduced_in_place(out: Tensor, input: Tensor, target: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """These losses are computed element by element and shrunk to a scalar in the same storage."""
    if out.ndim:
        return out
    return _grown(out, torch.broadcast_shapes(input.shape, target.shape).numel())


def _binary_cross_entropy(out: Tensor, input: Tensor, target: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return torch.empty_like(input) if out.ndim else _reduced_in_place(out, input, target)


def _reshaped_in_place(out: Tensor, input: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """The output starts as large as the input and is resized: its storage never shrinks."""
    return _grown(out, input.numel())


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
    """Which bag each index belongs to is left out of plain sums, and else counted up in one element more.

    The fake kernel counts in sums of bfloat16 too. Bag sizes start as many as the offsets.
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
    return _sparse(tensor, tensor._indices().clone(), tensor._values().clone())


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
    """The tensor, with a storage of at least ``count`` elements."""
    storage = tensor.untyped_storage()
    if storage.nbytes() < count * tensor.element_size():
        storage.resize_(count * tensor.element_size())
    return tensor


# -- types ---------------------------------------------------------------------------------------------


def _batch_norm(out: Any, input: Tensor, *args: Any, **_kwargs: Any) -> Any:
    """CPU kernels keep the statistics in the parameters' type; the fake one takes the input's."""
    result, mean, rstd = out
    return _as_suggested(result, input), *_in_type_of(args[:4], mean, rstd)


def _layer_norm(out: Any, input: Tensor, shape: Any, *args: Any, **_kwargs: Any) -> Any:
    result, mean, rstd = out
    return result, *_in_type_of(args[:2], mean, rstd)


def _group_norm(out: Any, input: Tensor, *args: Any, **_kwargs: Any) -> Any:
    result, mean, rstd = out
    return result, *_in_type_of(args[:2], mean, rstd)


def _in_type_of(parameters: tuple[Tensor | None, ...], *statistics: Tensor) -> tuple[Tensor, ...]:
    dtype = next((p.dtype for p in parameters if p is not None), statistics[0].dtype)
    return tuple(s.to(dtype) for s in statistics)


def _norm_backward(out: Any, _grad: Tensor, input: Tensor, *args: Any, **_kwargs: Any) -> Any:
    """The gradient has the input's type and memory format; it is not made where nobody asked for it."""
    grad, *rest = out
    asked: list[bool] = args[-1]
    if grad is None or not asked[0]:
        return None, *rest
    return (_as_suggested(grad.to(input.dtype), input) if input.device.type == "cpu" else grad), *rest


# -- layouts -------------------------------------------------------------------------------------------


def _contiguous(out: Any, *_args: Any, **_kwargs: Any) -> Any:
    """These kernels write their outputs row by row, whatever the layout of the input."""
    if isinstance(out, Tensor):
        return out if out.is_contiguous() else out.new_empty(out.shape)
    return tuple(None if part is None else _contiguous(part) for part in out)


def _suggested(out: Tensor, input: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """Channels-last where the input is so, else contiguous."""
    return _as_suggested(out, input)


def _suggested_backward(out: Tensor, _grad: Tensor, input: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return _as_suggested(out, input)


def _as_suggested(out: Tensor, input: Tensor) -> Tensor:
    memory_format = suggest_memory_format(input)
    if out.is_contiguous(memory_format=memory_format):
        return out
    return torch.empty_like(out, memory_format=memory_format)


def _pointwise(*positions: int) -> Fix:
    """The first operand whose layout decides, decides; decompositions ask in another order, or ask converted ones."""

    def fix(out: Tensor, *args: Any, **_kwargs: Any) -> Tensor:
        operands = [args[p] for p in positions if isinstance(args[p], Tensor)]
        if all(operand.layout is not torch.strided or operand.is_contiguous() for operand in operands):
            return out
        if out.device.type == "cpu":  # operands are converted before they are asked
            common = torch.result_type(*operands) if len(operands) == 2 else out.dtype
            operands = [operand.to(common) for operand in operands]
        stride = compute_elementwise_output_strides(*(operand.expand(out.shape) for operand in operands))
        return out if out.stride() == stride else out.new_empty_strided(out.shape, stride)

    return fix


def _like(position: int) -> Fix:
    """Laid out like one of the arguments."""

    def fix(out: Tensor, *args: Any, **_kwargs: Any) -> Tensor:
        return torch.empty_like(args[position], dtype=out.dtype)

    return fix


def _on_cpu(fix: Fix) -> Fix:
    """The fix, for kernels that differ so from their fakes on the CPU alone."""

    def on_cpu(out: Any, *args: Any, **kwargs: Any) -> Any:
        return fix(out, *args, **kwargs) if args[0].device.type == "cpu" else out

    return on_cpu


FIXES: dict[Any, Fix] = {
    aten.mkldnn_rnn_layer.default: _lstm_layer,
    aten.mkldnn_rnn_layer_backward.default: _lstm_layer_backward,
    aten.mse_loss.default: _reduced_in_place,
    aten.smooth_l1_loss.default: _reduced_in_place,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.soft_margin_loss.default: _reduced_in_place,
    aten.im2col.default: _reshaped_in_place,
    aten.col2im.default: _reshaped_in_place,
    aten.clone.default: _clone,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._embedding_bag.default: _on_cpu(_embedding_bag),
    aten._embedding_bag_forward_only.default: _on_cpu(partial(_embedding_bag, trains=False)),
    aten.native_batch_norm.default: _on_cpu(_batch_norm),
    aten.native_layer_norm.default: _on_cpu(_layer_norm),
    aten.native_group_norm.default: _on_cpu(_group_norm),
    aten.native_batch_norm_backward.default: _norm_backward,
    aten.native_group_norm_backward.default: _norm_backward,
    aten.native_layer_norm_backward.default: _on_cpu(_contiguous),
    aten.log_sigmoid_forward.default: _on_cpu(_contiguous),
    aten.log_sigmoid_backward.default: _like(0),
    aten.mse_loss_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.huber_loss_backward.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous,
    aten.glu_backward.default: _contiguous,
    aten.nll_loss2d_forward.default: _contiguous,
    aten.pow.Scalar: _contiguous,
    aten.reflection_pad2d_backward.default: _on_cpu(_suggested_backward),
    aten.replication_pad2d_backward.default: _on_cpu(_suggested_backward),
    aten.reflection_pad3d_backward.default: _on_cpu(_suggested_backward),
    aten.replication_pad3d_backward.default: _on_cpu(_suggested_backward),
    aten.reflection_pad3d.default: _on_cpu(_suggested),
    aten.replication_pad3d.default: _on_cpu(_suggested),
    aten.max_unpool2d.default: _on_cpu(_suggested),
    aten.channel_shuffle.default: _on_cpu(_suggested),
    aten.elu_backward.default: _pointwise(0, 5),
    aten.hardsigmoid_backward.default: _pointwise(0, 1),
    aten.hardtanh_backward.default: _pointwise(0, 1),
    aten.hardswish_backward.default: _pointwise(0, 1),
    aten.softplus_backward.default: _pointwise(0, 1),
    aten.logit_backward.default: _pointwise(0, 1),
    aten.native_dropout_backward.default: _pointwise(0, 1),
    aten.gelu_backward.default: _pointwise(0, 1),
    aten.silu_backward.default: _pointwise(0, 1),
    aten.sigmoid_backward.default: _pointwise(0, 1),
    aten.tanh_backward.default: _pointwise(0, 1),
    aten.mish_backward.default: _pointwise(0, 1),
    aten.add.Tensor: _pointwise(0, 1),
    aten.sub.Tensor: _pointwise(0, 1),
    aten.mul.Tensor: _pointwise(0, 1),
    aten.div.Tensor: _pointwise(0, 1),
    aten.xlogy.Tensor: _pointwise(0, 1),
    aten.copysign.Tensor: _pointwise(0, 1),
    aten.div.Tensor_mode: _pointwise(0, 1),
    aten.rrelu_with_noise.default: _contiguous,
    aten.normal.Tensor_Tensor: _contiguous,
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.rrelu_with_noise_backward.default: _pointwise(2, 0),
}
