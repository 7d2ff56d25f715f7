"""Make every batch norm of a model one layer with the activation behind it, in place, and undo it."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from lowtide.compat.dynamo import assume_constant_result
from lowtide.compat.modules import BatchNormBase, own_buffers, own_children, own_parameters, runs_compiled
from lowtide.errors import LowtideError
from lowtide.kernels.activations import Activation
from lowtide.nn.batchnorm import (
    BatchNormAct1d,
    BatchNormAct2d,
    BatchNormAct3d,
    SyncBatchNormAct,
    _BatchNormAct,
    is_symbolic,
    leaf,
)
from lowtide.nn.pooling import can_pool, max_pool
from lowtide.nn.strategies import Strategy, resolve
from lowtide.techniques.batchnorm.consumers import Signature, consumer_of
from lowtide.techniques.batchnorm.find import Left, Pair, below, find, is_chain
from lowtide.techniques.batchnorm.fx_trace import SETTINGS, ForwardCall, Untraceable, describe, trace
from lowtide.techniques.batchnorm.memory import Memory, predict
from lowtide.techniques.replaced_forward import Forward, replace_forward
from lowtide.undo import Undo
from lowtide.workload import Workload

_LAYERS = (BatchNormAct1d, BatchNormAct2d, BatchNormAct3d, SyncBatchNormAct)


def convert(
    model: nn.Module, strategy: Strategy = "auto", *, joins: int = 1, work: Workload | None = None
) -> Conversion:
    """Replace each batch norm and the activation behind it by one layer. Report the skipped ones, with reasons.

    The model is changed in place and keeps its classes, its parameters and its ``state_dict``; optimizers and
    checkpoints stay valid. Convert before ``torch.compile`` and before ``lowtide.apply``. Max poolings then keep their
    input alone and find their maxima again. ``undo()`` restores the modules and keeps what they learned. With ``work``,
    the training step of the model, the result has the step's predicted bytes before and after.

    ``joins`` is about the ends of residual blocks, act(batch_norm(x) + residual). With 0 they stay, with 1 each becomes
    a layer. With k > 1 only the output of every k-th block is kept; one more pass rebuilds each between.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    >>> print(convert(model))
    1 of 2 batch norms are one with what follows
      1  relu (auto)
    left as they were
      4  no activation follows; nothing to save
    """
    resolve(strategy, Activation.of("leaky_relu"))  # which takes them all: only an unknown one is an error
    if joins < 0:
        raise LowtideError(f"joins={joins} is not a number of blocks", hint="0 leaves joins as they are.")
    _refuse_compiled(model)
    before = None if work is None else predict(work, model)
    pairs, left = find(model, joins=joins > 0, residuals=joins > 1)
    joined = 0
    with Undo() as undo:
        changed: list[Change] = []
        rewritten: dict[str, list[Pair]] = {}
        for pair in pairs:
            activation = Activation.of(_activation(model, pair))
            try:
                resolve(strategy, activation, joined=pair.is_join, where=pair.path)
            except LowtideError as error:
                left.append(Left(pair.path, str(error)))
                continue
            joined = (0 if pair.starts else joined) + pair.is_join
            undo.add(_fuse(model, pair, strategy, rebuild_joins=joined % max(joins, 1) != 0))
            changed.append(Change(pair.path, str(activation), strategy, pair.is_join))
            if pair.consumer.kind != "kept" and not is_chain(model.get_submodule(pair.owner)):
                rewritten.setdefault(pair.owner, []).append(pair)
        for owner, its in rewritten.items():
            undo.add(replace_forward(Fused(model.get_submodule(owner), owner, its), path=owner))
        pools = _pools(model) if changed and strategy != "standard" else {}
        for path, pool in pools.items():
            undo.add(replace_forward(Pooled(pool), path=path))
        memory = None if work is None or before is None else Memory.of(before, predict(work, model))
        return Conversion(tuple(changed), tuple(left), tuple(pools), memory, undo.keep())


@dataclass(frozen=True, slots=True)
class Change:
    """A batch norm that is one layer with what follows."""

    path: str
    activation: str
    strategy: str
    join: bool  # whether a residual is added in between

    def __str__(self) -> str:
        return f"{'residual, ' if self.join else ''}{self.activation} ({self.strategy})"


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """Result of ``convert``. Call ``undo()`` to restore the model, or use it as a context manager."""

    changed: tuple[Change, ...]
    left: tuple[Left, ...]
    pools: tuple[str, ...]  # the paths of max poolings
    memory: Memory | None  # None where no step was given
    _undo: Undo

    def undo(self) -> None:
        """Give the original modules and forwards back, with the parameters and statistics of now; once."""
        self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        count = len(self.changed)
        lines = [f"{count} of {count + len(self.left)} batch norms are one with what follows"]
        lines += _table([(change.path, str(change)) for change in self.changed])
        if self.pools:
            lines += ["max poolings keep their input alone", *_table([(path, "") for path in self.pools])]
        if self.left:
            lines += ["left as they were", *_table([(left.path, left.why) for left in self.left])]
        if self.memory is not None:
            lines += ["the step, as predicted", *(f"  {line}" for line in str(self.memory).splitlines())]
        return "\n".join(lines)


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each row; those that differ only in the numbers in their path share one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path, text in rows:
        groups.setdefault((re.sub(r"\d+", "*", path), text), []).append(path)
    names = [f"{name} ({len(paths)})" if len(paths) > 1 else paths[0] for (name, _), paths in groups.items()]
    width = max(map(len, names), default=0)
    return [f"  {name or 'the model':{width}}  {text}".rstrip() for name, (_, text) in zip(names, groups, strict=True)]


def _pools(model: nn.Module) -> dict[str, nn.Module]:
    """The max poolings that run as torch wrote them."""
    return {path: m for path, m in model.named_modules() if can_pool(m) and "forward" not in vars(m)}


# -- the layer in the place of the batch norm ------------------------------------------------------------


def _fuse(model: nn.Module, pair: Pair, strategy: Strategy, *, rebuild_joins: bool) -> Undo:
    """Put the layer in the place of the batch norm; a neighbour in a ``nn.Sequential`` then passes its input on."""
    owner = model.get_submodule(pair.owner)
    activation = _activation(model, pair)
    with Undo() as undo:
        call = pair.consumer.signature.activation
        if is_chain(owner) and call is not None and activation is not None:
            undo.add(_pass_through(model, pair.owner, call.child))
            # The layer runs a twin that shares the parameters: the module itself no longer does anything.
            activation = _twin(activation)
        parent, _, name = pair.path.rpartition(".")
        norm = model.get_submodule(pair.path)
        assert isinstance(norm, BatchNormBase)
        kind = next(layer for layer in _LAYERS if isinstance(norm, layer.plain))
        layer = kind.from_batch_norm(norm, activation, strategy, rebuild_joins=rebuild_joins)
        undo.add(_swap(model.get_submodule(parent), name, layer, path=pair.path))
        if pair.is_join:
            in_place = pair.consumer.signature.in_place
            undo.add(replace_forward(Joined(layer, Activation.of(activation), in_place=in_place), path=pair.path))
        return undo.keep()


def _activation(model: nn.Module, pair: Pair) -> nn.Module | None:
    call = pair.consumer.signature.activation
    return None if call is None else call.module(model.get_submodule(pair.owner))


def _swap(parent: nn.Module, name: str, layer: BatchNormBase, *, path: str) -> Undo:
    norm = own_children(parent)[name]
    assert isinstance(norm, BatchNormBase)
    own_children(parent)[name] = layer

    def restore() -> None:
        if own_children(parent).get(name) is not layer:
            raise LowtideError("The converted layer was replaced", where=path, hint="Undo before replacing it.")
        for key in own_parameters(norm):  # .to() may have made other tensors by then, and a schedule another momentum
            own_parameters(norm)[key] = own_parameters(layer)[key]
        for key in own_buffers(norm):
            own_buffers(norm)[key] = own_buffers(layer)[key]
        norm.training, norm.momentum, norm.eps = layer.training, layer.momentum, layer.eps
        own_children(parent)[name] = norm

    return Undo(restore)


def _pass_through(model: nn.Module, owner: str, name: str) -> Undo:
    """Have one place of a ``nn.Sequential`` do nothing, and leave the same module elsewhere alone."""
    chain = model.get_submodule(owner)
    activation = own_children(chain)[name]
    assert activation is not None
    places = [place for place, module in model.named_modules(remove_duplicate=False) if module is activation]
    with Undo() as undo:
        if len(places) > 1:
            activation, shared = _twin(activation), activation
            own_children(chain)[name] = activation
            undo.add(lambda: own_children(chain).update({name: shared}))
        undo.add(replace_forward(Passed(activation), path=below(owner, name)))
        return undo.keep()


def _twin(module: nn.Module) -> nn.Module:
    """Another module over the same parameters and settings; also after ``.to()``, ``deepcopy`` and ``pickle``."""
    twin = copy.copy(module)
    vars(twin).pop("forward", None)
    return twin


class Passed(Forward):
    """The forward of an activation that is done already, by the layer before it."""

    def __call__(self, input: Any) -> Any:
        return input


class Pooled(Forward):
    """The forward of a max pooling that keeps its input alone."""

    def __call__(self, input: Tensor) -> Tensor:
        return max_pool(cast(Any, self.module), input)


class Joined(Forward):
    """The forward of a layer with a residual, for all residuals that can be added to a batch norm.

    A layer at the end of a module is called twice. The module's own call passes the input on; the call by the module's
    caller has the residual.
    """

    def __init__(self, module: nn.Module, activation: Activation, *, in_place: bool) -> None:
        super().__init__(module)
        self.activation = activation
        self.in_place = in_place

    def __call__(self, input: Tensor, residual: Any = None) -> Tensor:
        if is_symbolic(input):
            return leaf(self.module, input)
        if residual is None:
            return input
        if isinstance(residual, Tensor) and self._fits(residual, input):
            return self.plain(input, residual.to(input.dtype))
        out = cast(_BatchNormAct, self.module).batch_norm(input)
        return self.activation(out.add_(residual) if self.in_place else out + residual)

    def _fits(self, residual: Tensor, input: Tensor) -> bool:
        """Tell whether the sum is of the input's shape and type."""
        if not self.in_place and residual.dtype != input.dtype:
            return False
        return residual.shape == input.shape or torch.broadcast_shapes(residual.shape, input.shape) == input.shape


