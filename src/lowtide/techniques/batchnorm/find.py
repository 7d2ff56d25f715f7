"""Where a model's batch norms are followed by an activation: read from its forwards, without running them.

The forward of every module that holds a batch norm is traced by ``torch.fx`` with its children as leaves, so one that
cannot be traced costs only the batch norms that it calls itself.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
import random
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.tracing.internals import autograd

NOTHING_TO_SAVE = "no activation follows; nothing to save"


@dataclass(frozen=True, slots=True)
class Pair:
    """A batch norm and what follows it. Paths are from the model, calls from the owner."""

    path: str  # of the batch norm
    owner: str  # of the module whose forward runs the activation
    call: str  # what the owner calls: the batch norm, or a module that ends with it
    behind: Behind

    @property
    def at_the_end(self) -> bool:
        """Whether the batch norm is the last thing in a module that the owner calls."""
        return self.path != below(self.owner, self.call)

    def is_like(self, other: Pair) -> bool:
        """Whether it is the same place in another mode."""
        return (self.owner, self.call) == (other.owner, other.call) and self.behind.signature == other.behind.signature


@dataclass(frozen=True, slots=True)
class Left:
    """A batch norm that stays as it is, and why."""

    path: str
    why: str


def find(model: nn.Module, *, joins: bool = True, residuals: bool = False) -> tuple[list[Pair], list[Left]]:
    """Every batch norm of a model: those that can be one with what follows, and the rest with the reason.

    With ``residuals``, also those that give the residual of a join, which a join that is rebuilt would keep.
    """
    modules = _Modules(model)
    training = _Forwards(modules, training=True)
    evaluation = _Forwards(modules, training=False)
    found = {path: modules.refusal(path) or training.follow(path) for path in modules.norms}
    pairs: dict[tuple[str, str], Pair] = {}  # by the node that they give: of two batch norms added, one is taken
    left: dict[str, str] = dict.fromkeys(modules.scripted, "it is compiled by torch.jit")
    for path, pair in sorted(found.items(), key=lambda item: isinstance(item[1], Pair) and item[1].behind.second):
        if not isinstance(pair, Pair):
            left[path] = pair
            continue
        place = pair.owner, pair.behind.end
        if pair.behind.kind == "join" and not joins:
            left[path] = "a residual is added before the activation, and joins=0"
        elif why := evaluation.why_not(pair):
            left[path] = why
        elif place in pairs:
            left[path] = f"{NOTHING_TO_SAVE} (it is the residual of {pairs[place].path})"
        else:
            pairs[place] = pair
    for pair in list(pairs.values()) if residuals else ():
        path = modules.norm_that_gives(pair.owner, pair.behind.residual)
        if left.get(path, "").startswith(NOTHING_TO_SAVE):
            del left[path]
            parent, _, name = path.rpartition(".")
            pairs[path, ""] = Pair(path, parent, name, Behind("kept", "identity"))
    order = {path: i for i, path in enumerate([*modules.norms, *modules.scripted])}
    return (
        sorted(pairs.values(), key=lambda pair: order[pair.path]),
        [Left(path, left[path]) for path in order if path in left],
    )


def below(owner: str, name: str) -> str:
    """The path of what an owner calls ``name``."""
    return f"{owner}.{name}" if owner and name else owner or name


def is_chain(module: nn.Module) -> bool:
    """Whether running the children in turn is all that the module's forward does."""
    return type(module).forward is nn.Sequential.forward


