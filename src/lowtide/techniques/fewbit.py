"""Few-bit backward (Novikov et al., 2022): activations keep a code of a few bits per element instead of their input.

The forward pass is torch's, bit for bit. ReLU and others that are straight on both sides of their bends need one bit,
and their gradients are torch's too. They are an option of their own, which every plan may use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.errors import LowtideError, PlanError
from lowtide.kernels.activations import FEW_BIT, POINTWISE, Activation, is_in_place, read_module
from lowtide.kernels.reference.fewbit import packed_bytes
from lowtide.nn.fewbit import book_for, few_bit
from lowtide.nn.fewbit_tables import Density, Normal, table_of
from lowtide.profiling.devices import find_device
from lowtide.profiling.profile import Profile
from lowtide.techniques.replaced_forward import Forward, apply_at_sites, replace_forward
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Kind, Option, Price, Technique
from lowtide.tracing.graph import Graph, Op
from lowtide.undo import Applied, Undo
from lowtide.workload import Workload

BITS = (8, 4, 3, 2, 1)


def keep_few_bits(model: nn.Module, bits: int = 3, *, density: str | Density | Mapping[str, Tensor] = "normal") -> Undo:
    """Have every activation of ``torch.nn`` in a model keep a few bits per element, until the undo is called.

    ``density`` is one for all, or inputs for some by their paths, as ``measure_inputs`` finds them. Activations called
    as functions (``F.gelu``) are out of reach.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> with keep_few_bits(model, bits=4):
    ...     loss = model(torch.randn(2, 8)).sum()
    """
    if not _activations(model):
        raise LowtideError(
            "The model has no activation of torch.nn", hint="Activations called as functions do not count."
        )
    with Undo() as undo:
        for path, module in _activations(model).items():
            mine = density.get(path, "normal") if isinstance(density, Mapping) else density
            undo.add(_put(module, bits, path, mine))
        return undo.keep()


def measure_inputs(model: nn.Module, run: Callable[[], object], *, limit: int = 2**16) -> dict[str, Tensor]:
    """Some inputs of every activation while ``run()`` runs, by path: at most ``limit`` of each call's.

    They are every so-many-th element of a call's input, as float32 on the CPU.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> {path: len(seen) for path, seen in measure_inputs(model, lambda: model(torch.randn(2, 8))).items()}
    {'1': 64}
    """
    seen: dict[str, list[Tensor]] = {}

    def note(path: str, _: nn.Module, inputs: tuple[Any, ...], by_name: dict[str, Any]) -> None:
        flat = (inputs[0] if inputs else by_name["input"]).detach().flatten()
        some = flat[:: max(1, -(-flat.numel() // limit))]
        seen.setdefault(path, []).append(some.to("cpu", torch.float32, copy=True))

    handles = [
        module.register_forward_pre_hook(partial(note, path), with_kwargs=True)
        for path, module in _activations(model).items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {path: torch.cat(parts) for path, parts in seen.items()}


@dataclass(frozen=True)
class FewBitConfig(Config):
    """``bits`` per element, 0 where every site is exact with one; ``bound`` limits the relative error of a gradient."""

    bits: int
    bound: float | None = None

    def __post_init__(self) -> None:
        self.require_one_of("bits", (0, *BITS))
        if self.bound is not None:
            self.require("bound", float, least=0)


class FewBitActivations(Technique):
    """Codes in place of saved inputs, for the activations whose input or output nobody else keeps."""

    name = "fewbit"
    kind: Kind = "module"
    config: type[Config] = FewBitConfig
    needs = "an activation module (nn.GELU, nn.ReLU) that alone keeps what it saves; F.gelu(...) calls are out of reach"

    def options(self, profile: Profile) -> list[Option]:
        """The exact ones with one bit; then all of them, with 8 bits to 1 for the curves."""
        sites = _sites(profile.graph)
        gates = tuple(path for path, saved in sites.items() if saved.is_gate)
        options = [Option(self.name, gates, FewBitConfig(0))] if gates else []
        curves = {saved.kind for saved in sites.values() if not saved.is_gate}
        for bits in BITS if curves else ():
            layers = sum(not saved.is_gate for saved in sites.values())
            bound = gradient_bound(max(relative_error(_CLASSES[kind], bits) for kind in curves), layers)
            options.append(Option(self.name, tuple(sites), FewBitConfig(bits, round(bound, 4))))
        return options

    def price(self, option: Option, profile: Profile) -> Price:
        """Saved inputs are freed after their last use in forward; codes live until the activation's backward."""
        graph, bits = profile.graph, option.config_as(FewBitConfig).bits
        sites, device = _sites(graph), find_device(graph.device)
        added: list[Interval] = []
        removed: list[Interval] = []
        seconds = 0.0
        for path in option.site:
            if path not in sites:
                continue
            if not sites[path].is_gate:
                table = 4 * (2 * 2**bits - 1)  # boundaries and levels
                added.append(Interval(table, 0, len(graph.ops), f"the table of {path}"))
            for kept in sites[path].inputs:
                size = packed_bytes(kept.count, 1 if sites[path].is_gate else bits)
                added.append(Interval(size, kept.forward, kept.backward + 1, f"codes of {path}"))
                removed.append(Interval(kept.bytes, kept.last_use + 1, kept.death, f"not kept for {path}"))
                if graph.tensor_device == "cpu":
                    added += _temporaries(kept, path)
                # The input is read once more and then not again; on a CPU the packing counts for more.
                moved = 2 * size / device.bandwidth + device.launch_seconds
                seconds += 4 * graph.ops[kept.forward].seconds if graph.tensor_device == "cpu" else moved
        fidelity = self.check(option).fidelity
        return Price(fidelity, added=tuple(added), removed=tuple(removed), compute_seconds=seconds)

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Give the activations another forward; the model is untouched if one of them is not what the plan says."""
        return apply_at_sites(
            work, options, lambda module, path, o: _put(module, o.config_as(FewBitConfig).bits or 1, path)
        )

    def check(self, option: Option) -> Check:
        """Exact with gates alone. Else the error of a gradient stays below the bound that the option states.

        With the tables' relative error e = √∫(f'−q)²w / √∫f'²w it is (1 + 3e)^√layers − 1: errors of layers multiply,
        and are nearly independent. It holds for inputs spread about as the density says.
        """
        config = option.config_as(FewBitConfig)
        if not config.bits:
            return Check.EXACT
        return Check(Fidelity.APPROXIMATE, rtol=1.0 if config.bound is None else config.bound, atol=1e-6)


_MARGIN = 3.0


def gradient_bound(error: float, layers: int) -> float:
    """Relative error of a gradient behind so many layers, each with this error."""
    return (1 + _MARGIN * error) ** math.sqrt(layers) - 1


class FewBitForward(Forward):
    """An activation's forward with a few bits kept."""

    def __init__(self, module: nn.Module, bits: int, density: Any = "normal") -> None:
        super().__init__(module)
        self.bits = bits
        self.density = density
        self._book = book_for(read_module(module), bits, density)

    def __call__(self, input: Tensor) -> Tensor:
        curve = read_module(self.module)
        if curve != self._book.activation:  # somebody changed a number of the module
            self._book = book_for(curve, self.bits, self.density)
        return few_bit(input, self._book, inplace=is_in_place(self.module))