# -- the forward that calls it ---------------------------------------------------------------------------


class Fused(Forward):
    """The forward of a module without the activations, which its batch norms do.

    It is code made from the module's own forward, one for each structure of arguments, mode and settings. The module
    warns and runs as written, with plain batch norms, where that cannot be traced or another op follows a batch norm.
    """

    def __init__(self, module: nn.Module, path: str, pairs: Sequence[Pair]) -> None:
        super().__init__(module)
        self.path = path
        self.sites = [_ConvertedPair.of(pair) for pair in pairs]
        self.settings = [name for name, value in vars(module).items() if type(value) in SETTINGS]  # the mode is one
        self._names: dict[Any, str] = {}  # of the attributes that hold code
        self._learned = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and all(isinstance(arg, Tensor) for arg in args):
            call, values = len(args), args
        elif is_symbolic(*args, *kwargs.values()):
            return leaf(self.module, *args, **kwargs)
        else:
            call, values = describe(args, kwargs)
        if torch.compiler.is_compiling():
            self._guard_settings()
        code = getattr(self, self._name_of(call, torch.is_grad_enabled()))
        if code is None:
            with _apart([cast(_BatchNormAct, self.module.get_submodule(site.norm)) for site in self.sites]):
                return self.plain(*args, **kwargs)
        return code(self.module, *values)

    def _read_settings(self) -> tuple[Any, ...]:
        """Settings that the forward may decide by; of a value that is not plain, its type."""
        values = [getattr(self.module, name, ...) for name in self.settings]
        return tuple([value if type(value) in SETTINGS else type(value) for value in values])

    def _guard_settings(self) -> None:
        """Have Dynamo guard what ``_name_of`` reads. A float that changed is a symbol to it; as a key, a constant."""
        for value in self._read_settings():
            if isinstance(value, float):
                {}.get(value)

    @assume_constant_result
    def _name_of(self, call: int | tuple[Any, Any], grad: bool) -> str:
        """Name the attribute that holds the code for a way of calling; learn the code where it is new.

        Dynamo runs this while it traces and takes the name as a constant: no dict is guarded, no graph breaks.
        """
        key = (call if isinstance(call, int) else ForwardCall.of(*call), grad, self._read_settings())
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= _MOST_CODES:
                delattr(self, self._names.pop(next(iter(self._names))))
            code = self._code(ForwardCall.tensors(key[0]) if isinstance(key[0], int) else key[0])
            self._learned += 1
            name = self._names[key] = f"_code_{self._learned}"
            setattr(self, name, code)
        return name

    def _code(self, call: ForwardCall) -> Callable[..., Any] | None:
        try:
            graph = trace(self.module, call)
        except Untraceable as error:
            return self._give_up(str(error))
        for site in self.sites:
            calls = graph.find_nodes(op="call_module", target=site.call)
            if len(calls) > 1 or not all(site.rewrite(self.module, node) for node in calls):
                return self._give_up(f"what follows {site.call} is not what followed it at the conversion")
        python = graph.python_code("self")
        exec(compile(python.src, f"<lowtide, {self.path or 'the model'}>", "exec"), python.globals)
        return python.globals["forward"]

    def _give_up(self, why: str) -> None:
        where = self.path or "the model"
        warnings.warn(f"{where}, called this way, runs with plain batch norms: {why}", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in self._names.values()}
        return {**state, "_names": {}}  # a copy makes its own


