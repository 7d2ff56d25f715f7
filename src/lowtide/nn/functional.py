"""Batch norm + activation as one function that keeps one buffer."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.errors import LowtideError
from lowtide.kernels import batchnorm as kernels
from lowtide.kernels.activations import Activation
from lowtide.kernels.reference.batchnorm import Affine, Keeps, Running
from lowtide.nn.rebuild import scope

Strategy = Literal["auto", "standard", "checkpoint", "checkpoint_xhat", "inplace", "inplace2"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
_KEEPS: dict[str, Keeps] = {"checkpoint": "x", "checkpoint_xhat": "xhat", "inplace": "z", "inplace2": "z"}

# The largest |β/γ| at which z still gives x̂ back: its error there is the unit roundoff of z times this.
_LARGEST_RATIO = {torch.float64: 1e6, torch.float32: 1e3, torch.float16: 16.0, torch.bfloat16: 4.0}


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    activation: str | Activation = "relu",
    strategy: Strategy = "auto",
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    rebuild: bool = True,
    group: Any = None,
    where: str = "",
) -> Tensor:
    """φ(batch_norm(x) + residual), keeping for backward what ``strategy`` says.

    | strategy        | keeps   | computes again in backward             |
    |-----------------|---------|----------------------------------------|
    | standard        | x and z |                                        |
    | checkpoint      | x       | batch norm and φ                       |
    | checkpoint_xhat | x̂       | the affine map and φ                   |
    | inplace         | z       | φ⁻¹ and the inverse affine map         |
    | inplace2        | z       | φ⁻¹                                    |
    | auto            | the cheapest exact one for this activation       |

    Where z itself is not kept, whoever saves it gets a recipe to save instead, inside the forward of a module or under
    ``lowtide.nn.keep_one_buffer()``. An in-place strategy falls back to "checkpoint" where some channel's |β/γ| is so
    large that z does not tell x. Running statistics are updated in place, once. With a process ``group``, statistics
    are those of all its members' batches. ``rebuild=False`` lets readers keep z beside what this layer keeps.
    """
    act = Activation.of(activation)
    chosen = resolve(strategy, act, joined=residual is not None, where=where)
    spec = _Spec(act, chosen, training, eps, rebuild, group, where)
    running = Running(running_mean, running_var, momentum)
    if training and group is None and x.numel() and x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    if _runs_plain(x, spec):
        return _plain(x, weight, bias, running, residual, spec)
    if _KEEPS[spec.strategy] == "z" and not _inverse_is_safe(x, weight, bias):
        spec = replace(spec, strategy="checkpoint")
    learned = () if act.module is None else tuple(act.module.parameters())
    return _BatchNormAct.apply(x, weight, bias, residual, running, spec, *learned)  # pyright: ignore[reportReturnType]


def resolve(strategy: str, act: Activation, *, joined: bool = False, where: str = "") -> str:
    """The strategy that "auto" stands for; one that cannot be is an error."""
    if strategy not in STRATEGIES:
        raise LowtideError(f"Unknown strategy {strategy!r}", where=where, hint=f"Known: {', '.join(STRATEGIES)}.")
    if strategy == "auto":
        return "inplace" if act.name == "leaky_relu" and act.invertible and not joined else "checkpoint"
    hint = "Use strategy='checkpoint': it keeps one buffer too."
    if joined and strategy not in ("standard", "checkpoint"):
        raise LowtideError(f"A join with a residual cannot use strategy={strategy!r}", where=where, hint=hint)
    if strategy.startswith("inplace") and not act.invertible:
        raise LowtideError(f"{act} has no inverse, so strategy={strategy!r} cannot have y back", where=where, hint=hint)
    return strategy


@dataclass(frozen=True)
class _Spec:
    """All of a call that is not a tensor."""

    activation: Activation
    strategy: str
    training: bool
    eps: float
    rebuild: bool
    group: Any
    where: str


def _runs_plain(x: Tensor, spec: _Spec) -> bool:
    """Where there is nothing to gain, or nothing of ours can run: torch's own ops do."""
    if spec.group is not None and spec.training:
        return False
    return (
        spec.strategy == "standard"
        or not x.numel()
        or not torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch.compiler.is_compiling()
        or bool(torch._C._get_tracing_state())
    )


def _plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running, residual: Tensor | None, spec: _Spec
) -> Tensor:
    y = F.batch_norm(x, running.mean, running.var, weight, bias, spec.training, running.momentum, spec.eps)
    return spec.activation(y if residual is None else y + residual)


