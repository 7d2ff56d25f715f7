"""A linear layer and cross entropy as one function, in which the logits are never whole.

Forward computes each chunk's logits and losses, and writes the gradient over the logits (Hsu et al., Liger-Kernel,
2024). It saves the gradients of input and weight, which backward scales. Nothing as large as the logits is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.compat.autograd import keeps_graph
from lowtide.compat.dynamo import disable_dynamo
from lowtide.compat.modules import own_parameters
from lowtide.compat.transforms import is_transformed
from lowtide.errors import LowtideError
from lowtide.kernels import chunked_loss as kernels
from lowtide.kernels.chunked_loss import Rules, wide
from lowtide.nn.second_order import refuse_create_graph

LossReduction = Literal["mean", "sum", "none"]
OP = "linear_cross_entropy"  # of lowtide, in graphs

_CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}
_FEWEST_ROWS = 128
# Gradients of logits are at most 1 and mostly near 1/classes, which is too small for float16.
_FLOAT16_SCALE = 256.0
_FLOAT16_LARGEST = 2.0**15  # of gradients of logits and input, with room for rounding


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: LossReduction = "mean",
    chunk: int | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(input, weight, bias), target)`` without the logits ever whole; to roundoff.

    ``input`` is (..., features), ``weight`` (classes, features), ``target`` (...) of class indices. The loss has plain
    PyTorch's dtype, under autocast too. ``chunk`` is the number of rows at a time; None chooses it. With a mean or a
    sum, forward computes and saves the gradients; with ``reduction="none"``, backward recomputes the logits.
    It cannot be differentiated twice.

    >>> x, w, t = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([3, 8, -100, 0, 1, 5])
    >>> torch.allclose(linear_cross_entropy(x, w, t, chunk=2), F.cross_entropy(x @ w.t(), t))
    True
    """
    options = LossOptions(ignore_index, label_smoothing, reduction, chunk).checked()
    if target.is_floating_point():
        raise LowtideError(
            "The targets are probabilities, as large as the logits that are to be avoided",
            hint="Pass class indices, or use F.cross_entropy(F.linear(input, weight, bias), target).",
        )
    if target.shape != input.shape[:-1]:
        raise LowtideError(
            f"The input's rows are {list(input.shape[:-1])} and the targets {list(target.shape)}",
            hint="Pass one class index for each row of features.",
        )
    precision = LossDtypes.now(input, weight, bias)
    if precision is None or not is_supported(input, weight, bias, target, class_weight):
        logits = F.linear(input, weight, bias).reshape(-1, weight.shape[0])
        loss = F.cross_entropy(
            logits,
            target.flatten(),
            class_weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        return loss.view(target.shape) if reduction == "none" else loss
    return run(input, weight, bias, target, class_weight, options, precision)


class LinearCrossEntropy(nn.Linear):
    """A linear layer whose forward takes targets too and returns the loss. To ``state_dict`` it is a ``nn.Linear``.

    >>> head = LinearCrossEntropy(4, 1000, bias=False)
    >>> head(torch.randn(2, 3, 4), torch.randint(1000, (2, 3))).shape
    torch.Size([])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: LossReduction = "mean",
        chunk: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        LossOptions(ignore_index, label_smoothing, reduction, chunk).checked()
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.reduction: LossReduction = reduction
        self.chunk = chunk

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """Share the parameters of a linear layer; ``options`` are the constructor's."""
        bias = own_parameters(linear).get("bias") is not None
        layer = cls(linear.in_features, linear.out_features, bias, device="meta", **options)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The loss of these features against these class indices."""
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            chunk=self.chunk,
        )

    def logits(self, input: Tensor) -> Tensor:
        """Return the logits, as a ``nn.Linear`` does."""
        return F.linear(input, self.weight, self.bias)


# -- shared with lazy_logits -------------------------------------------------------------------------------


class LossOptions(NamedTuple):
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: LossReduction = "mean"
    chunk: int | None = None

    def checked(self) -> Self:
        if self.reduction not in get_args(LossReduction):
            raise LowtideError(
                f"Unknown reduction {self.reduction!r}", hint=f"Known: {', '.join(get_args(LossReduction))}."
            )
        if self.chunk is not None and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise LowtideError(
                f"The loss cannot take a chunk of {self.chunk} rows", hint="Leave chunk out, or pass 1 or more."
            )
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise LowtideError(f"label_smoothing={self.label_smoothing} is not between 0 and 1")
        return self


class LossDtypes(NamedTuple):
    """The dtypes of the logits and of the loss, as plain PyTorch has them."""

    logits: torch.dtype
    loss: torch.dtype

    @classmethod
    def now(cls, *tensors: Tensor | None) -> LossDtypes | None:
        """Under the autocast of this moment; None where a linear layer would refuse these tensors."""
        present = [tensor for tensor in tensors if tensor is not None]
        device = present[0].device.type
        dtypes = {tensor.dtype for tensor in present}
        if torch.is_autocast_enabled(device):
            low = torch.get_autocast_dtype(device)
            dtypes = {low if dtype.is_floating_point and dtype != torch.float64 else dtype for dtype in dtypes}
        dtype = dtypes.pop()
        if dtypes or not dtype.is_floating_point:
            return None
        return cls(dtype, wide(dtype) if torch.is_autocast_enabled(device) else dtype)


def is_supported(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    target: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> bool:
    """Tell whether the loss can run in chunks; if not, plain PyTorch runs, or raises its error."""
    tensors = [tensor for tensor in (input, weight, bias, target, class_weight) if tensor is not None]
    fits = weight.dim() == 2 and input.dim() > 0 and input.shape[-1] == weight.shape[1] and weight.shape[0] > 0
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if class_weight is not None:
        fits = fits and class_weight.shape == weight.shape[:1] and not class_weight.requires_grad
    if target is not None:
        fits = fits and target.dtype == torch.int64 and target.shape == input.shape[:-1]
    return fits and len({tensor.device for tensor in tensors}) == 1 and not is_transformed()


@disable_dynamo  # a compiled model runs this part eagerly, with the logits in chunks
def run(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    options: LossOptions,
    precision: LossDtypes,
) -> Tensor:
    """The loss of rows that are supported."""
    rows = input.reshape(-1, input.shape[-1])
    loss = _LinearCrossEntropyFunction.apply(rows, weight, bias, target.reshape(-1), class_weight, options, precision)
    assert loss is not None
    return loss.view(target.shape) if options.reduction == "none" else loss


def chunk_rows(classes: int, itemsize: int, device: str) -> int:
    """Return the default rows of a chunk: a power of 2, so many that matrix products are efficient.

    >>> chunk_rows(50257, 2, "cuda"), chunk_rows(50257, 4, "cpu")
    (2048, 256)
    """
    fit = _CHUNK_BYTES.get(device, _CHUNK_BYTES["cuda"]) // (classes * itemsize)
    return max(_FEWEST_ROWS, 1 << max(fit.bit_length() - 1, 0))


class _LinearCrossEntropyFunction(torch.autograd.Function):
    """Rows (n, features) and targets (n) to the loss. A mean or a sum: gradients in forward; else in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        options: LossOptions,
        precision: LossDtypes,
    ) -> Tensor:
        ctx.options, ctx.precision = options, precision
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        rules = _rules(options, class_weight, precision)
        needs: list[bool] = list(ctx.needs_input_grad[:3])
        ctx.early = any(needs) and options.reduction != "none"
        kind = wide(precision.logits)
        total = _total(target, rules, kind) if options.reduction == "mean" else None
        ctx.counted = None if total is None else (total, target.numel())  # for sums of such means
        later, scale = None, None
        if ctx.early:
            scale = torch.ones((), dtype=kind, device=x.device) if total is None else total.reciprocal()
            if precision.logits == torch.float16:
                # If all targets are ignored, the scale is 1/0 and the gradients are 0.
                mean = torch.where(scale.isfinite(), scale, 0.0)
                scale = _float16_scale(weight, rules)
                later = mean / scale
        losses, gradients = _sweep(x, weight, bias, target, rules, scale, needs, options.chunk, precision.logits)
        if ctx.early:
            ctx.save_for_backward(*gradients, later)
        elif any(needs):
            ctx.save_for_backward(x, weight, bias, target, class_weight)
        if options.reduction == "none":
            return losses.to(precision.loss)
        loss = losses.sum()
        return (loss if total is None else loss / total).to(precision.loss)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        refuse_create_graph(
            "Linear + cross entropy in chunks",
            hint="Use F.cross_entropy(F.linear(input, weight, bias), target) where create_graph=True.",
        )
        gradient = outputs[0].to(wide(ctx.precision.logits))
        if ctx.early:
            *gradients, later = ctx.saved_tensors
            factor = gradient if later is None else gradient * later
            once = not keeps_graph()
        else:
            x, weight, bias, target, class_weight = ctx.saved_tensors
            rules, once, factor = _rules(ctx.options, class_weight, ctx.precision), True, None
            needs, dtype = list(ctx.needs_input_grad[:3]), ctx.precision.logits
            _, gradients = _sweep(x, weight, bias, target, rules, gradient, needs, ctx.options.chunk, dtype)
        scaled = [
            None if gradient is None else _scaled(gradient, factor, dtype, in_place=once)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None


@torch.library.custom_op(f"lowtide::{OP}", mutates_args=())
def linear_cross_entropy_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    cap: float,
    is_mean: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss of rows (n, features) in 32 bits, and its gradients of input, weight and bias.

    Gradients have the dtypes of what they are of; those that nobody needs are empty. With a ``cap`` other than 0,
    logits are cap·tanh(product/cap). It is an op of graphs, for float32 and bfloat16.
    """
    rules, kind = Rules(ignore_index, label_smoothing, cap=cap), wide(x.dtype)
    total = _total(target, rules, kind) if is_mean else None
    scale = torch.ones((), dtype=kind, device=x.device) if total is None else total.reciprocal()
    losses, gradients = _sweep(x, weight, bias, target, rules, scale, list(needs), None, x.dtype)
    loss = losses.sum()
    given = (x, weight, x if bias is None else bias)
    return (
        loss if total is None else loss / total,
        *(x.new_empty(0) if each is None else each.to(like.dtype) for each, like in zip(gradients, given, strict=True)),
    )  # pyright: ignore[reportReturnType]


@linear_cross_entropy_gradients.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given, needs = (x, weight, x if bias is None else bias), settings[-1]
    gradients = (torch.empty_like(each) if need else x.new_empty(0) for each, need in zip(given, needs, strict=True))
    return x.new_empty((), dtype=wide(x.dtype)), *gradients  # pyright: ignore[reportReturnType]


def _sweep(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    rules: Rules,
    scale: Tensor | None,
    needs: list[bool],
    chunk: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses, and with a ``scale`` the gradients of x (in the dtype of the logits), weight and bias (in 32 bits)."""
    count, (classes, features) = len(x), weight.shape
    added = kernels.padding(classes, x.device.type)
    step = min(chunk or chunk_rows(classes, dtype.itemsize, x.device.type), max(count, 1))
    losses = torch.empty(count, dtype=wide(dtype), device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        w, b = kernels.padded(weight, added, dtype), None if bias is None else kernels.padded(bias, added, dtype)
        logits = torch.empty(step, classes + added, dtype=dtype, device=x.device)
        dx, dw, db = None, None, None
        if scale is not None and needs[0]:
            dx = torch.empty(count, features, dtype=dtype, device=x.device)
        for first in range(0, count, step):
            rows = slice(first, first + step)
            piece, z = x[rows].to(dtype), logits[: min(step, count - first)]
            if b is None:
                torch.mm(piece, w.t(), out=z)
            else:
                torch.addmm(b, piece, w.t(), out=z)
            mine = scale if scale is None or scale.dim() == 0 else scale[rows]
            kernels.rows_(z, target[rows], losses[rows], rules, mine, added)
            if scale is None:
                continue
            if dx is not None:
                torch.mm(z, w, out=dx[rows])
            if needs[1]:
                dw = kernels.add_product(dw, z.t(), piece)
            if needs[2]:
                part = z.sum(0, dtype=losses.dtype)
                db = part if db is None else db.add_(part)
    if scale is not None and count == 0:
        dw = torch.zeros_like(weight, dtype=losses.dtype) if needs[1] else None
        db = torch.zeros(classes, dtype=losses.dtype, device=x.device) if needs[2] else None
    return losses, [dx, dw if dw is None else dw[:classes], db if db is None else db[:classes]]


def _float16_scale(weight: Tensor, rules: Rules) -> Tensor:
    """A power of 2 with which gradients fit float16: those of a row's logits add up to 2 class weights at most."""
    most = torch.linalg.vector_norm(weight.detach(), torch.inf, dtype=torch.float32).mul(2).clamp(min=1)
    if rules.weight is not None:
        most = most * rules.weight.max().clamp(min=1)
    return (_FLOAT16_LARGEST / most).log2().floor().exp2().clamp(max=_FLOAT16_SCALE)


def _scaled(gradient: Tensor, factor: Tensor | None, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    """A gradient times a number on its device, multiplied in 32 bits at least; in place where nobody asks again."""
    if factor is None:
        return gradient.to(dtype)
    kind = max(wide(gradient.dtype), dtype, key=lambda dtype: dtype.itemsize)
    if gradient.dtype != kind:
        return gradient.to(kind).mul_(factor).to(dtype)
    return (gradient.mul_(factor) if in_place else gradient * factor).to(dtype)


def _rules(options: LossOptions, class_weight: Tensor | None, precision: LossDtypes) -> Rules:
    if class_weight is None:
        return Rules(options.ignore_index, options.label_smoothing)
    weight = class_weight.to(wide(precision.logits)).contiguous()
    return Rules(options.ignore_index, options.label_smoothing, weight, weight.sum())


def _total(target: Tensor, rules: Rules, dtype: torch.dtype) -> Tensor:
    """Return the divisor of a mean: the rows that count, or their weights."""
    counts = target != rules.ignore_index
    if rules.weight is None:
        return counts.sum(dtype=dtype)
    return rules.weight[target.where(counts, 0)].masked_fill(~counts, 0).sum()