def _is_hooked(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


class _Modules:
    """The modules of a model, and where each is registered."""

    def __init__(self, model: nn.Module) -> None:
        self.at = model.get_submodule
        self.places: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.places.setdefault(module, []).append(path)
        self.norms = {places[0]: m for m, places in self.places.items() if isinstance(m, _BatchNorm)}
        self.scripted = [
            places[0]
            for module, places in self.places.items()
            if isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in str(getattr(module, "original_name", ""))
        ]

    def norm_that_gives(self, owner: str, node: fx.Node | None) -> str:
        """The batch norm whose result a node is, for a single reader; empty if it is none."""
        if node is None or node.op != "call_module" or len(node.users) != 1:
            return ""
        path = below(owner, str(node.target))
        module = self.at(path)
        while is_chain(module) and module._modules and len(self.places[module]) == 1:
            path = below(path, list(module._modules)[-1])
            module = self.at(path)
        return path if path in self.norms and not self.refusal(path) else ""

    def refusal(self, path: str) -> str:
        """Why a batch norm cannot be replaced, whatever follows it; empty if it can."""
        norm = self.norms[path]
        places = self.places[norm]
        if hasattr(norm, "from_batch_norm"):
            return "it is converted already"
        if isinstance(norm, _LazyNormBase):
            return "it is lazy, and has not seen a batch yet"
        if isinstance(norm, nn.SyncBatchNorm):
            return "SyncBatchNorm does not say its dimensions; lowtide.nn.BatchNormAct2d takes a process_group"
        if is_parametrized(norm):
            return "its parameters are parametrized"
        known = isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        if not known or type(norm).forward is not _BatchNorm.forward:
            return f"{type(norm).__name__} has a forward of its own"
        if "forward" in vars(norm):
            return "its forward was replaced"
        if _is_hooked(norm):
            return "it has hooks, which would see the activation too"
        if len(places) > 1:
            return f"it is in the model twice: {', '.join(places)}"
        return "" if path else "it is the model itself"


# -- who calls whom --------------------------------------------------------------------------------------


class _Forwards:
    """The forwards of a model in one mode, as graphs."""

    def __init__(self, modules: _Modules, *, training: bool) -> None:
        self.modules = modules
        self.training = training
        self.failed: dict[str, str] = {}
        self.calls: dict[str, list[tuple[str, fx.Node]]] = {}  # by the path of what is called: the owner, the call
        graphs: dict[str, fx.Graph] = {}
        for module, (path, *_) in modules.places.items():
            if _is_of_interest(module):
                try:
                    graphs[path] = self._graph(module)
                except Untraceable as error:
                    self.failed[path] = str(error)
        for path, graph in graphs.items():
            self._note_calls(path, graph)
        for path in graphs:
            self._forget_if_never_called(path)

    def follow(self, path: str) -> Pair | str:
        """The batch norm with what follows it; or why nothing can be done."""
        calls = self.calls.get(path, [])
        if len(calls) != 1:
            return self._not_one(path, calls)
        owner, node = calls[0]
        while True:
            root = self.modules.at(owner)
            reader = behind(root, node)
            if reader.kind != "output" or not self._has_one_caller(owner):
                break
            owner, node = self.calls[owner][0]
        if reader.kind in ("output", "other"):
            return reader.label or NOTHING_TO_SAVE
        for gone in reader.gone:
            if gone.op == "call_module" and (why := _why_not_gone(root.get_submodule(str(gone.target)))):
                return why
        pair = Pair(path, owner, str(node.target), reader)
        if reader.addition is not None and not pair.at_the_end and _may_be_written(root, node, reader.addition):
            return "its input may be written to before the residual is added"
        if is_chain(root) and reader.kind == "activation":
            places = self.modules.places[root.get_submodule(reader.label)]
            if len(places) == 1 and len(self.calls[places[0]]) > 1:
                return f"its activation {places[0]} is called by others too"
        return pair

    def why_not(self, pair: Pair) -> str:
        """Why a pair of the other mode is none in this one; empty where it is, and where it is not called."""
        if pair.behind.kind == "kept" or not self.calls.get(pair.path):
            return ""
        here = self.follow(pair.path)
        if isinstance(here, Pair) and here.is_like(pair):
            return ""
        mode = "training" if self.training else "evaluation"
        return f"in {mode} mode {'something else follows' if isinstance(here, Pair) else here}"

    def _graph(self, module: nn.Module) -> fx.Graph:
        name = type(module).__name__
        if "forward" in vars(module):
            raise Untraceable(f"{name}.forward was replaced by {type(module.forward).__name__}")
        if isinstance(module, fx.GraphModule):
            raise Untraceable("it is in a torch.fx.GraphModule; convert the model that this was made from")
        if is_chain(module):
            return _chain_graph(module)
        errors: list[Untraceable] = []
        was = module.training
        module.training = self.training
        try:
            for call in Call.guesses(module):
                try:
                    return trace(module, call)
                except Untraceable as error:
                    errors.append(error)
        finally:
            module.training = was
        raise errors[0]

    def _note_calls(self, owner: str, graph: fx.Graph) -> None:
        root = self.modules.at(owner)
        for node in graph.nodes:
            if node.op == "call_module":
                path = self.modules.places[root.get_submodule(str(node.target))][0]
                self.calls.setdefault(path, []).append((owner, node))

    def _forget_if_never_called(self, path: str) -> None:
        """A ``nn.Sequential`` may be a mere list of layers, which its owner calls one by one."""
        chain = self.modules.at(path)
        if not path or self.calls.get(path) or not is_chain(chain):
            return
        children = [self.modules.places[child] for child in chain.children()]
        if any(owner != path for places in children if len(places) == 1 for owner, _ in self.calls[places[0]]):
            for calls in self.calls.values():
                calls[:] = [call for call in calls if call[0] != path]

    def _has_one_caller(self, path: str) -> bool:
        module = self.modules.at(path)
        return (
            len(self.calls.get(path, [])) == 1
            and len(self.modules.places[module]) == 1
            and not _is_hooked(module)
            and [parameter.kind for parameter in _parameters(module)] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]
        )

    def _not_one(self, path: str, calls: Sequence[tuple[str, fx.Node]]) -> str:
        if calls:
            owners = dict.fromkeys(owner or "the model" for owner, _ in calls)
            return f"it is called {len(calls)} times, by {', '.join(owners)}"
        parts = path.split(".")
        above = [".".join(parts[:i]) for i in reversed(range(len(parts)))]
        return next((self.failed[owner] for owner in above if owner in self.failed), "no forward was seen to call it")


