"""Batch norm + activation as one function that keeps one buffer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lowtide.errors import LowtideError
from lowtide.kernels import batchnorm as kernels
from lowtide.kernels.activations import Activation
from lowtide.kernels.reference.batchnorm import Affine, Keeps, Running, Sums
from lowtide.nn import hidden_writes
from lowtide.nn.guard import inverse_is_safe
from lowtide.nn.rebuild import scope
from lowtide.tracing.internals import in_backward

Strategy = Literal["auto", "standard", "checkpoint", "checkpoint_xhat", "inplace", "inplace2"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
_KEEPS: dict[str, Keeps] = {
    "standard": "x",
    "checkpoint": "x",
    "checkpoint_xhat": "xhat",
    "inplace": "z",
    "inplace2": "z",
}


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    *,
    activation: str | Activation = "relu",
    strategy: Strategy = "auto",
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    rebuild: bool = True,
    group: Any = None,
    statistics: Statistics | None = None,
    where: object = "",
) -> Tensor:
    """φ(batch_norm(x) + residual), keeping for backward what ``strategy`` says.

    | strategy        | keeps   | computes again in backward             |
    |-----------------|---------|----------------------------------------|
    | standard        | x and z |                                        |
    | checkpoint      | x       | batch norm and φ                       |
    | checkpoint_xhat | x̂       | the affine map and φ                   |
    | inplace         | z       | φ⁻¹ and the inverse affine map         |
    | inplace2        | z       | φ⁻¹                                    |
    | auto            | the cheapest exact one for this activation, dtype and device |

    Where z itself is not kept, whoever saves it gets a recipe to save instead, inside the forward of a module or under
    ``lowtide.nn.keep_one_buffer()``. An in-place strategy falls back to "checkpoint" where some channel's |β/γ| is so
    large that z does not tell x. Running statistics are updated in place, once, and batches counted; a checkpoint's
    second run in backward leaves them alone. With a process
    ``group``, statistics are those of all its members' batches. Who needs ``statistics`` before gives them: then no
    running statistics. ``rebuild=False`` lets readers keep z beside what this layer keeps. ``where``: for errors.
    """
    act = Activation.of(activation)
    chosen = resolve(strategy, act, x, joined=residual is not None, where=where)
    learned = () if act.module is None else tuple(act.module.parameters())
    others = (weight, bias, residual, *learned)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or any(t is not None and t.requires_grad for t in others))
    rebuild = rebuild and needs_grad and chosen != "standard"
    spec = _Spec(act, chosen, training, eps, rebuild, group, statistics, where)
    running = Running(running_mean, running_var, momentum, num_batches_tracked if training else None)
    if training and in_backward():
        running = _copied(running)
    if _runs_plain(x, residual, spec, needs_grad):
        _count(running)
        return _plain(x, weight, bias, running, residual, spec)
    if _KEEPS[spec.strategy] == "z" and not inverse_is_safe(x, weight, bias, act):
        spec = spec._replace(strategy="checkpoint")
    return _apply(x, weight, bias, residual, running, spec, *learned)


def resolve(
    strategy: str, act: Activation, x: Tensor | None = None, *, joined: bool = False, where: object = ""
) -> str:
    """The strategy that "auto" stands for, for this input; one that cannot be is an error."""
    if strategy not in STRATEGIES:
        raise LowtideError(f"Unknown strategy {strategy!r}", where=str(where), hint=f"Known: {', '.join(STRATEGIES)}.")
    if strategy == "auto":
        # In 16 bits z is too coarse to give γ's gradient back. On a CPU, having y back costs more than computing it.
        fast = x is not None and x.is_cuda and x.dtype is torch.float32
        return "inplace" if fast and act.name == "leaky_relu" and act.invertible and not joined else "checkpoint"
    hint = "Use strategy='checkpoint': it keeps one buffer too."
    if joined and strategy not in ("standard", "checkpoint"):
        raise LowtideError(f"A join with a residual cannot use strategy={strategy!r}", where=str(where), hint=hint)
    if strategy.startswith("inplace") and not act.invertible:
        message = f"{act} has no inverse, so strategy={strategy!r} cannot have y back"
        raise LowtideError(message, where=str(where), hint=hint)
    return strategy


class Statistics(NamedTuple):
    """The mean and the biased variance of each channel; over a process group, also how backward sums over it.

    ``of_input``: False for statistics of more than this call's input.
    """

    mean: Tensor
    var: Tensor
    sums: Sums | None = None
    of_input: bool = True


def batch_statistics(x: Tensor, running: Running, group: Any = None) -> Statistics:
    """Those of this batch, or of the batches of a process group. The running statistics follow."""
    if group is not None:
        from lowtide.nn.synchronised import group_statistics

        _count(running)
        return Statistics(*group_statistics(x, running, group))
    _check_values(x, running)
    if torch.compiler.is_compiling():
        _count(running)
        return _compiled_statistics(x, running)
    return Statistics(*kernels.statistics(x, running))


def _copied(running: Running) -> Running:
    """Statistics for a recomputation to move. Not None: a checkpoint compares what both runs save."""
    mean, var = (None if t is None else t.clone() for t in (running.mean, running.var))
    return Running(mean, var, running.momentum)


def _compiled_statistics(x: Tensor, running: Running) -> Statistics:
    """The same by plain ops, for a compiler."""
    wide, count = torch.promote_types(x.dtype, torch.float32), x.numel() // x.shape[1]
    # As Inductor decomposes a batch norm: it then merges the two.
    var, mean = torch.var_mean(x.detach().to(wide), [0, *range(2, x.dim())], correction=0, keepdim=True)
    mean, var = mean.flatten(), var.flatten()
    for held, now in ((running.mean, mean), (running.var, var * (count / (count - 1)))):
        if held is not None:
            held.copy_(running.momentum * now + (1 - running.momentum) * held)
    return Statistics(mean, var)


def _count(running: Running) -> None:
    """One batch more, where the kernels do not count."""
    if running.batches is not None:
        running.batches.add_(1)


def _check_values(x: Tensor, running: Running) -> None:
    if x.numel() == x.shape[1]:
        _count(running)  # as torch does
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")


class _Spec(NamedTuple):
    """All of a call that is not a tensor."""

    activation: Activation
    strategy: str
    training: bool
    eps: float
    rebuild: bool
    group: Any
    statistics: Statistics | None
    where: object


def _runs_plain(x: Tensor, residual: Tensor | None, spec: _Spec, needs_grad: bool) -> bool:
    """Where there is nothing to gain, or nothing of ours can run: torch's own ops do."""
    if spec.group is not None and spec.training:
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling() or torch._C._get_tracing_state():
        return True
    if residual is not None and torch.promote_types(x.dtype, residual.dtype) is not x.dtype:
        return True  # z is wider than x
    if spec.statistics is not None:
        return False  # torch's would be computed again
    return spec.strategy == "standard" or not x.numel() or not needs_grad