_MOST_CODES = 32


@dataclass(frozen=True, slots=True)
class _ConvertedPair:
    """A pair, as its owner's forward is to have it; names are from the owner."""

    norm: str
    call: str
    signature: Signature

    @classmethod
    def of(cls, pair: Pair) -> _ConvertedPair:
        return cls(pair.path[len(pair.owner) :].lstrip("."), pair.call, pair.consumer.signature)

    def rewrite(self, root: nn.Module, node: Any) -> bool:
        """Leave out of a graph what the layer does; False, and nothing done, if something else follows there."""
        consumer = consumer_of(root, node)
        if consumer.signature != self.signature:
            return False
        graph, result = node.graph, node
        if consumer.addition is not None:
            with graph.inserting_before(consumer.addition):
                value = node if self.norm != self.call else node.all_input_nodes[0]
                result = graph.call_module(self.norm, (value, consumer.residual))
        consumer.removed[0].replace_all_uses_with(result)
        for removed in consumer.removed:
            graph.erase_node(removed)
        if not node.users and node is not result:
            graph.erase_node(node)
        return True


@contextmanager
def _apart(layers: Sequence[_BatchNormAct]) -> Generator[None]:
    """Have layers be plain batch norms, without activation or residual."""
    forwards = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        vars(layer)["forward"] = layer.batch_norm
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            del vars(layer)["forward"]
            if forward is not None:
                vars(layer)["forward"] = forward


def _refuse_compiled(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if runs_compiled(module):
            raise LowtideError(
                f"{type(module).__name__} is compiled already", where=path, hint="Convert first, then compile."
            )