def _why_not_gone(module: nn.Module) -> str:
    """Why a module must go on being called; not for ``behind``, as a profiler's hooks come and go."""
    name = type(module).__name__
    if _is_hooked(module):
        return f"{name}, which follows, has hooks"
    return f"the forward of {name}, which follows, was replaced" if "forward" in vars(module) else ""


def _is_of_interest(module: nn.Module) -> bool:
    """Whether the module's own forward may call a batch norm; torch's wrappers, such as DDP, do not."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).forward is nn.Module.forward:
        return False
    is_ours = is_chain(module) or isinstance(module, fx.GraphModule) or not _is_torchs(module)
    return is_ours and any(isinstance(part, _BatchNorm) for part in module.modules() if part is not module)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _chain_graph(module: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    value = graph.placeholder("input")
    for name in module._modules:
        value = graph.call_module(name, (value,))
    graph.output(value)
    return graph


# -- what follows a call ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Behind:
    """What reads the result of a call, in one graph."""

    kind: Literal["activation", "join", "kept", "output", "other"]  # kept: by a convolution, for its backward
    label: str = ""  # the activation's name or repr; what is in the way, for "other"
    activation: nn.Module | None = None
    gone: tuple[fx.Node, ...] = ()  # what the pair stands for besides the call, last node first
    addition: fx.Node | None = None  # of a join
    residual: fx.Node | None = None
    second: bool = False  # whether the call is the second operand of the addition
    in_place: bool = False  # whether the residual is added in place
    end: str = ""  # the name of the node whose value the pair gives

    @property
    def signature(self) -> tuple[str, str, bool, bool]:
        """What must be the same for the same to follow in two graphs of one forward."""
        return self.kind, self.label, self.second, self.in_place


def behind(root: nn.Module, node: fx.Node) -> Behind:
    """What reads the result of a call in the forward of ``root``; ``nn.Identity`` is looked through."""
    value, passed = _through_identities(root, node)
    readers = list(value.users)
    if readers and all(_keeps(root, reader, value) for reader in readers):
        return Behind("kept", "identity", end=node.name)
    if len(readers) != 1:
        names = " and ".join(reader.name for reader in readers)
        return Behind("other", f"its output is read by {names}" if names else "nothing reads its output")
    reader = readers[0]
    if reader.op == "output":
        return Behind("output" if reader.args[0] is value else "other")
    activation, label = _activation(root, reader, value)
    if activation is not None:
        return Behind("activation", label, activation, (reader, *passed), end=reader.name)
    residual = _residual(reader, value)
    if residual is not None:
        total, more = _through_identities(root, reader)
        last, *others = [*total.users, None]
        activation, label = _activation(root, last, total) if last and others == [None] else (None, "")
        if last and activation is not None:
            gone = (last, *more, reader, *passed)
            second = reader.args[0] is not value
            in_place = reader.target in _SUMS_IN_PLACE
            return Behind("join", label, activation, gone, reader, residual, second, in_place, last.name)
    return Behind("other", label)


def _through_identities(root: nn.Module, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The value as its readers see it, and the calls of ``nn.Identity`` on the way, last first."""
    passed: list[fx.Node] = []
    while len(node.users) == 1:
        reader = next(iter(node.users))
        if reader.op != "call_module" or type(root.get_submodule(str(reader.target))) is not nn.Identity:
            break
        passed.insert(0, reader)
        node = reader
    return node, passed


