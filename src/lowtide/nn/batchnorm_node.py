"""Batch norm + activation as one node of autograd's graph that keeps one buffer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.compat.autograd import apply_of
from lowtide.compat.fake import FakeTensor
from lowtide.compat.messages import is_about_writes
from lowtide.compat.tensors import version_of
from lowtide.errors import LowtideError
from lowtide.kernels import batchnorm as kernels
from lowtide.kernels.activations import Activation
from lowtide.kernels.reference.batchnorm import Affine, Running
from lowtide.nn.batchnorm_plain import plain
from lowtide.nn.hidden_writes import OwnedTensor
from lowtide.nn.rebuild import scope
from lowtide.nn.statistics import batch_statistics, check_values
from lowtide.nn.strategies import KEEPS, Spec

_HAS_PROCESSES = dist.is_available()


class _BatchNormActFunction(torch.autograd.Function):
    """One node for batch norm, residual and activation."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Any, bias: Any, residual: Any, running: Running, spec: Spec, *learned: Tensor
    ) -> Tensor:
        ctx.spec, ctx.keeps, ctx.sums = spec, KEEPS[spec.strategy], None
        ctx.replayed = _replayed(x) if spec.activation.name == "module" else nullcontext
        z, affine, saved = _forward(ctx, x, weight, bias, residual, running, learned)
        if ctx.keeps == "x":
            scope.keep(x)
        # The z of a join that is not rebuilt is kept by its readers; if its sign gives φ', the residual need not be.
        keeps_z = residual is not None and not spec.rebuild and spec.activation.slope_from_sign
        joined, residual = (z, None) if keeps_z else (None, residual)
        ctx.save_for_backward(saved, residual, joined, *learned)
        ctx.affine = affine  # values per channel: hooks that move what is saved would cost more than they save
        ctx.versions = _versions(affine)
        record = None
        if ctx.keeps != "z" and spec.rebuild and scope.owner is not None:
            copies = _copies_for_rebuild(weight, bias, learned)
            record = scope.register(z, lambda: _rebuild(ctx, copies), spec.calls)
        ctx.record = None if record is None else weakref.ref(record)  # the record holds the node
        ctx.z = OwnedTensor(z, spec.calls) if ctx.keeps == "z" else None
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dz,) = gradients
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, dz)
        record = ctx.record() if ctx.record is not None else None
        if record is not None:
            record.hold_for_late_readers()
        spec: Spec = ctx.spec
        saved, residual, joined, *learned = _saved(ctx)
        affine: Affine = ctx.affine
        with ctx.replayed():
            dx, dweight, dbias, dlearned, dy = kernels.backward(
                dz,
                saved,
                ctx.keeps,
                affine,
                spec.activation,
                learned,
                residual,
                training=spec.training,
                joined=joined,
                sums=ctx.sums,
            )
        needs = ctx.needs_input_grad
        return (
            dx if needs[0] else None,
            dweight.to(affine.weight.dtype) if needs[1] and affine.weight is not None else None,
            dbias.to(affine.bias.dtype) if needs[2] and affine.bias is not None else None,
            dy if needs[3] else None,
            None,
            None,
            *dlearned,
        )


apply_node = apply_of(_BatchNormActFunction)  # under ``torch.func``, torch's own ops run


def _forward(
    ctx: Any, x: Tensor, weight: Any, bias: Any, residual: Any, running: Running, learned: Sequence[Tensor]
) -> tuple[Tensor, Affine, Tensor]:
    """Return the output z, the affine map from x to y, and the tensor to save."""
    spec: Spec = ctx.spec
    if spec.training and spec.statistics is None and spec.group is None:
        check_values(x, running)
        z, affine, xhat = kernels.forward(
            x, weight, bias, running, spec.activation, learned, residual, eps=spec.eps, keep_xhat=ctx.keeps == "xhat"
        )
    else:
        affine = _affine(ctx, x, weight, bias, running)
        xhat = None
        if ctx.keeps == "xhat":
            xhat = kernels.normalize(x, "x", Affine(affine.mean, affine.invstd), Activation("identity"))
        source, keeps = (x, "x") if xhat is None else (xhat, "xhat")
        z = kernels.normalize(source, keeps, affine, spec.activation, learned, residual)
    if ctx.keeps == "z":
        return z, affine, z
    return z, affine, x if xhat is None else xhat


def _affine(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running) -> Affine:
    spec: Spec = ctx.spec
    if spec.training:
        mean, var, ctx.sums, _ = spec.statistics or batch_statistics(x, running, spec.group)
    else:
        assert running.mean is not None
        assert running.var is not None
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, var = running.mean.to(wide), running.var.to(wide)
        mean = mean.clone() if mean is running.mean else mean  # a later training step must not change it under us
    return Affine(mean, kernels.inverse_deviation(var, spec.eps), weight, bias)


