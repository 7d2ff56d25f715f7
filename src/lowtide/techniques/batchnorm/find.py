"""Find batch norms that an activation follows, from a model's forwards, without running them.

``torch.fx`` traces the forward of every module that holds a batch norm, with its children as leaves. One that cannot be
traced costs only the batch norms that it calls itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from lowtide.compat.modules import BatchNormBase, LazyNormBase, hooks_of, own_children
from lowtide.techniques.batchnorm.consumers import Consumer, Signature, consumer_of, may_be_written
from lowtide.techniques.batchnorm.fx_trace import ForwardCall, Untraceable, is_torchs, parameters_of, trace

NOTHING_TO_SAVE = "no activation follows; nothing to save"


@dataclass(frozen=True, slots=True)
class Pair:
    """A batch norm and what follows it. Paths are from the model, calls from the owner."""

    path: str  # of the batch norm
    owner: str  # of the module whose forward runs the activation
    call: str  # the child that the owner calls: the batch norm, or a module that ends with it
    consumer: Consumer
    starts: bool = False  # a join that is rebuilt without the one before: its residual is a layer's too

    @property
    def place(self) -> tuple[str, str, Signature]:
        """Key that is equal for the same place in another mode."""
        return self.owner, self.call, self.consumer.signature

    @property
    def is_join(self) -> bool:
        return self.consumer.kind == "join"


@dataclass(frozen=True, slots=True)
class Left:
    """A batch norm that stays as it is, and why."""

    path: str
    why: str


def find(model: nn.Module, *, joins: bool = True, residuals: bool = False) -> tuple[list[Pair], list[Left]]:
    """Find the batch norms of a model that can be one with their consumer, and the rest with the reason.

    With ``residuals``, also those that give the residual of a join, which a join that is rebuilt would keep.
    """
    modules = _Modules(model)
    training = _TracedForwards(modules, training=True)
    evaluation = _TracedForwards(modules, training=False)
    results = {path: modules.refusal(path) or training.follow(path) for path in modules.norms}
    pairs: dict[tuple[str, str], Pair] = {}  # by the node that they give: of two batch norms added, one is taken
    left: dict[str, str | None] = dict.fromkeys(modules.scripted, "it is compiled by torch.jit")
    residual_of: dict[str, str] = {}  # batch norms that a join adds, by the path of the other operand
    for path, pair in sorted(results.items(), key=lambda item: _is_second(item[1])):
        if not isinstance(pair, Pair):
            left[path] = pair
            continue
        place = pair.owner, pair.consumer.end
        if pair.is_join and not joins:
            left[path] = "a residual is added before the activation, and joins=0"
        elif why := evaluation.why_not(pair):
            left[path] = why
        elif place in pairs:
            left[path] = None
            residual_of[path] = pairs[place].path
        else:
            pairs[place] = pair
    for place, pair in list(pairs.items()) if residuals else ():
        path = modules.norm_that_gives(pair.owner, pair.consumer.residual)
        if left.get(path, "") is None:
            pairs[place] = replace(pair, starts=True)
            del left[path]
            parent, _, name = path.rpartition(".")
            pairs[path, ""] = Pair(path, parent, name, Consumer(Signature("kept")))
    order = {path: i for i, path in enumerate([*modules.norms, *modules.scripted])}
    texts = {path: f"{NOTHING_TO_SAVE} (it is the residual of {other})" for path, other in residual_of.items()}
    return (
        sorted(pairs.values(), key=lambda pair: order[pair.path]),
        [Left(path, left[path] or texts.get(path, NOTHING_TO_SAVE)) for path in order if path in left],
    )


def _is_second(result: Pair | str | None) -> bool:
    return isinstance(result, Pair) and result.consumer.signature.second


def below(owner: str, name: str) -> str:
    """The path of what an owner calls ``name``."""
    return f"{owner}.{name}" if owner and name else owner or name


def is_chain(module: nn.Module) -> bool:
    """Tell whether running the children in turn is all that the module's forward does."""
    return type(module).forward is nn.Sequential.forward


