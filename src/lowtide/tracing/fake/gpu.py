"""Predict a GPU's step: CUDA's ops and their saved values, on a machine with or without CUDA.

With a GPU, fake CUDA tensors go through torch's own choices. Without one, three things are missing, and replaced here
while the step is traced. They are autograd's device guard, its engine (see ``backward.py``), and torch's choices by the
GPU (attention, recurrent layers).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.compat.cuda import LACKS_AMP, USES_CUDNN, device_guard
from lowtide.errors import TraceError

aten = torch.ops.aten

_DROPOUT_STATE_BYTES = 132 * 2048 * 24  # a generator for each thread of a Hopper GPU: cuDNN's dropout keeps it


@contextmanager
def emulated_gpu() -> Generator[None]:
    """Make fake tensors on ``cuda`` behave as on a machine with a GPU."""
    with ExitStack() as stack:
        # nn.RNN would lay its fake weights out for cuDNN, or warn that it cannot.
        stack.enter_context(mock.patch(USES_CUDNN, return_value=False))
        if torch.cuda.is_available():
            stack.enter_context(_CudaChoices(_RECURRENT))
            yield
            return
        stack.enter_context(device_guard())
        stack.enter_context(mock.patch(LACKS_AMP, return_value=False))
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", return_value=True))
        stack.enter_context(_CudaChoices({**_RECURRENT, F.scaled_dot_product_attention: _attention}))
        yield


class _CudaChoices(TorchFunctionMode):
    """Make the choices of composite functions that inspect the GPU, before autograd sees them."""

    def __init__(self, choices: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._choices = choices

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and F.scaled_dot_product_attention in self._choices:
            # Its inner calls do not come back to this mode.
            with mock.patch.object(F, "scaled_dot_product_attention", _attention):
                return func(*args, **kwargs)
        choice: Any = self._choices.get(func, func)
        return choice(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention for 16-bit types without a mask, memory-efficient attention otherwise, as on Hopper."""
    if query.device.type != "cuda" or query.ndim != 4 or enable_gqa:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if query.dtype in (torch.float16, torch.bfloat16) and attn_mask is None and query.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]


