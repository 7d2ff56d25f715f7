"""Compressed activations as a technique: modules whose saved tensors are stored in few bits, and what that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.compat.dynamo import disable_dynamo
from lowtide.errors import LowtideError
from lowtide.kernels.compress import BITS, DTYPES, GROUP, buffer_bytes, check
from lowtide.kernels.reference.compress import groups_at_once
from lowtide.nn.compress import LEAST_BYTES, compressed, exponentiates, is_sensitive
from lowtide.profiling.devices import find_device
from lowtide.profiling.profile import Profile
from lowtide.techniques.block_chains import BlockChains
from lowtide.techniques.compress.allocation import KEPT, LayerCosts, allocate_bits
from lowtide.techniques.replaced_forward import Forward, apply_at_sites, replace_forward
from lowtide.techniques.technique import Check, Config, Fidelity, Interval, Kind, Option, Price
from lowtide.tracing.graph import Op, kernel_of
from lowtide.undo import Applied, Undo
from lowtide.workload import Workload


@dataclass(frozen=True)
class CompressConfig(Config):
    """Bits for each site, and how many values share a scale."""

    bits: tuple[int, ...]
    group: int = GROUP

    def __post_init__(self) -> None:
        if not isinstance(self.bits, tuple) or not all(bits in BITS and type(bits) is int for bits in self.bits):
            self.refuse("bits", f"is not one of {', '.join(map(str, BITS))} for each site")
        try:
            check(BITS[0], self.group)
        except LowtideError as error:
            self.refuse("group", str(error))

    def check_site(self, site: tuple[str, ...]) -> None:
        """Bits for every module."""
        if len(site) != len(self.bits):
            self.refuse("bits", f"is not one number for each of {len(site)} sites")

    def __str__(self) -> str:
        bits = " and ".join(str(bits) for bits in reversed(BITS) if bits in self.bits)
        return f"bits {bits}" + ("" if self.group == GROUP else f", group {self.group}")


class Compress:
    """Activations in 8, 4 or 2 bits, by modules."""

    name = "compress"
    kind: Kind = "hold"
    config: type[Config] = CompressConfig
    needs = "a module that saves activations of 1 KiB or more"
    conflicts: Mapping[str, str] = {
        **dict.fromkeys(
            ("sqrt", "optimal"),
            "a recomputed segment starts from its exact input, and keeps nothing that could be compressed",
        ),
        "batchnorm": "a converted batch norm makes its input again from its output, which has to be exact",
    }

    def options(self, profile: Profile) -> list[Option]:
        """All modules in 8, in 4 and in 2 bits, and two mixtures between."""
        layers = self.layers(profile)
        if not layers:
            return []
        totals = {bits: sum(layer.bytes(bits) for layer in layers) for bits in BITS}
        options = [self._option(layers, [8] * len(layers))]
        for more, fewer in ((8, 4), (4, 2)):
            mixed = allocate_bits(layers, (totals[more] + totals[fewer]) // 2, choices=(fewer, more))
            options += [self._option(layers, mixed), self._option(layers, [fewer] * len(layers))]
        return list(dict.fromkeys(options))

    def layers(self, profile: Profile) -> list[LayerCosts]:
        """The modules that save something to compress, and its bytes; all values are taken to matter the same."""
        return [LayerCosts.of(path, parts) for path, parts in _SavesBySite(profile).parts.items()]

    def option(self, layers: Sequence[LayerCosts], budget_bytes: int) -> Option:
        """The best bits for layers, measured or not, under a budget; a layer that is kept is no site."""
        bits = list(allocate_bits(layers, budget_bytes))
        for i, layer in enumerate(layers):
            if i and not layer.kept_bytes:  # it saves what the one before it has saved, and does as that one does
                bits[i] = bits[i - 1]
        sites = [i for i in range(len(layers)) if bits[i] != KEPT]
        return self._option([layers[i] for i in sites], [bits[i] for i in sites])

    def price(self, option: Option, profile: Profile) -> Price:
        """Compressed values live from their save to their last use; the originals are freed in between."""
        saves, config = _SavesBySite(profile), option.config_as(CompressConfig)
        bits_of, group = dict(zip(option.site, config.bits, strict=True)), config.group
        device = find_device(profile.graph.device)
        added: list[Interval] = []
        removed: list[Interval] = []
        seconds = 0.0
        for storage, saved in saves.storages.items():
            bits = bits_of.get(saved.site)
            if bits is None:
                continue
            whole = profile.graph.storages[storage]
            stored = buffer_bytes(saved.numel, bits, group, saved.dtype)
            added.append(Interval(stored, saved.first_save, whole.death, f"{bits} bits in {saved.site}"))
            if profile.graph.device == "cpu":  # no kernel does it at once
                working = _TEMPORARY_BYTES * groups_at_once(saved.numel, group) * group
                why = f"temporaries while {saved.site} is compressed"
                added.append(Interval(working, saved.first_save, saved.first_save + 1, why))
            if saved.sites <= bits_of.keys() and saved.last_use + 1 < saved.first_need:
                why = f"in {bits} bits in {saved.site}"
                removed.append(Interval(whole.bytes, saved.last_use + 1, saved.first_need, why))
            moved = (saved.numel * saved.dtype.itemsize + stored) * (1 + saved.saves)
            passes = _PASSES_ON_A_CPU if profile.graph.device == "cpu" else 1
            seconds += (1 + saved.saves) * device.launch_seconds + passes * moved / device.bandwidth
        return Price(Fidelity.APPROXIMATE, tuple(added), tuple(removed), compute_seconds=seconds)

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Put the hooks around every site's forward; the model is untouched if one cannot take them."""

        def compress(module: nn.Module, path: str, option: Option) -> Undo:
            config = option.config_as(CompressConfig)
            return replace_forward(
                CompressedForward(module, config.bits[option.site.index(path)], config.group), path=path
            )

        return apply_at_sites(work, options, compress)

    def check(self, option: Option) -> Check:
        """Each stored value is within (max - min) / (2^bits - 2) of the original; gradients follow."""
        fewest = min(option.config_as(CompressConfig).bits, default=max(BITS))
        return Check(Fidelity.APPROXIMATE, rtol=_RTOL / ((1 << fewest) - 2), atol=_ATOL / ((1 << fewest) - 2))

    def _option(self, layers: Sequence[LayerCosts], bits: Sequence[int]) -> Option:
        return Option(self.name, tuple(layer.path for layer in layers), CompressConfig(tuple(bits)))