def _versions(affine: Affine) -> tuple[int, int]:
    """Version counters of γ and β, which writes in place raise."""
    weight, bias = affine.weight, affine.bias
    return 0 if weight is None else version_of(weight), 0 if bias is None else version_of(bias)


def _saved(ctx: Any) -> tuple[Any, ...]:
    """Return the saved tensors; raise where one was written to since."""
    if _versions(ctx.affine) != ctx.versions:
        raise LowtideError(
            "γ or β was changed in place between forward and backward, which needs it",
            where=str(ctx.spec.where),
            hint="Call optimizer.step() after backward().",
        )
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        if not is_about_writes(error):
            raise
        raise _written_error(ctx) from error
    if ctx.z is not None and ctx.z.is_written(saved[0]):  # through .data
        raise _written_error(ctx)
    return saved


def _written_error(ctx: Any) -> LowtideError:
    what = "output" if ctx.keeps == "z" else "input"
    return LowtideError(
        f"The {what} of a layer with strategy={ctx.spec.strategy!r} was changed in place, and backward needs it",
        where=str(ctx.spec.where),
        hint="Make the later op an out-of-place one" + (", or use strategy='checkpoint'." if what == "output" else "."),
    )


def _copies_for_rebuild(weight: Tensor | None, bias: Tensor | None, learned: Sequence[Tensor]) -> list[Any] | None:
    """Among processes, copies of the parameters: FSDP frees those of a block from its forward to its backward.

    The next block's backward comes before that, and reads z.
    """
    if not _HAS_PROCESSES or dist.GroupMember.WORLD is None:
        return None
    return [None if t is None else t.clone() for t in (weight, bias, *learned)]


def _rebuild(ctx: Any, copies: list[Any] | None) -> Tensor:
    """Recompute the output from the saved tensors."""
    saved, residual, _, *learned = _saved(ctx)
    affine: Affine = ctx.affine
    if copies is not None:
        weight, bias, *learned = copies
        affine = affine._replace(weight=weight, bias=bias)
    # In most backward passes gradients are off already, and entering no_grad takes as long as a launch.
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext(), ctx.replayed():
        return kernels.normalize(saved, ctx.keeps, affine, ctx.spec.activation, learned, residual)


def _differentiable_backward(ctx: Any, dz: Tensor) -> Any:
    """Return gradients that have gradients, by torch's own ops. That needs x."""
    spec: Spec = ctx.spec
    if ctx.sums is not None:
        raise LowtideError("There are no gradients of gradients over a process group", where=str(spec.where))
    if spec.statistics is not None and not spec.statistics.of_input:
        raise LowtideError("There are no gradients of gradients by given statistics", where=str(spec.where))
    if ctx.keeps != "x":
        raise LowtideError(
            f"strategy={spec.strategy!r} gives no gradients of gradients",
            where=str(spec.where),
            hint="Use strategy='checkpoint'.",
        )
    x, residual, joined, *learned = _saved(ctx)
    mean, invstd, weight, bias = ctx.affine
    if joined is not None:
        raise LowtideError(
            "A join that keeps its output gives no gradients of gradients",
            where=str(spec.where),
            hint="Make it one that is rebuilt: rebuild_joins=True.",
        )
    running = Running() if spec.training else Running(mean, invstd.square().reciprocal() - spec.eps)
    # Gradients end at views: x may depend on the residual, and on the same parameters.
    views: list[Any] = [None if t is None else t.view_as(t) for t in (x, weight, bias, residual, *learned)]
    x, weight, bias, residual, *learned = views
    with ctx.replayed():
        z = plain(x, weight, bias, running, residual, spec, learned)
    inputs = (x, weight, bias, residual, None, None, *learned)
    wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad, strict=True) if t is not None and needed]
    computed = iter(torch.autograd.grad(z, wanted, dz, create_graph=True, allow_unused=True))
    return tuple(
        next(computed) if t is not None and needed else None
        for t, needed in zip(inputs, ctx.needs_input_grad, strict=True)
    )


def _replayed(x: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Return a context that replays the random numbers which a module of an unknown kind is about to draw."""
    if isinstance(x, FakeTensor):
        return nullcontext
    devices = [x.device] if x.device.type == "cuda" else []
    cpu_state, cuda_states = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]

    @contextmanager
    def replayed() -> Generator[None]:
        with torch.random.fork_rng(devices):
            torch.set_rng_state(cpu_state)
            for device, state in zip(devices, cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield

    return replayed