def _plain(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running,
    residual: Tensor | None,
    spec: _Spec,
    learned: Sequence[Tensor] = (),
) -> Tensor:
    """Torch's own ops; with ``learned``, those stand for the activation's parameters."""
    y = _batch_norm(x, weight, bias, running, spec)
    y = y if residual is None else y + residual
    if _marks_for_recompute(residual, spec):
        # A region without an op would mark nothing. A slope of 1 is an identity that Inductor does not remove.
        identity = spec.activation.name == "identity"
        return checkpoint(_identity if identity else spec.activation, y, use_reentrant=False)
    if not learned:
        return spec.activation.write(y) if spec.activation.may_overwrite else spec.activation(y)
    assert spec.activation.module is not None
    names = (name for name, _ in spec.activation.module.named_parameters())
    return functional_call(spec.activation.module, dict(zip(names, learned, strict=True)), (y,))


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running, spec: _Spec) -> Tensor:
    """Torch's own. It takes no momentum whose value the compiler does not know: plain ops apply that one."""
    if isinstance(running.momentum, Tensor):
        y = F.batch_norm(x, None, None, weight, bias, True, 0.0, spec.eps)
        if x.numel():
            _compiled_statistics(x, running)
        return y
    return F.batch_norm(x, running.mean, running.var, weight, bias, spec.training, running.momentum, spec.eps)


