"""Logits computed on demand: cross entropy takes them in chunks, and any other use computes them whole.

Views, slices of tokens and ``.float()`` on the way to cross entropy act on the head's input instead: it has the same
rows. Any other use computes the logits once, as the head would have, with their live views and copies.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.compat import pytree
from lowtide.compat.dispatch import without_subclass_function
from lowtide.compat.fake import FakeTensor
from lowtide.compat.tensors import make_wrapper, version_of
from lowtide.errors import LowtideError
from lowtide.nn.chunked_loss import LossDtypes, LossOptions, is_supported, run, wide
from lowtide.nn.second_order import refuse_create_graph


def lazy_logits(
    input: Tensor,
    head: nn.Linear,
    *,
    chunk: int | None = None,
    path: str = "",
    on_whole: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return ``head(input)``, computed on demand; at once where chunks cannot help.

    ``chunk`` is the number of rows at a time in cross entropy. Errors name the head by ``path``. ``on_whole`` is called
    where something else than cross entropy has all logits computed.
    """
    weight, bias = head.weight, head.bias
    precision = LossDtypes.now(input, weight, bias) if type(input) in (Tensor, nn.Parameter, FakeTensor) else None
    # Without gradients nothing is saved, and a compiled graph cannot hold logits on demand.
    is_lazy = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if precision is None or not is_lazy or not is_supported(input, weight, bias):
        return F.linear(input, weight, bias)
    return _Lazy(_Source(input, weight, bias, precision, chunk, path, on_whole), input, precision.logits).tensor()


@dataclass(eq=False)
class _Source:
    """One call of the head: its inputs, and its logits once they are computed."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    precision: LossDtypes
    chunk: int | None
    path: str
    on_whole: Callable[[], None]
    whole: Tensor | None = None
    versions: list[int] = field(default_factory=list[int])
    is_old: bool = False  # an optimizer has changed the weight since

    def __post_init__(self) -> None:
        device = self.input.device.type
        self.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self.versions = self._versions()
        self.lazy: weakref.WeakSet[_Lazy] = weakref.WeakSet()
        # Fused optimizers write parameters without counting versions.
        handle = register_optimizer_step_post_hook(partial(_stepped, weakref.ref(self)))
        weakref.finalize(self, handle.remove)

    def make(self) -> Tensor:
        """Compute the logits, with their graph, as the head would have."""
        if self.whole is None:
            self.check()
            self.on_whole()
            # To a checkpoint around, the logits existed before it began: it does not recompute them.
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                self.whole = self.linear(self.input, self.weight, self.bias)
            # From now on they can be written to: copies are made before that, and views become views of them.
            for lazy in list(self.lazy):
                lazy.make()
        return self.whole

    def check(self) -> None:
        """Refuse to compute logits from a weight or an input that changed since the head was called."""
        if self.is_old or self._versions() != self.versions:
            raise LowtideError(
                "Logits are computed on demand, and since the head was called their weight or input has changed",
                where=self.path,
                hint="Use them before optimizer.step(), or undo the chunked loss.",
            )

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the head, under the autocast that it was called under."""
        enabled, dtype = self.autocast
        with torch.enable_grad(), torch.autocast(input.device.type, dtype=dtype, enabled=enabled):
            return F.linear(input, weight, bias)

    def _versions(self) -> list[int]:
        return [version_of(t) for t in (self.input, self.weight, self.bias) if t is not None]