def _keeps(root: nn.Module, reader: fx.Node, value: fx.Node) -> bool:
    """Whether a reader keeps the value for its backward as a convolution does."""
    if not reader.args or reader.args[0] is not value:
        return False
    if reader.op == "call_module":
        return isinstance(root.get_submodule(str(reader.target)), _ConvNd | nn.Linear)
    return reader.op == "call_function" and reader.target in _CONVOLUTIONS


def _residual(reader: fx.Node, value: fx.Node) -> fx.Node | None:
    """What is added to the value; None if nothing is, or if the sum is written over the other operand."""
    is_sum = reader.target in (_SUM_METHODS if reader.op == "call_method" else _SUMS)
    if reader.op not in ("call_function", "call_method") or not is_sum or len(reader.args) != 2 or reader.kwargs:
        return None
    first, second = reader.args
    if first is value:
        return second if isinstance(second, fx.Node) and second is not value else None
    return first if isinstance(first, fx.Node) and reader.target not in _SUMS_IN_PLACE else None


def _may_be_written(root: nn.Module, call: fx.Node, addition: fx.Node) -> bool:
    """Whether what a call reads may be another by the time of the addition, to which the call is moved."""
    nodes = list(call.graph.nodes)
    between = nodes[nodes.index(call) + 1 : nodes.index(addition)]
    return any(_writes(root, node) for node in between if set(node.all_input_nodes) & set(call.all_input_nodes))