def _inverse_is_safe(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether every channel's x̂ can be had back from z. The parameters alone decide."""
    if weight is None or isinstance(x, FakeTensor):
        return True
    largest = _LARGEST_RATIO[x.dtype]
    shift = torch.zeros_like(weight) if bias is None else bias.detach().abs()
    return bool((weight.detach().abs() * largest > shift).all())


class _BatchNormAct(torch.autograd.Function):
    """One node for batch norm, residual and activation."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Any, bias: Any, residual: Any, running: Running, spec: _Spec, *learned: Tensor
    ) -> Tensor:
        ctx.spec, ctx.keeps, ctx.sums = spec, _KEEPS[spec.strategy], None
        affine = _affine(ctx, x, weight, bias, running)
        ctx.random = _Random(spec.activation, x)
        kept = x
        if ctx.keeps == "xhat":
            kept = kernels.normalize(x, "x", Affine(affine.mean, affine.invstd), Activation("identity"))
        made_from: Keeps = "xhat" if ctx.keeps == "xhat" else "x"
        z = kernels.normalize(kept, made_from, affine, spec.activation, learned, residual)
        if ctx.keeps == "z":
            kept = z
        ctx.save_for_backward(kept, affine.mean, affine.invstd, weight, bias, residual, *learned)
        record = None if ctx.keeps == "z" or not spec.rebuild else scope.register(z, lambda: _rebuild(ctx))
        ctx.record = None if record is None else weakref.ref(record)  # the record holds the node
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dz,) = gradients
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, dz)
        record = ctx.record() if ctx.record is not None else None
        if record is not None:
            record.hold_for_late_readers()
        spec: _Spec = ctx.spec
        kept, mean, invstd, weight, bias, residual, *learned = _saved(ctx)
        with ctx.random.again():
            dx, dweight, dbias, dlearned, dy = kernels.backward(
                dz,
                kept,
                ctx.keeps,
                Affine(mean, invstd, weight, bias),
                spec.activation,
                learned,
                residual,
                training=spec.training,
                sums=ctx.sums,
            )
        needs = ctx.needs_input_grad
        return (
            dx if needs[0] else None,
            dweight.to(weight.dtype) if needs[1] else None,
            dbias.to(bias.dtype) if needs[2] else None,
            dy if needs[3] else None,
            None,
            None,
            *dlearned,
        )


def _affine(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running) -> Affine:
    spec: _Spec = ctx.spec
    if not spec.training:
        assert running.mean is not None
        assert running.var is not None
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, var = running.mean.to(wide), running.var.to(wide)
        mean = mean.clone() if mean is running.mean else mean  # a later training step must not change it under us
    elif spec.group is not None:
        from lowtide.nn.synchronised import group_statistics

        mean, var, ctx.sums = group_statistics(x, running, spec.group)
    else:
        mean, var = kernels.statistics(x, running)
    return Affine(mean, 1 / torch.sqrt(var + spec.eps), weight, bias)


def _saved(ctx: Any) -> tuple[Any, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        what = "output" if ctx.keeps == "z" else "input"
        raise LowtideError(
            f"The {what} of a layer with strategy={ctx.spec.strategy!r} was changed in place, and backward needs it",
            where=ctx.spec.where,
            hint="Make the later op an out-of-place one"
            + (", or use strategy='checkpoint'." if what == "output" else "."),
        ) from error


def _rebuild(ctx: Any) -> Tensor:
    """Z from what the node keeps."""
    kept, mean, invstd, weight, bias, residual, *learned = _saved(ctx)
    with torch.no_grad(), ctx.random.again():
        affine = Affine(mean, invstd, weight, bias)
        return kernels.normalize(kept, ctx.keeps, affine, ctx.spec.activation, learned, residual)


def _differentiable_backward(ctx: Any, dz: Tensor) -> Any:
    """Gradients that have gradients: the plain step again, by torch's own ops. That needs x."""
    spec: _Spec = ctx.spec
    if ctx.keeps != "x" or ctx.sums is not None:
        raise LowtideError(
            f"strategy={spec.strategy!r} gives no gradients of gradients"
            + (" over a process group" if ctx.sums else ""),
            where=spec.where,
            hint="Use strategy='standard'." if ctx.sums else "Use strategy='checkpoint'.",
        )
    x, mean, invstd, weight, bias, residual, *learned = ctx.saved_tensors
    running = Running() if spec.training else Running(mean, invstd.square().reciprocal() - spec.eps)
    with ctx.random.again():
        z = _plain(x, weight, bias, running, residual, spec)
    inputs = (x, weight, bias, residual, None, None, *learned)
    wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad, strict=True) if t is not None and needed]
    found = iter(torch.autograd.grad(z, wanted, dz, create_graph=True, allow_unused=True))
    return tuple(
        next(found) if t is not None and needed else None
        for t, needed in zip(inputs, ctx.needs_input_grad, strict=True)
    )


class _Random:
    """A module of an unknown kind may draw random numbers: it draws the same ones again."""

    def __init__(self, activation: Activation, x: Tensor) -> None:
        self._devices = [x.device] if x.device.type == "cuda" else []
        self._states: tuple[Tensor, list[Tensor]] | None = None
        if activation.name == "module" and not isinstance(x, FakeTensor):
            self._states = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self._devices]

    @contextmanager
    def again(self) -> Generator[None]:
        """The generators as they were at first, for a while."""
        if self._states is None:
            yield
            return
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