def _recurrent(mode: int) -> Callable[..., tuple[Tensor, ...]]:
    """A layer of cuDNN: 0 relu, 1 tanh, 2 LSTM, 3 GRU. Packed sequences come as data and batch sizes."""

    def run(input: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        packed = isinstance(rest[0], Tensor) and not isinstance(rest[1], bool) and isinstance(rest[2], (list, tuple))
        packed = packed and isinstance(rest[2][0], Tensor)
        if packed:
            raise TraceError("Packed sequences cannot be predicted for a GPU", hint="Profile a real step.")
        hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first = rest
        hx, cx = hidden if mode == 2 else (hidden, None)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            input, hx = input.to(dtype), hx.to(dtype)
            cx = None if cx is None else cx.to(dtype)
            weights = [w.to(dtype) for w in weights]
        gates = {0: 1, 1: 1, 2: 4, 3: 3}[mode]
        size = weights[1].shape[0] // gates
        random = _DROPOUT_STATE_BYTES if dropout and train else 0
        state = torch.empty(random, dtype=torch.uint8, device=input.device)
        output, hy, cy, _, _ = aten._cudnn_rnn(
            input, weights, 4 if has_biases else 2, weights[0].detach().flatten(), hx, cx, mode, size, 0, layers,
            batch_first, dropout, train, bidirectional, [], state,
        )  # fmt: skip
        return (output, hy, cy) if mode == 2 else (output, hy)

    return run


def _cudnn_rnn(
    input: Tensor, weight: list[Tensor], weight_stride0: int, weight_buf: Tensor | None, hx: Tensor, cx: Tensor | None,
    mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: list[int], dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Outputs of cuDNN's recurrent layers; torch's fake kernel leaves the reserve out."""
    directions = 2 if bidirectional else 1
    units = hidden_size * directions
    out = (proj_size or hidden_size) * directions
    if batch_sizes:
        output = input.new_empty(input.shape[0], out)
        cells = input.shape[0] * units
    else:
        output = _time_major(input, out, batch_first)
        cells = input.shape[0] * input.shape[1] * units
    hy = hx.new_empty(hx.shape)
    cy = input.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    # cuDNN keeps the gates and the cell of every step, and what dropout let through between layers. Measured on the
    # H200: 20.08 MB where this gives 20.02.
    gates = {0: 1, 1: 1, 2: 4, 3: 3}[mode]
    states = num_layers * (gates + 1) + ((num_layers - 1) if dropout else 0)
    reserve = input.new_empty(cells * states * input.element_size() if train else 0, dtype=torch.uint8)
    return output, hy, cy, reserve, weight[0].detach() if weight_buf is None else weight_buf


def _cudnn_rnn_backward(
    input: Tensor, weight: list[Tensor], weight_stride0: int, weight_buf: Tensor, hx: Tensor, cx: Tensor | None,
    output: Tensor, grad_output: Tensor, grad_hy: Tensor, grad_cy: Tensor, mode: int, hidden_size: int,
    proj_size: int, num_layers: int, batch_first: bool, *_rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of the same; those of the weights are windows on one buffer, as cuDNN lays them out."""
    flat = input.new_empty(sum(w.numel() for w in weight))
    offset, gradients = 0, []
    for w in weight:
        gradients.append(flat[offset : offset + w.numel()].view(w.shape))
        offset += w.numel()
    grad_cx = None if cx is None else cx.new_empty(cx.shape)
    return _time_major(input, input.shape[-1], batch_first), hx.new_empty(hx.shape), grad_cx, gradients


def _time_major(input: Tensor, features: int, batch_first: bool) -> Tensor:
    """CuDNN lays sequences out by time, whatever order the caller sees."""
    if input.ndim == 3 and batch_first:
        return input.new_empty(input.shape[1], input.shape[0], features).transpose(0, 1)
    return input.new_empty(*input.shape[:-1], features)


def _clone(tensor: Tensor, **kwargs: Any) -> Tensor:
    """A copy; but outside of torch's engine cuDNN's formula believes that the graph is kept, and copies its reserve."""
    if tensor.dtype == torch.uint8 and tensor.is_cuda and not torch.is_grad_enabled() and not torch.cuda.is_available():
        return tensor.detach()
    return aten.clone.default(tensor, **kwargs)


def _addmm_out(*_args: Any, out: Tensor, **_kwargs: Any) -> Tensor:
    """Torch 2.11 decomposes ``addmm`` without knowing of ``out_dtype``."""
    return out


def _convolution(out: Any, input: Tensor, weight: Tensor, *_args: Any, **_kwargs: Any) -> Any:
    """CuDNN works channels-last where the input or the weight is; without it, the fake kernel never does."""
    return _restrided(out, input, weight)


def _convolution_backward(out: Any, grad: Tensor, input: Tensor, weight: Tensor, *_args: Any, **_kwargs: Any) -> Any:
    return tuple(None if t is None else _restrided(t, input, weight) for t in out)


def _restrided(out: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    if out.ndim != 4 or not out.is_cuda or torch.cuda.is_available():
        return out
    nhwc = torch.channels_last
    if not any(t.is_contiguous(memory_format=nhwc) and not t.is_contiguous() for t in (input, weight)):
        return out
    return torch.empty_like(out, memory_format=nhwc)


def _fft_r2c(input: Tensor, dims: list[int], _normalization: int, onesided: bool) -> Tensor:
    """A transform of cuFFT's. Torch 2.11 fails for dimensions that do not ascend, or orders the result wrongly."""
    shape, order = list(input.shape), cufft_order(input.stride(), dims, onesided=onesided)
    if onesided:
        shape[dims[-1]] = shape[dims[-1]] // 2 + 1
    dtype = torch.promote_types(input.dtype, torch.complex32)
    result = input.new_empty([shape[dim] for dim in order], dtype=dtype)
    return result.permute(*(order.index(dim) for dim in range(input.ndim)))


def cufft_order(stride: Sequence[int], dims: Sequence[int], *, onesided: bool) -> list[int]:
    """The dimensions of a result, the outermost first: each call of cuFFT makes its own the innermost ones.

    One call takes at most three dimensions. Torch splits also those that begin with the first two, and then mirrors a
    result that is not ``onesided`` into a contiguous one.
    """
    waiting = list(dims)
    is_split = len(dims) > 3 or waiting[:2] == [0, 1]
    if is_split and not onesided:
        return [*range(len(stride))]
    order = sorted(range(len(stride)), key=lambda dim: -stride[dim])
    calls = [waiting[-1:]] if is_split else [waiting]
    for call in calls:
        order = [dim for dim in order if dim not in call] + call
        waiting = [dim for dim in waiting if dim not in call]
        if waiting:
            calls.append(sorted(waiting, key=order.index)[-3:])
    return order


# Fake kernels that choose otherwise than the GPU's.
GPU_FIXES: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}

# Ops that torch's fake kernels do not know, or know wrongly: called instead of them.
GPU_SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    aten.clone.default: _clone,
    aten.addmm.dtype_out: _addmm_out,
    aten._cudnn_rnn.default: _cudnn_rnn,
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
}

if torch.__version__ < "2.13":  # whose own is right
    GPU_SUBSTITUTES[aten._fft_r2c.default] = _fft_r2c

# Composite functions that look at data pointers or at cuDNN, and would fail on fake tensors.
_RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _recurrent(2),
    torch.gru: _recurrent(3),
    torch.rnn_tanh: _recurrent(1),
    torch.rnn_relu: _recurrent(0),
}