def _writes(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node may write over what it reads."""
    if node.op == "call_module":
        return any(getattr(part, "inplace", False) for part in root.get_submodule(str(node.target)).modules())
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") or bool(node.kwargs.get("inplace")) or node.target in _IN_PLACE.values()


# -- activations -----------------------------------------------------------------------------------------


def _activation(root: nn.Module, node: fx.Node, value: fx.Node) -> tuple[nn.Module | None, str]:
    """The activation that a node applies to a value, and its label; or None, and what is in the way if it is one."""
    reads = node.args[0] if node.args else node.kwargs.get("input")
    if reads is not value or node.all_input_nodes != [value]:
        return None, ""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if _is_pointwise(module):
            return module, str(node.target)
        looks_like_one = type(module).__module__ == nn.ReLU.__module__ if _is_torchs(module) else _is_bare(module)
        why = f"lowtide does not know {type(module).__name__} as a pointwise activation"
        return None, why if looks_like_one else ""
    if node.op in ("call_function", "call_method") and node.target in _FUNCTIONS:
        kind, names = _FUNCTIONS[node.target]
        settings = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        known = [*names, "input", "inplace"]
        if len(node.args) > 1 + len(names) or any(name not in known for name in settings):
            return None, f"its activation {node.name} is called in a way that lowtide does not know"
        module = kind(**{name: value for name, value in settings.items() if name not in ("input", "inplace")})
        return module, repr(module)
    return None, ""


def _is_bare(module: nn.Module) -> bool:
    return not list(module.parameters()) and not list(module.buffers())


def _is_pointwise(module: nn.Module) -> bool:
    """Whether a module is one of torch's, or somebody's own that is made of pointwise functions of its input alone."""
    if _is_torchs(module) or not _is_bare(module):
        return type(module) in _POINTWISE_MODULES
    try:
        graph = trace(module, Call.tensors(1))
    except Untraceable:
        return False
    *inner, output = [node for node in graph.nodes if node.op != "placeholder"]
    return isinstance(output.args[0], fx.Node) and all(_is_pointwise_call(module, node) for node in inner)


def _is_pointwise_call(root: nn.Module, node: fx.Node) -> bool:
    if not all(isinstance(arg, fx.Node | int | float | str) for arg in (*node.args, *node.kwargs.values())):
        return False
    if node.op == "call_module":
        return _is_pointwise(root.get_submodule(str(node.target)))
    return not _writes(root, node) and (node.target in _POINTWISE or node.target in _FUNCTIONS)


_FUNCTIONS: dict[Any, tuple[type[nn.Module], tuple[str, ...]]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"), (nn.ReLU, ())),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"), (nn.Sigmoid, ())),
    **dict.fromkeys((F.tanh, torch.tanh, torch.tanh_, "tanh", "tanh_"), (nn.Tanh, ())),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), (nn.LeakyReLU, ("negative_slope",))),
    **dict.fromkeys((F.elu, F.elu_), (nn.ELU, ("alpha",))),
    **dict.fromkeys((F.celu, torch.celu), (nn.CELU, ("alpha",))),
    **dict.fromkeys((F.selu, torch.selu), (nn.SELU, ())),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), (nn.Hardtanh, ("min_val", "max_val"))),
    F.softplus: (nn.Softplus, ("beta", "threshold")),
    F.gelu: (nn.GELU, ("approximate",)),
    F.silu: (nn.SiLU, ()),
    F.mish: (nn.Mish, ()),
    F.relu6: (nn.ReLU6, ()),
    F.hardswish: (nn.Hardswish, ()),
    F.hardsigmoid: (nn.Hardsigmoid, ()),
    F.logsigmoid: (nn.LogSigmoid, ()),
    F.softsign: (nn.Softsign, ()),
}
_POINTWISE_MODULES = {kind for kind, _ in _FUNCTIONS.values()} | {nn.PReLU, nn.Threshold, nn.Softshrink}
_NAMES = (
    *("add", "sub", "mul", "div", "neg", "abs", "square", "sqrt", "pow", "exp", "expm1", "log", "log1p"),
    *("erf", "sin", "cos", "minimum", "maximum", "clamp"),
)
_POINTWISE = {
    *_NAMES,
    *(getattr(torch, name) for name in _NAMES),
    *(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "neg", "pow")),
}
_SUMS = (operator.add, operator.iadd, torch.add)
_SUM_METHODS = ("add", "add_")
_SUMS_IN_PLACE = (operator.iadd, "add_")
_CONVOLUTIONS = {
    *(F.linear, F.conv1d, F.conv2d, F.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
}


# -- tracing one forward ---------------------------------------------------------------------------------


class Untraceable(Exception):
    """A forward that cannot be written as a graph, with the line that is why."""


class _Slot(Enum):
    """What a leaf of the arguments is, if it is no setting."""

    TENSOR = "tensor"
    OTHER = "other"


SETTINGS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))


@dataclass(frozen=True, slots=True)
class Call:
    """How a forward is called: the arguments, with tensors left open."""

    structure: pytree.TreeSpec
    leaves: tuple[_Slot | tuple[type, Any], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Sequence[Any]]:
        """The call, and the values that it leaves open."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        shapes = [
            _Slot.TENSOR if isinstance(leaf, Tensor) else (type(leaf), leaf) if type(leaf) in SETTINGS else _Slot.OTHER
            for leaf in leaves
        ]
        values = [leaf for leaf, shape in zip(leaves, shapes, strict=True) if isinstance(shape, _Slot)]
        return cls(structure, tuple(shapes)), values

    @classmethod
    def tensors(cls, count: int) -> Call:
        """A call with this many tensors and nothing else."""
        _, structure = pytree.tree_flatten(((None,) * count, {}))
        return cls(structure, (_Slot.TENSOR,) * count)

    @classmethod
    def guesses(cls, module: nn.Module) -> Generator[Call]:
        """How a forward may be called, as far as its signature tells: with tensors, or with lists of them."""
        choices: list[list[tuple[Any, ...]]] = []
        keywords: dict[str, Any] = {}
        one = _Slot.TENSOR
        for parameter in _parameters(module):
            if parameter.kind is parameter.VAR_POSITIONAL:
                choices.append([(one,), (one, one)])
            elif parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY:
                keywords[parameter.name] = one
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                choices.append([(one,), ([one, one],)])
        for choice in itertools.islice(itertools.product(*choices), 8):
            leaves, structure = pytree.tree_flatten((tuple(itertools.chain(*choice)), keywords))
            yield cls(structure, tuple(leaves))


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    """What a forward takes besides ``self``."""
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())
    except (TypeError, ValueError) as error:
        raise Untraceable(f"{type(module).__name__}.forward cannot be traced: {error}") from error
    is_self = parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
    return parameters[1:] if is_self else parameters