def _identity(y: Tensor) -> Tensor:
    return F.leaky_relu(y, 1.0)


def _marks_for_recompute(residual: Tensor | None, spec: _Spec) -> bool:
    """Whether a compiler's partitioner is to recompute z in backward. Joins are kept: it recomputes none from another.

    Backward keeps x for the batch norm, and y is pointwise in x. So it suffices to mark the activation.
    """
    if not (torch.compiler.is_compiling() and spec.rebuild) or residual is not None:
        return False
    exporting = torch.compiler._is_exporting_flag  # is_exporting() is true in all that torch 2.11 compiles
    return not exporting and spec.activation.name != "module"


_NOTHING = nullcontext()
_HAS_PROCESSES = dist.is_available()


class _BatchNormAct(torch.autograd.Function):
    """One node for batch norm, residual and activation."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Any, bias: Any, residual: Any, running: Running, spec: _Spec, *learned: Tensor
    ) -> Tensor:
        ctx.spec, ctx.keeps, ctx.sums = spec, _KEEPS[spec.strategy], None
        ctx.random = _Random(x) if spec.activation.name == "module" else _NOTHING
        z, affine, kept = _forward(ctx, x, weight, bias, residual, running, learned)
        if ctx.keeps == "x":
            scope.keep(x)
        # The z of a join that is not rebuilt is kept by its readers; if its sign gives φ', the residual need not be.
        keeps_z = residual is not None and not spec.rebuild and spec.activation.slope_from_sign
        joined, residual = (z, None) if keeps_z else (None, residual)
        ctx.save_for_backward(kept, residual, joined, *learned)
        ctx.affine = affine  # values per channel: hooks that move what is saved would cost more than they save
        ctx.versions = _versions(affine)
        record = None
        if ctx.keeps != "z" and spec.rebuild and scope.owner is not None:
            copies = _copies_for_rebuild(weight, bias, learned)
            record = scope.register(z, lambda: _rebuild(ctx, copies), _owner(spec, weight))
        ctx.record = None if record is None else weakref.ref(record)  # the record holds the node
        ctx.z = hidden_writes.Kept(z, hidden_writes.calls_of(_owner(spec, weight))) if ctx.keeps == "z" else None
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
        kept, residual, joined, *learned = _saved(ctx)
        affine: Affine = ctx.affine
        with ctx.random:
            dx, dweight, dbias, dlearned, dy = kernels.backward(
                dz,
                kept,
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


# Without the step that is for ``torch.func`` alone, where torch's own ops run.
_apply: Any = super(torch.autograd.Function, _BatchNormAct).apply  # pyright: ignore[reportAttributeAccessIssue]


def _forward(
    ctx: Any, x: Tensor, weight: Any, bias: Any, residual: Any, running: Running, learned: Sequence[Tensor]
) -> tuple[Tensor, Affine, Tensor]:
    """The output z, what made y of x, and what is kept."""
    spec: _Spec = ctx.spec
    if spec.training and spec.statistics is None and spec.group is None:
        _check_values(x, running)
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
    spec: _Spec = ctx.spec
    if spec.training:
        mean, var, ctx.sums, _ = spec.statistics or batch_statistics(x, running, spec.group)
    else:
        assert running.mean is not None
        assert running.var is not None
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, var = running.mean.to(wide), running.var.to(wide)
        mean = mean.clone() if mean is running.mean else mean  # a later training step must not change it under us
    return Affine(mean, kernels.inverse_deviation(var, spec.eps), weight, bias)


def _owner(spec: _Spec, weight: Tensor | None) -> object:
    """Whose first calls are checked for hidden writes: the layer, or in a function's call its parameter."""
    if isinstance(spec.where, nn.Module):
        return spec.where
    return hidden_writes.NOBODY if weight is None or not weight.is_leaf else weight