class _Modules:
    """The modules of a model, and where each is registered."""

    def __init__(self, model: nn.Module) -> None:
        self.at = model.get_submodule
        self.places: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.places.setdefault(module, []).append(path)
        self.norms = {places[0]: m for m, places in self.places.items() if isinstance(m, BatchNormBase)}
        self.scripted = [
            places[0]
            for module, places in self.places.items()
            if isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in str(getattr(module, "original_name", ""))
        ]

    def norm_that_gives(self, owner: str, node: fx.Node | None) -> str:
        """The path of the batch norm whose result a node is, if it has a single reader; else empty."""
        if node is None or node.op != "call_module" or len(node.users) != 1:
            return ""
        path = below(owner, str(node.target))
        module = self.at(path)
        while is_chain(module) and own_children(module) and len(self.places[module]) == 1:
            path = below(path, list(own_children(module))[-1])
            module = self.at(path)
        return path if path in self.norms and not self.refusal(path) else ""

    def refusal(self, path: str) -> str:
        """Give the reason not to replace a batch norm, whatever follows it; empty if there is none."""
        norm = self.norms[path]
        places = self.places[norm]
        if hasattr(norm, "from_batch_norm"):
            return "it is converted already"
        if isinstance(norm, LazyNormBase):
            return "it is lazy, and has not seen a batch yet"
        if is_parametrized(norm):
            return "its parameters are parametrized"
        known = isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
        if not known or type(norm).forward not in (BatchNormBase.forward, nn.SyncBatchNorm.forward):
            return f"{type(norm).__name__} has a forward of its own"
        if "forward" in vars(norm):
            return "its forward was replaced"
        if hooks_of(norm):
            return "it has hooks, which would see the activation too"
        if len(places) > 1:
            return f"it is in the model twice: {', '.join(places)}"
        return "" if path else "it is the model itself"


# -- who calls whom --------------------------------------------------------------------------------------


class _TracedForwards:
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

    def follow(self, path: str) -> Pair | str | None:
        """Pair a batch norm with its consumer; or say why that cannot be done, None where nothing would be saved."""
        calls = self.calls.get(path, [])
        if len(calls) != 1:
            return self._not_one(path, calls)
        owner, node = calls[0]
        while True:
            root = self.modules.at(owner)
            consumer = consumer_of(root, node)
            if consumer.kind != "output" or not self._has_one_caller(owner):
                break
            owner, node = self.calls[owner][0]
        if consumer.kind in ("output", "other"):
            return consumer.obstacle
        for removed in consumer.removed:
            if removed.op == "call_module" and (why := _why_still_called(root.get_submodule(str(removed.target)))):
                return why
        pair = Pair(path, owner, str(node.target), consumer)
        is_direct = path == below(owner, pair.call)  # not the last thing in a module that the owner calls
        if consumer.addition is not None and is_direct and may_be_written(root, node, consumer.addition):
            return "its input may be written to before the residual is added"
        activation = consumer.signature.activation
        if is_chain(root) and activation is not None:
            places = self.modules.places[activation.module(root)]
            if len(places) == 1 and len(self.calls[places[0]]) > 1:
                return f"its activation {places[0]} is called by others too"
        return pair

    def why_not(self, pair: Pair) -> str:
        """Give the reason why a pair of the other mode is none in this one; empty if it is one, or is not called."""
        if pair.consumer.kind == "kept" or not self.calls.get(pair.path):
            return ""
        here = self.follow(pair.path)
        mode = "training" if self.training else "evaluation"
        if not isinstance(here, Pair):
            return f"in {mode} mode {here or NOTHING_TO_SAVE}"
        return "" if here.place == pair.place else f"in {mode} mode something else follows"

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
            for call in ForwardCall.guesses(module):
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
            and not hooks_of(module)
            and [parameter.kind for parameter in parameters_of(module)] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]
        )

    def _not_one(self, path: str, calls: Sequence[tuple[str, fx.Node]]) -> str:
        if calls:
            owners = dict.fromkeys(owner or "the model" for owner, _ in calls)
            return f"it is called {len(calls)} times, by {', '.join(owners)}"
        parts = path.split(".")
        above = [".".join(parts[:i]) for i in reversed(range(len(parts)))]
        return next((self.failed[owner] for owner in above if owner in self.failed), "no forward was seen to call it")


def _why_still_called(module: nn.Module) -> str:
    """Give the reason to keep calling a module. A profiler's hooks come and go, so ``consumer_of`` does not ask."""
    name = type(module).__name__
    if hooks_of(module):
        return f"{name}, which follows, has hooks"
    return f"the forward of {name}, which follows, was replaced" if "forward" in vars(module) else ""


def _is_of_interest(module: nn.Module) -> bool:
    """Tell whether the module's own forward may call a batch norm; torch's wrappers, such as DDP, do not."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).forward is nn.Module.forward:
        return False
    is_ours = is_chain(module) or isinstance(module, fx.GraphModule) or not is_torchs(module)
    return is_ours and any(isinstance(part, BatchNormBase) for part in module.modules() if part is not module)


def _chain_graph(module: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    value = graph.placeholder("input")
    for name in own_children(module):
        value = graph.call_module(name, (value,))
    graph.output(value)
    return graph