def trace(module: nn.Module, call: Call) -> fx.Graph:
    """The module's own forward as a graph: a placeholder for each open argument, a node for each child's call.

    Refused, as the graph would not do the same: control flow by values, random numbers drawn in Python, attributes
    that are set, tensors made from nothing, and parts under ``no_grad``, autocast or a checkpoint.
    """
    try:
        with _no_side_effects(module), _NothingComputed(), warnings.catch_warnings(action="ignore"):
            return _Tracer(call).trace(module)
    except Exception as error:
        raise Untraceable(f"{type(module).__name__}.forward cannot be traced: {_reason(error)}") from error


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        leaves = [
            self.create_proxy("placeholder", f"argument_{i}", (), {}) if isinstance(leaf, _Slot) else leaf[1]
            for i, leaf in enumerate(self.call.leaves)
        ]
        for leaf, slot in zip(leaves, self.call.leaves, strict=True):
            if isinstance(leaf, _Value):
                leaf.is_tensor = slot is _Slot.TENSOR
        args, kwargs = pytree.tree_unflatten(leaves, self.call.structure)

        def run(root: nn.Module) -> Any:
            return root_fn(root, *args, **kwargs)

        return run, [self.root]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            raise TypeError("it uses a tensor that is neither an argument nor registered")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise TypeError("a part of it runs under a grad mode, autocast or checkpoint of its own")
        return super().create_node(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise TypeError("it decides by the value or the shape of a tensor")


class _Value(fx.Proxy):
    """A value of the forward. To ``isinstance``, a tensor that is an argument is one; of others nobody knows."""

    is_tensor = False

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return _Value
        if not self.is_tensor:
            raise TypeError("it decides by the type of a value")
        return Tensor

    def __setitem__(self, *item: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, *item), {})


_IN_PLACE = {
    f"__i{name}__": getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
for _name, _function in _IN_PLACE.items():  # fx would make x += y out of place

    def _in_place(self: _Value, other: Any, *, function: Any = _function) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(_Value, _name, _in_place)


class _NothingComputed(TorchDispatchMode):
    """Nothing may be computed while a forward is traced: its result would be a constant in the graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"it computes {func} of tensors that are not its arguments")


def _modes() -> tuple[Any, ...]:
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    hooks = autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, hooks


@contextmanager
def _no_side_effects(module: nn.Module) -> Generator[None]:
    """Put attributes and Python's random numbers back; raise if they were changed."""
    before = [(part, dict(vars(part)), {k: _copied(v) for k, v in vars(part).items()}) for part in module.modules()]
    state, numpy_state = random.getstate(), _numpy_state()
    changed: list[str] = []
    try:
        yield
    finally:
        for part, attributes, contents in before:
            now = dict(vars(part))
            others = [name for name in {**attributes, **now} if now.get(name, ...) is not attributes.get(name, ...)]
            if others:
                vars(part).clear()
                vars(part).update(attributes)
            changed += others + [name for name, value in attributes.items() if _put_back(value, contents[name])]
        drawn = random.getstate() != state or _numpy_state()[2:] != numpy_state[2:]  # how many were drawn
        random.setstate(state)
        np.random.set_state(numpy_state)
    if changed:
        raise TypeError(f"it changes the attribute {changed[0]}")
    if drawn:
        raise TypeError("it draws random numbers in Python")


def _numpy_state() -> tuple[Any, ...]:
    return cast(tuple[Any, ...], np.random.get_state())


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _ids(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [id(part) for item in cast(dict[Any, Any], value).items() for part in item]
    return [id(part) for part in cast(list[Any], value)] if isinstance(value, list | set) else []


def _put_back(value: Any, was: Any) -> bool:
    """Give a container its old content; whether it had another."""
    if _ids(value) == _ids(was):
        return False
    value.clear()
    value.extend(was) if isinstance(value, list) else value.update(was)
    return True


def _reason(error: Exception) -> str:
    """The error's first line, and the user's own line that led to it."""
    torchs, ours = str(Path(torch.__file__).parent), __file__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(torchs) and frame.filename != ours and "contextlib" not in frame.filename
    ]
    first = (str(error) or type(error).__name__).strip().splitlines()[0]
    return f"{first} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else first
