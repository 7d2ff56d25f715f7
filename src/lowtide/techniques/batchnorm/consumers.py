"""Consumers of a call's result in a traced forward: an activation, a residual and an activation, a convolution."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from lowtide.compat.modules import ConvBase
from lowtide.kernels.activations import FEW_BIT, POINTWISE
from lowtide.techniques.batchnorm.fx_trace import IN_PLACE, ForwardCall, Untraceable, is_torchs, trace


@dataclass(frozen=True, slots=True)
class ActivationCall:
    """Activation that a forward applies: a child by its name, or the module that a function stands for."""

    child: str = ""  # "" for a function
    kind: type[nn.Module] = nn.Module
    settings: tuple[tuple[str, Any], ...] = ()

    def module(self, root: nn.Module) -> nn.Module:
        return root.get_submodule(self.child) if self.child else self.kind(**dict(self.settings))


@dataclass(frozen=True, slots=True)
class Signature:
    """Part of a consumer that is equal where the same follows in two graphs of one forward."""

    kind: Literal["activation", "join", "kept", "output", "other"]  # kept: by a convolution, for its backward
    activation: ActivationCall | None = None
    second: bool = False  # whether the call is the second operand of the addition
    in_place: bool = False  # whether the residual is added in place


@dataclass(frozen=True, slots=True)
class Consumer:
    """Consumer of a call's result, in one graph."""

    signature: Signature
    obstacle: str | None = None  # why an "other" is no activation; None where it does not look like one
    removed: tuple[fx.Node, ...] = ()  # nodes that the layer replaces besides the call, last one first
    addition: fx.Node | None = None  # of a join
    residual: fx.Node | None = None
    end: str = ""  # the name of the node whose value the pair gives

    @property
    def kind(self) -> str:
        return self.signature.kind


def consumer_of(root: nn.Module, node: fx.Node) -> Consumer:
    """Find the consumer of a call's result in the forward of ``root``, through any ``nn.Identity``."""
    value, passed = _through_identities(root, node)
    readers = list(value.users)
    if readers and all(_keeps(root, reader, value) for reader in readers):
        return Consumer(Signature("kept"), end=node.name)
    if len(readers) != 1:
        names = " and ".join(reader.name for reader in readers)
        return Consumer(_OTHER, f"its output is read by {names}" if names else "nothing reads its output")
    reader = readers[0]
    if reader.op == "output":
        return Consumer(Signature("output") if reader.args[0] is value else _OTHER)
    activation = _activation(root, reader, value)
    if isinstance(activation, ActivationCall):
        return Consumer(Signature("activation", activation), removed=(reader, *passed), end=reader.name)
    residual = _residual(reader, value)
    total, more = _through_identities(root, reader)
    if residual is not None and len(total.users) == 1:
        last = next(iter(total.users))
        activation = _activation(root, last, total)
        if isinstance(activation, ActivationCall):
            second, in_place = reader.args[0] is not value, reader.target in _SUMS_IN_PLACE
            signature = Signature("join", activation, second, in_place)
            return Consumer(signature, None, (last, *more, reader, *passed), reader, residual, last.name)
    return Consumer(_OTHER, activation)


_OTHER = Signature("other")


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
    """Tell whether a reader keeps the value for its backward as a convolution does."""
    if not reader.args or reader.args[0] is not value:
        return False
    if reader.op == "call_module":
        return isinstance(root.get_submodule(str(reader.target)), ConvBase | nn.Linear)
    return reader.op == "call_function" and reader.target in _CONVOLUTIONS


def _residual(reader: fx.Node, value: fx.Node) -> fx.Node | None:
    """Operand that is added to the value; None without one, or where the sum is written over that operand."""
    is_sum = reader.target in (_SUM_METHODS if reader.op == "call_method" else _SUMS)
    if reader.op not in ("call_function", "call_method") or not is_sum or len(reader.args) != 2 or reader.kwargs:
        return None
    first, second = reader.args
    if first is value:
        return second if isinstance(second, fx.Node) and second is not value else None
    return first if isinstance(first, fx.Node) and reader.target not in _SUMS_IN_PLACE else None


def may_be_written(root: nn.Module, call: fx.Node, addition: fx.Node) -> bool:
    """Tell whether a call's input may be overwritten before the addition, to which the call is moved."""
    nodes = list(call.graph.nodes)
    between = nodes[nodes.index(call) + 1 : nodes.index(addition)]
    return any(_writes(root, node) for node in between if set(node.all_input_nodes) & set(call.all_input_nodes))


def _writes(root: nn.Module, node: fx.Node) -> bool:
    """Tell whether a node may write over what it reads."""
    if node.op == "call_module":
        return any(getattr(part, "inplace", False) for part in root.get_submodule(str(node.target)).modules())
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") or bool(node.kwargs.get("inplace")) or node.target in IN_PLACE.values()


def _activation(root: nn.Module, node: fx.Node, value: fx.Node) -> ActivationCall | str | None:
    """Read the activation that a node applies to a value, or the reason why it cannot be fused."""
    reads = node.args[0] if node.args else node.kwargs.get("input")
    if reads is not value or node.all_input_nodes != [value]:
        return None
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if _is_pointwise(module):
            return ActivationCall(str(node.target))
        looks_like_one = type(module).__module__ == nn.ReLU.__module__ if is_torchs(module) else _is_bare(module)
        why = f"lowtide does not know {type(module).__name__} as a pointwise activation"
        return why if looks_like_one else None
    if node.op in ("call_function", "call_method") and node.target in _FUNCTIONS:
        kind, names = _FUNCTIONS[node.target]
        keywords = {name: value for name, value in node.kwargs.items() if name not in ("input", "inplace")}
        if len(node.args) > 1 + len(names) or not keywords.keys() <= set(names):
            return f"its activation {node.name} is called in a way that lowtide does not know"
        settings = dict(zip(names, node.args[1:], strict=False)) | keywords
        return ActivationCall(kind=kind, settings=tuple(settings.items()))
    return None


def _is_bare(module: nn.Module) -> bool:
    return not list(module.parameters()) and not list(module.buffers())


def _is_pointwise(module: nn.Module) -> bool:
    """Tell whether a module is a pointwise one of torch's, or composes pointwise functions of its input alone."""
    if is_torchs(module) or not _is_bare(module):
        return type(module) in _POINTWISE_MODULES
    try:
        graph = trace(module, ForwardCall.tensors(1))
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


def _spellings(name: str) -> list[Any]:
    """Functions of torch that apply an activation, and names of methods that do, in place or not."""
    names = (name, f"{name}_")
    functions = [getattr(owner, each) for owner in (F, torch) for each in names if hasattr(owner, each)]
    return functions + [each for each in names if hasattr(torch.Tensor, each)]


_FUNCTIONS: dict[Any, tuple[type[nn.Module], tuple[str, ...]]] = {
    function: (POINTWISE[name].module, tuple(POINTWISE[name].numbers))
    for name in FEW_BIT
    for function in _spellings(name)
}
_POINTWISE_MODULES = {POINTWISE[name].module for name in FEW_BIT} | {nn.PReLU}
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