class CompressedForward(Forward):
    """A forward whose saved activations are stored in few bits."""

    def __init__(self, module: nn.Module, bits: int, group: int = GROUP) -> None:
        super().__init__(module)
        self.bits, self.group = bits, group

    @disable_dynamo  # hooks cannot be compiled: a compiled model runs these parts eagerly
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with compressed(self.bits, group=self.group):
            return self.plain(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Compressed({self.bits} bits)"


# The step of rounding is 1 / (2^bits - 2) of a group's range. Times this number it bounds the error of every gradient's
# norm. The largest errors measured at initialisation were 6.7 (LeNet), 4.0 (WRN-28-2) and 3.0 (GPT-2).
_RTOL = 12.0
_ATOL = 2.5  # for a gradient that is 0 but for rounding, as of a bias before a batch norm: 1.1 at most in 60 draws
_PASSES_ON_A_CPU = 25  # ATen's ops one after the other, where a kernel would read and write once
_TEMPORARY_BYTES = 16  # of each value that they work on at a time


# -- what a traced step saves ----------------------------------------------------------------------------


@dataclass(slots=True)
class _SavedStorage:
    """A storage of which something is compressed, and when it is used."""

    site: str  # that saves it first, and decides its bits
    dtype: torch.dtype
    numel: int
    first_save: int
    last_use: int  # in the forward pass
    first_need: int  # in the backward pass
    sites: set[str] = field(default_factory=set[str])  # of all saves, "" for an uncompressed one
    saves: int = 0


class _SavesBySite:
    """The storages that ``nn.compressed`` would compress around each site of a profiled step.

    A site is a block of a chain, or a module outside of all chains.
    """

    def __init__(self, profile: Profile) -> None:
        self.graph = graph = profile.graph
        self._blocks = {block.path for block in BlockChains.of(profile).blocks}
        self._inside = {path for path, _ in graph.modules for block in self._blocks if block.startswith(f"{path}.")}
        self._reads: dict[tuple[str, str, int], int] = {}  # op, module, storage -> index of the first such op
        self._differentiable = {s.id for s in graph.storages if s.category == "parameter"}
        for op in graph.ops:
            self._visit(op)
        self.storages: dict[int, _SavedStorage] = {}
        self.parts: dict[str, list[tuple[int, torch.dtype]]] = {}  # by site: values that are stored, and their dtype
        self._collect()

    def _visit(self, op: Op) -> None:
        if op.phase != "forward":
            return
        for value in (*op.inputs, *op.outputs):
            self._reads.setdefault((op.name, op.module, value.storage), op.index)
        if op.kernel not in _WITHOUT_GRADIENT and self._differentiable.intersection(v.storage for v in op.inputs):
            cast = op.kernel in _CASTS and self.graph.storages[op.inputs[0].storage].category == "parameter"
            if not cast:
                outputs = op.outputs[:1] if op.kernel in _FIRST_ALONE else op.outputs
                self._differentiable.update(value.storage for value in outputs if value.dtype in _DTYPES)

    def _collect(self) -> None:
        on_device = {storage.id for storage in self.graph.on_device}
        covered: dict[int, int] = {}
        for saved in self.graph.saved:
            if saved.category != "activation" or saved.storage not in on_device:
                continue
            whole = self.graph.storages[saved.storage]
            at = self._reads.get((saved.needed_by, saved.needed_in, saved.storage), whole.birth)
            can = (
                saved.dtype in _DTYPES
                and saved.bytes >= LEAST_BYTES
                and saved.storage in self._differentiable
                and not is_sensitive(kernel_of(saved.made_by))
                and not exponentiates(kernel_of(saved.needed_by))
                and saved.storage in self.graph.first_backward_use
            )
            site = self._site(saved.needed_in) if can else ""
            known = self.storages.get(saved.storage)
            if known is None:
                dtype = getattr(torch, saved.dtype)
                last = self.graph.last_forward_use.get(saved.storage, whole.birth)
                need = self.graph.first_backward_use.get(saved.storage, whole.death)
                known = self.storages[saved.storage] = _SavedStorage(site, dtype, 0, at, last, need)
            known.sites.add(site)
            if not site:
                continue
            # Views of parts are stored one by one, and together are no more than the whole.
            before = covered.get(saved.storage, 0)
            after = min(before + min(saved.bytes, whole.bytes), whole.bytes)
            covered[saved.storage] = after
            known.site = known.site or site
            known.saves += 1
            self.parts.setdefault(site, [])
            known.numel = after // known.dtype.itemsize
            if after > before:
                part = (after - before) // known.dtype.itemsize, known.dtype
                self.parts.setdefault(known.site, []).append(part)

    def _site(self, path: str) -> str:
        """The block that a module is in; itself where it is in none; "" where blocks are in it."""
        outer = path
        while outer:
            if outer in self._blocks:
                return outer
            outer = outer.rpartition(".")[0]
        return "" if path in self._inside else path


_DTYPES = frozenset(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_CASTS = frozenset({"aten._to_copy", "aten.clone"})
_WITHOUT_GRADIENT = frozenset(f"aten.{op}" for op in (
    "bernoulli", "empty_like", "full_like", "new_empty", "new_full", "new_zeros", "ones_like", "rand_like",
    "randn_like", "zeros_like", "detach",
))  # fmt: skip
# Only the first result of these has a gradient; the others are statistics, masks and log-sums.
_FIRST_ALONE = frozenset(f"aten.{op}" for op in (
    "_native_batch_norm_legit", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "cudnn_batch_norm",
    "max_pool2d_with_indices", "native_batch_norm", "native_dropout", "native_group_norm", "native_layer_norm",
))  # fmt: skip