def _versions(affine: Affine) -> tuple[int, int]:
    """Of γ and β: whether somebody wrote to them since."""
    weight, bias = affine.weight, affine.bias
    return 0 if weight is None else weight._version, 0 if bias is None else bias._version


def _saved(ctx: Any) -> tuple[Any, ...]:
    """What was kept, and still is as it was."""
    if _versions(ctx.affine) != ctx.versions:
        raise LowtideError(
            "γ or β was changed in place between forward and backward, which needs it",
            where=str(ctx.spec.where),
            hint="Call optimizer.step() after backward().",
        )
    try:
        saved = ctx.saved_tensors
        if ctx.z is not None and ctx.z.is_written(saved[0]):
            raise RuntimeError("an inplace operation through .data")
        return saved
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        what = "output" if ctx.keeps == "z" else "input"
        raise LowtideError(
            f"The {what} of a layer with strategy={ctx.spec.strategy!r} was changed in place, and backward needs it",
            where=str(ctx.spec.where),
            hint="Make the later op an out-of-place one"
            + (", or use strategy='checkpoint'." if what == "output" else "."),
        ) from error


def _copies_for_rebuild(weight: Tensor | None, bias: Tensor | None, learned: Sequence[Tensor]) -> list[Any] | None:
    """Among processes, copies of the parameters: FSDP frees those of a block from its forward to its backward.

    The next block's backward comes before that, and reads z.
    """
    if not _HAS_PROCESSES or dist.GroupMember.WORLD is None:
        return None
    return [None if t is None else t.clone() for t in (weight, bias, *learned)]


def _rebuild(ctx: Any, copies: list[Any] | None) -> Tensor:
    """The output again, from what the node keeps."""
    kept, residual, _, *learned = _saved(ctx)
    affine: Affine = ctx.affine
    if copies is not None:
        weight, bias, *learned = copies
        affine = affine._replace(weight=weight, bias=bias)
    # In most backward passes gradients are off already, and entering no_grad takes as long as a launch.
    with torch.no_grad() if torch.is_grad_enabled() else _NOTHING, ctx.random:
        return kernels.normalize(kept, ctx.keeps, affine, ctx.spec.activation, learned, residual)


def _differentiable_backward(ctx: Any, dz: Tensor) -> Any:
    """Gradients that have gradients: the plain step again, by torch's own ops. That needs x."""
    spec: _Spec = ctx.spec
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
    # Of each a view of its own, where its gradient ends: x may depend on the residual, and on the same parameters.
    views: list[Any] = [None if t is None else t.view_as(t) for t in (x, weight, bias, residual, *learned)]
    x, weight, bias, residual, *learned = views
    with ctx.random:
        z = _plain(x, weight, bias, running, residual, spec, learned)
    inputs = (x, weight, bias, residual, None, None, *learned)
    wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad, strict=True) if t is not None and needed]
    found = iter(torch.autograd.grad(z, wanted, dz, create_graph=True, allow_unused=True))
    return tuple(
        next(found) if t is not None and needed else None
        for t, needed in zip(inputs, ctx.needs_input_grad, strict=True)
    )


class _Random:
    """A module of an unknown kind may draw random numbers: inside ``with``, it draws the same ones again."""

    def __init__(self, x: Tensor) -> None:
        self._devices = [x.device] if x.device.type == "cuda" else []
        self._states: tuple[Tensor, list[Tensor]] | None = None
        self._entered: list[Any] = []
        if not isinstance(x, FakeTensor):
            self._states = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self._devices]

    def __enter__(self) -> None:
        fork = torch.random.fork_rng(devices=self._devices, enabled=self._states is not None)
        fork.__enter__()
        self._entered.append(fork)
        if self._states is not None:
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1], strict=True):
                torch.cuda.set_rng_state(state, device)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