def _stepped(source: weakref.ref[_Source], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Note that an optimizer changed the weight or the bias of a head whose logits live."""
    head = source()
    if head is not None and not head.is_old:
        changed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        head.is_old = id(head.weight) in changed or id(head.bias) in changed


@dataclass(eq=False)
class _Lazy:
    """Logits after some changes: their rows of features, and the same changes to apply to whole logits."""

    source: _Source
    rows: Tensor  # (..., features)
    dtype: torch.dtype
    changes: tuple[Callable[[Tensor], Tensor], ...] = ()
    class_last: bool = True  # or second, as cross entropy wants it of more than two dimensions
    has_grad: bool = True  # no change was done under no_grad
    before: _Lazy | None = None  # what the last change is done to, until these are computed
    computed: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.source.lazy.add(self)

    @property
    def shape(self) -> tuple[int, ...]:
        lead, classes = tuple(self.rows.shape[:-1]), self.source.weight.shape[0]
        return (*lead, classes) if self.class_last else (lead[0], classes, *lead[1:])

    def tensor(self) -> Tensor:
        with torch.set_grad_enabled(self.has_grad):
            logits = _LazyNode.apply(self.source.input, self.source.weight, self.source.bias, self)
        assert logits is not None
        return logits

    def make(self) -> Tensor:
        """Compute these logits: a view of those before the last change where that makes views."""
        whole = self.source.make()  # which makes these too, if they are the first to be asked for
        if self.computed is None:
            with torch.set_grad_enabled(self.has_grad):
                self.computed = whole if self.before is None else self.changes[-1](self.before.make())
            self.before = None
        return self.computed

    def changed(self, whole: Tensor) -> Tensor:
        """Apply these changes to whole logits."""
        with torch.enable_grad():
            for change in self.changes:
                whole = change(whole)
        return whole

    def then(self, change: Callable[[Tensor], Tensor], rows: Tensor | None = None, **fields: Any) -> Tensor:
        """Return the logits after one change more, whose rows are these."""
        fields.update(rows=self.rows if rows is None else rows, has_grad=self.has_grad and torch.is_grad_enabled())
        return replace(self, changes=(*self.changes, change), before=self, **fields).tensor()


class LazyLogits(Tensor):
    """Logits with a shape, a dtype and a graph, and no bytes."""

    lazy: _Lazy

    def whole(self) -> Tensor:
        """The logits themselves."""
        return self.lazy.make()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with without_subclass_function():
                return func(*args, **kwargs)
        symbolic = _SYMBOLIC.get(func)
        first = args[0] if args else kwargs.get("input")
        # Once the logits are computed, code may write into them: from then on they are used.
        if symbolic is not None and isinstance(first, LazyLogits) and first.lazy.source.whole is None:
            result = symbolic(*args, **kwargs)
            if result is not NotImplemented:
                return result
        whole: Any = pytree.tree_map_only(LazyLogits, LazyLogits.whole, (args, kwargs))
        return func(*whole[0], **whole[1])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """For what reaches tensors below Python's functions, such as the results of custom autograd functions."""
        whole: Any = pytree.tree_map_only(LazyLogits, lambda t: t.whole().detach(), (args, kwargs or {}))
        return func(*whole[0], **whole[1])


class _LazyNode(torch.autograd.Function):
    """Gives lazy logits their place in the graph, for the rare reader that asks autograd and not torch's functions."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, lazy: _Lazy) -> Tensor:
        logits: Any = make_wrapper(LazyLogits, lazy.shape, dtype=lazy.dtype, device=input.device)
        logits.lazy = ctx.lazy = lazy
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        lazy: _Lazy = ctx.lazy
        refuse_create_graph(
            "The node of logits computed on demand", hint="Undo the chunked loss where create_graph=True."
        )
        needs: list[bool] = list(ctx.needs_input_grad[:3])
        inputs = (lazy.source.input, lazy.source.weight, lazy.source.bias)
        # Detached: the input may depend on the weight through the graph behind it.
        x, w, b = (None if t is None else t.detach().requires_grad_(n) for t, n in zip(inputs, needs, strict=True))
        assert x is not None
        assert w is not None
        logits = lazy.changed(lazy.source.linear(x, w, b))
        wanted = [t for t in (x, w, b) if t is not None and t.requires_grad]
        computed = iter(torch.autograd.grad(logits, wanted, gradients[0]))
        return *(next(computed) if needed else None for needed in needs), None


# -- changes of rows in place of logits ------------------------------------------------------------------------


def _cross_entropy(
    input: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    lazy, source = input.lazy, input.lazy.source
    old_style = size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none")
    second = not lazy.class_last or len(lazy.shape) <= 2
    if old_style or not second or not 0.0 <= label_smoothing <= 1.0 or isinstance(target, LazyLogits):
        return NotImplemented
    if not is_supported(lazy.rows, source.weight, source.bias, target, weight) or source.whole is not None:
        return NotImplemented
    source.check()
    autocast = torch.is_autocast_enabled(lazy.rows.device.type)
    precision = LossDtypes(source.precision.logits, wide(lazy.dtype) if autocast else lazy.dtype)
    options = LossOptions(ignore_index, label_smoothing, reduction, source.chunk)
    with torch.set_grad_enabled(lazy.has_grad and torch.is_grad_enabled()):
        return run(lazy.rows, source.weight, source.bias, target, weight, options, precision)


def _reshape(input: LazyLogits, *shape: Any, **other: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    lazy, classes = input.lazy, input.lazy.source.weight.shape[0]
    if other or not lazy.class_last or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    rows, known = math.prod(lazy.shape[:-1]), math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known and rows * classes % known == 0:
        sizes = tuple(rows * classes // known if size == -1 else size for size in sizes)
    if sizes[-1] != classes or math.prod(sizes[:-1]) != rows or -1 in sizes:
        return NotImplemented
    return lazy.then(lambda t: t.reshape(sizes), lazy.rows.reshape(*sizes[:-1], lazy.rows.shape[-1]))


def _flatten(input: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    lazy, dims = input.lazy, len(input.lazy.shape)
    first, last = start_dim % dims, end_dim % dims
    if not lazy.class_last or not first <= last < dims - 1:
        return NotImplemented
    return lazy.then(lambda t: t.flatten(first, last), lazy.rows.flatten(first, last))


def _getitem(input: LazyLogits, index: Any) -> Any:
    lazy = input.lazy
    if not lazy.class_last or not _keeps_classes(index, len(lazy.shape)):
        return NotImplemented
    return lazy.then(lambda t: t[index], lazy.rows[index])


def _keeps_classes(index: Any, dims: int) -> bool:
    """Tell whether an index leaves the last dimension as it is."""
    parts = index if isinstance(index, tuple) else (index,)
    if not parts:
        return True
    used = 0
    for part in parts:
        if isinstance(part, Tensor) and not isinstance(part, LazyLogits):
            used += part.dim() if part.dtype in (torch.bool, torch.uint8) else 1
        elif part is not Ellipsis and (isinstance(part, bool) or not isinstance(part, int | slice)):
            return False
        else:
            used += part is not Ellipsis
    whole = isinstance(parts[-1], slice) and parts[-1] == slice(None)
    if any(part is Ellipsis for part in parts) and parts[-1] is not Ellipsis:
        return whole
    return used < dims or (used == dims and whole)


def _to(input: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    lazy = input.lazy
    wanted = [*args, *(value for name, value in kwargs.items() if name in ("dtype", "device"))]
    if len(wanted) != 1 or len(wanted) != len(args) + len(kwargs):
        return NotImplemented
    if isinstance(wanted[0], torch.dtype):
        return _float(input) if wanted[0] == torch.float32 else input if wanted[0] == lazy.dtype else NotImplemented
    device = wanted[0] if isinstance(wanted[0], torch.device) else None
    return input if device == lazy.rows.device else NotImplemented


def _float(input: LazyLogits) -> Any:
    if input.lazy.dtype == torch.float32:
        return input
    if input.lazy.dtype not in (torch.bfloat16, torch.float16):
        return NotImplemented
    return input.lazy.then(Tensor.float, dtype=torch.float32)


def _contiguous(input: LazyLogits, **other: Any) -> Any:
    return NotImplemented if other else input.lazy.then(Tensor.contiguous)


def _transpose(input: LazyLogits, *dims: Any, **other: Any) -> Any:
    """Classes second."""
    lazy = input.lazy
    if other or not lazy.class_last or len(lazy.shape) != 3 or {d % 3 for d in dims} != {1, 2}:
        return NotImplemented
    return lazy.then(lambda t: t.transpose(1, 2), class_last=False)


def _permute(input: LazyLogits, *order: Any, **other: Any) -> Any:
    """Classes second, and all others in their order."""
    lazy, dims = input.lazy, len(input.lazy.shape)
    places = tuple(order[0]) if len(order) == 1 and isinstance(order[0], list | tuple) else order
    wanted = (0, dims - 1, *range(1, dims - 1))
    if other or not lazy.class_last or dims < 3 or tuple(place % dims for place in places) != wanted:
        return NotImplemented
    return lazy.then(lambda t: t.permute(wanted), class_last=False)


_tensor: Any = Tensor
_SYMBOLIC: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((_tensor.view, _tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys((_tensor.flatten, torch.flatten), _flatten),
    _tensor.__getitem__: _getitem,
    _tensor.to: _to,
    _tensor.float: _float,
    _tensor.contiguous: _contiguous,
    **dict.fromkeys((_tensor.transpose, torch.transpose), _transpose),
    **dict.fromkeys((_tensor.permute, torch.permute), _permute),
}
_METADATA: set[Any] = {
    *(
        getattr(_tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda")
    ),
    *(getattr(_tensor, name).__get__ for name in ("is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested")),
    *(_tensor.size, _tensor.dim, _tensor.ndimension, _tensor.numel, _tensor.nelement, _tensor.element_size),
    *(_tensor.is_floating_point, _tensor.is_complex, _tensor.get_device, _tensor.__len__, _tensor.__hash__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
