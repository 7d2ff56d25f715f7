"""The dispatch mode that records a step: every op, storage and saved value."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.compat import pytree
from lowtide.compat.autograd import (
    Packed,
    current_node,
    next_sequence_number,
    pop_saved_hooks,
    push_saved_hooks,
    sequence_number,
    top_saved_hooks,
)
from lowtide.compat.dispatch import TorchDispatchMode, is_wrapper, without_torch_function
from lowtide.compat.fake import FakeTensor, current_fake_mode
from lowtide.compat.operators import HigherOrderOperator
from lowtide.errors import TraceError
from lowtide.tracing.call_sites import source_line
from lowtide.tracing.dense_parts import dtype_name, flatten, leaves, parts
from lowtide.tracing.generators import HostDraws, has_own_generator
from lowtide.tracing.graph import Category, Graph, Op, Phase, TensorView, signature
from lowtide.tracing.live_storages import LiveStorages
from lowtide.tracing.meter import Meter
from lowtide.tracing.op_calls import Call, draws, trains
from lowtide.tracing.plain_aten.backward_formulas import PRODUCTS, formula_of
from lowtide.tracing.plain_aten.gradient_accumulation import (
    ADD_IN_PLACE,
    engine_adds,
    is_named_in_python,
    measure_engine_counts,
)
from lowtide.tracing.plain_aten.in_place import DIFFERING, form_after_product, form_in_formula
from lowtide.tracing.plain_aten.saved_numbers import KeptNumbers
from lowtide.tracing.trace_builder import CallSite, LiveSave, Record

_PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor, int, float, bool, list, tuple, str, type(None)})
_DEVICE = torch.ops.prim.device.default


class Recorder(TorchDispatchMode):
    """Records one step. It keeps no tensor alive: storages are followed by weak references.

    ``calls``, if given, collects one call for each signature. In a ``fake`` step, real tensors from outside the model
    and the batch have one fake twin each, which lives as long as they do.
    """

    supports_higher_order_operators = True  # torch.cond and its like are seen, as one op each

    def __init__(self, meter: Meter, *, calls: dict[str, Call] | None = None, fake: bool = False) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.modules: list[str] = []  # paths of the modules that are running, innermost last
        self.meter = meter
        self._calls = calls
        self._fake = fake
        self._twins: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self._record = Record()
        self._numbers = KeptNumbers(self._record)
        self._storages = LiveStorages(self._record, self.modules)
        self._host_draws = HostDraws(self._record.ops)
        self._opaque = 0
        self._stands_in = False  # while a plain step's formula is recorded in place of the one that runs
        self._with_zeros: set[int] = set()  # nodes of products with a zero, which no short formula differentiates
        self._replaced = -1  # sequence number of the last node with such a formula
        self._node: Any = None
        self._last_node = (-1, 0)  # sequence number of the autograd node that ran last, and its first op
        self._engine_counts = measure_engine_counts()
        self._outer_hooks = top_saved_hooks(True)
        self.survivors: list[tuple[str, weakref.ref[Any]]] = []
        """Labels of storages that the step made and that outlived it, and references to them."""
        self.saved_tensor_hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo runs compiled frames under us, instead of falling back to eager without a word."""
        return True

    # -- what the step's owner tells ------------------------------------------------------------------

    def own(self, tensor: Tensor, category: Category, label: str, module: str = "", *, state_key: str = "") -> None:
        """Register a tensor that exists before the step: a parameter, a buffer, optimizer state, input."""
        for part in parts(self._twin(tensor)):
            self._storages.see(part, birth=0, label=label)
            self._storages.name(part, category, label, module, tuple(tensor.shape), state_key)

    def label(self, tensor: Tensor, category: Category, label: str, module: str = "") -> None:
        """Name a storage that the step made, such as a gradient."""
        for part in parts(tensor):
            self._storages.name(part, category, label, module)

    def forget(self, tensor: Tensor) -> None:
        """Leave out a tensor that exists only because of the trace."""
        for part in parts(self._twin(tensor)):
            self._storages.forget(part)

    def note(self, tensor: Tensor, label: str) -> Tensor:
        """Count a tensor that no op made, such as a generator's state."""
        self._storages.see(tensor, label=label)
        return tensor

    def start(self, phase: Phase) -> None:
        """Enter a phase. Temporaries that are alive when backward starts become activations."""
        if phase == "backward":
            self._host_draws.settle()
            self._storages.keep_for_backward()
        elif phase == "forward":
            self._host_draws.start()
        self.phase = phase

    def visit(self, node: Any) -> None:
        """Tell which autograd node runs, where torch's engine does not."""
        self._node = node

    # -- what the step does ---------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # such as torch.cond: a region of its own
            if self._fake:
                raise TraceError(f"torch runs {func} whole, on real tensors alone", hint="Leave out fake=True.")
            return self.run_opaque(str(func), leaves((*args, *kwargs.values())), partial(func, *args, **kwargs))
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for many times an op: the way through all modes would be long
        with without_torch_function():  # function modes acted before autograd
            if func in DIFFERING and not self._opaque:
                func = self._plain_form(func, args, kwargs)
            return self._dispatch(func, args, kwargs)

    def _plain_form(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op that a plain step runs here: it may write in place where torch, under a mode, makes another tensor."""
        counts = self._engine_counts
        if self.phase == "backward" and engine_adds(func, args, kwargs, counts) and self._meets_in_buffer(args[0]):
            return ADD_IN_PLACE
        storage = self._storages.get(args[0])
        if storage is None or is_named_in_python(args, counts):
            return func
        node: Any = self._node if self._node is not None else current_node()
        if self.phase == "backward" and node is not None and not torch.is_grad_enabled():
            number, first = self._last_node
            is_fresh = number == sequence_number(node) and storage.birth >= first
            return form_in_formula(func, node.name(), storage.made_by) if is_fresh else func
        index = self._storages.index(args[0])
        is_last = any(value.storage == index for op in self._record.ops[-1:] for value in op.outputs)
        return form_after_product(func, args, storage.made_by) if is_last else func

    def _runs_other_formula(self) -> bool:
        """Tell whether another formula runs than the plain step's, which is recorded in its place."""
        node: Any = self._node if self._node is not None else current_node()
        if self._stands_in or node is None or torch.is_grad_enabled():
            return False
        formula = formula_of(node, fake=self._fake, zeros=sequence_number(node) in self._with_zeros)
        if formula is not None and sequence_number(node) != self._replaced:
            self._replaced, self._stands_in = sequence_number(node), True
            known = len(self._record.storages)
            try:
                formula(node, lambda func, *args: self._dispatch(func, args, {}))
            finally:
                self._stands_in = False
            for storage in self._record.storages[known:]:
                if storage.is_outside:  # a stand-in, which a plain step does not have
                    storage.death = storage.birth
        return formula is not None

    def _meets_in_buffer(self, gradient: Tensor) -> bool:
        """Tell whether a gradient waits in the engine's buffer: of another node, or the first of two for one place."""
        node: Any = current_node()
        if node is None:
            return False
        number, first = self._last_node
        storage = self._storages.get(gradient)
        born = 0 if storage is None else storage.birth
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        return sequence_number(node) != number or born < first or len(set(edges)) < len(edges)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace in ("prim", "profiler") or self._opaque:
            return func(*args, **kwargs)
        if any(type(arg) not in _PLAIN and is_wrapper(arg) for arg in args):
            return NotImplemented  # let the subclass unwrap: its parts are counted
        if self._fake and any(map(_is_real, (*args, *kwargs.values()))):
            args, kwargs = pytree.tree_map_only(Tensor, self._twin, (args, kwargs))
        self._numbers.settle()
        if self.phase == "backward" and self._runs_other_formula():
            out = func(*args, **kwargs)
            for tensor in leaves(out):  # the last of them is the gradient, in place of the recorded one
                self._storages.see(tensor, label="gradient")
            return out
        if func.is_view:  # no bytes and no kernel; its backward still needs to know where it was called
            self._place(str(func))
            return func(*args, **kwargs)
        tensors, arguments = flatten(args, kwargs)
        inputs = tuple(map(self._value, tensors))
        with self.meter.op(_kind(func, inputs, arguments)):
            out = func(*args, **kwargs)
        marks = (has_own_generator(args, kwargs), draws(func, args, kwargs), trains(func, args, kwargs))
        self._finish(str(func), inputs, leaves(out), arguments, *marks)
        self._numbers.note(args, out)
        if func in PRODUCTS and not self._fake and bool((args[0] == 0).any()):
            self._with_zeros.add(next_sequence_number() - 1)
        if self._calls is not None and (key := signature(str(func), inputs, arguments)) not in self._calls:
            self._calls[key] = Call.of(func, args, kwargs)
        return out

    def run_opaque(self, name: str, inputs: list[Any], call: Callable[[], Any]) -> Any:
        """Run a compiled region as one op, whose inside is measured and not listed.

        The region may empty ``inputs``, which frees them while it runs.
        """
        if self._opaque:
            return call()
        values = tuple(self._value(part) for t in inputs if isinstance(t, Tensor) for part in parts(t))
        self._opaque += 1
        try:
            with self.meter.op():
                out = call()
        finally:
            self._opaque -= 1
        self._finish(name, values, leaves(out), "")
        return out

    def _finish(
        self,
        name: str,
        inputs: tuple[TensorView, ...],
        results: list[Tensor],
        arguments: str,
        own_generator: bool = False,
        is_random: bool = False,
        is_training: bool = False,
    ) -> None:
        place, recompute = self._place(name)
        if self.phase == "forward":
            own_generator |= self._host_draws.enter(place.module)
        known, index = len(self._record.storages), len(self._record.ops)
        outputs = tuple(self._value(tensor, place) for tensor in results)
        called = (place.op, self.phase, place.module, place.source)
        measured = (math.nan, 0)  # until the step has run
        marks = (own_generator, is_random, is_training)
        self._record.ops.append(Op(index, *called, inputs, outputs, arguments, recompute, *measured, *marks))
        if recompute:
            for storage in self._record.storages[known:]:
                storage.recomputed = True

    def _place(self, name: str) -> tuple[CallSite, bool]:
        """Return the call site of an op (in backward: of its forward op), and whether it is recomputed.

        In the backward pass only recomputation builds a graph.
        """
        node = self._node if self._node is not None else current_node()
        if node is not None and sequence_number(node) != self._last_node[0]:
            self._last_node = (sequence_number(node), len(self._record.ops))
            self._numbers.run(sequence_number(node))
        builds_graph = torch.is_grad_enabled()
        if self.phase == "backward" and not (builds_graph and node is not None):
            forward = self._record.places.get(sequence_number(node)) if node is not None else None
            if forward is not None:
                return CallSite(name, forward.module, forward.source), False
            variable = getattr(node, "variable", None)
            owner = self._storages.get(variable) if isinstance(variable, Tensor) else None
            return CallSite(name, "" if owner is None else owner.module, ""), False
        place = CallSite(name, self.modules[-1] if self.modules else "", source_line())
        if builds_graph:
            self._record.places.setdefault(next_sequence_number() - 1, place)
        return place, self.phase == "backward"

    def _twin(self, tensor: Tensor) -> Tensor:
        """A fake tensor in the place of a real one."""
        if not self._fake or not _is_real(tensor):
            return tensor
        if tensor not in self._twins:
            self._twins[tensor] = current_fake_mode().from_tensor(tensor)
        return self._twins[tensor]

    def _pack(self, tensor: Tensor) -> Any:
        for part in parts(self._twin(tensor)):
            index = self._storages.see(part)
            storage = self._record.storages[index]
            if storage.category == "temporary" and self.phase == "forward":
                storage.category = "activation"
            size, sequence = part.numel() * part.element_size(), next_sequence_number() - 1
            save = LiveSave(index, tuple(part.shape), dtype_name(part), size, sequence, source_line())
            self._record.saves.append(save)
        # An op's own output, packed unchanged, would form a cycle with its node.
        return self._outer_hooks[0](tensor) if self._outer_hooks else Packed(tensor.detach())

    @contextmanager
    def without_hooks(self) -> Generator[None]:
        """Take the saved-tensor hooks off, where they are the ones on top."""
        top = top_saved_hooks(True)
        if top is None or top[0] != self._pack:
            yield
            return
        pop_saved_hooks()
        try:
            yield
        finally:
            push_saved_hooks(*top)

    def _unpack(self, packed: Any) -> Any:
        return self._outer_hooks[1](packed) if self._outer_hooks else packed.tensor

    def _value(self, tensor: Tensor, place: CallSite | None = None) -> TensorView:
        storage = self._storages.see(tensor, place=place)
        return TensorView(storage, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor))

    # -- what comes out -------------------------------------------------------------------------------

    def graph(self, modules: dict[str, str], *, device: str, notes: tuple[str, ...] = ()) -> Graph:
        """Freeze the step as a graph. Storages are no longer followed."""
        self.survivors = self._storages.stop(constants=self._fake)
        return self._record.graph(self.meter, modules, device=device, fake=self._fake, notes=notes)


def _is_real(value: Any) -> bool:
    """Tell whether a value is, or contains, a tensor with data."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_real, value))
    return type(value) is Tensor or type(value) is nn.Parameter


def _kind(func: Any, inputs: tuple[TensorView, ...], arguments: str) -> Hashable:
    """Key that determines an op's workspace; None if values determine it, as with a mask."""
    if torch.Tag.dynamic_output_shape in func.tags or any(value.dtype == "bool" for value in inputs):
        return None
    return func, arguments, *((value.shape, value.stride, value.dtype) for value in inputs)