def _temporaries(kept: _KeptInput, path: str) -> Iterator[Interval]:
    """Temporary bytes of the kernels in plain torch, which pass over a tensor in a few pieces."""
    piece = max(min(kept.count, 2**16), kept.count // 8)
    yield Interval(4 * piece, kept.forward, kept.forward + 1, f"packing the codes of {path}")
    yield Interval(10 * piece, kept.backward, kept.backward + 1, f"unpacking the codes of {path}")


def _put(module: nn.Module, bits: int, path: str, density: Any = "normal") -> Undo:
    if read_module(module) is None:
        raise PlanError(
            f"{type(module).__name__} is not an activation with few-bit codes",
            where=path,
            hint="The plan is of another model.",
        )
    return replace_forward(FewBitForward(module, bits, density), path=path, instead_of=type(module))


def _activations(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if read_module(module) is not None}


# -- what activations keep in a traced step --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _KeptInput:
    """A storage that an activation alone keeps, once for each call."""

    bytes: int
    count: int  # elements of the tensor that was saved
    forward: int  # the activation's op, and that of its backward
    backward: int
    last_use: int  # in the forward pass
    death: int


@dataclass(frozen=True, slots=True)
class _SavedByModule:
    kind: str  # the module's class
    inputs: tuple[_KeptInput, ...]

    @property
    def is_gate(self) -> bool:
        return _CLASSES[self.kind].is_gate


_CLASSES = {POINTWISE[name].module.__name__: Activation.pointwise(name) for name in FEW_BIT}


def _sites(graph: Graph) -> dict[str, _SavedByModule]:
    """Activations that would free something, in the order of the model's modules."""
    kinds = {path: kind for path, kind in graph.modules if kind in _CLASSES}
    touched: dict[tuple[str, int], list[Op]] = {}  # ops of each module that read or give a storage
    for op in graph.ops:
        for storage in {value.storage for value in (*op.inputs, *op.outputs)}:
            touched.setdefault((op.module, storage), []).append(op)
    on_device = {storage.id for storage in graph.on_device}
    inputs: dict[str, list[_KeptInput]] = {}
    seen: set[tuple[str, int]] = set()
    for saved in graph.saved:
        path = saved.needed_in
        known = path in kinds and saved.category == "activation" and saved.storage in on_device
        # Codes are bytes: an activation that keeps those does so already.
        if (
            not known
            or graph.savers[saved.storage] != {path}
            or saved.dtype == "uint8"
            or (path, saved.storage) in seen
        ):
            continue
        seen.add((path, saved.storage))
        mine = touched.get((path, saved.storage), [])
        forward = [op.index for op in mine if op.phase == "forward"]
        backward = [op.index for op in mine if op.phase == "backward"]
        storage = graph.storages[saved.storage]
        if forward and backward and len(forward) == len(backward):
            uses = graph.last_forward_use[saved.storage]
            kept = _KeptInput(storage.bytes, math.prod(saved.shape), forward[0], backward[-1], uses, storage.death)
            inputs.setdefault(path, []).append(kept)
    return {path: _SavedByModule(kinds[path], tuple(inputs[path])) for path in kinds if path in inputs}


@cache
def relative_error(curve: Activation, bits: int) -> float:
    """Distance of a table from f', relative to f' itself."""
    mean_square = float(Normal().integrals(curve)(np.array([np.inf]))[2, 0])
    return table_of(curve, bits).rmse / math.sqrt(mean_square)
