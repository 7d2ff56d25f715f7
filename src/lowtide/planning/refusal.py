"""The error for a budget that no plan fits: the smallest plan, who holds its bytes, and what would help."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from lowtide.batches import tensors
from lowtide.errors import BudgetError
from lowtide.planning.candidate import Contender, Permission
from lowtide.planning.search import Search, named
from lowtide.sizes import format_size
from lowtide.techniques.technique import Fidelity
from lowtide.tracing.graph import Category

_STAYING: dict[Category, str] = {
    "parameter": "parameters",
    "optimizer state": "optimizer state",
    "buffer": "buffers",
    "input": "the batch",
}
_REASONS = 2  # reasons that the error gives for techniques that do not help
_SHARE = 200  # of what a step allocates: about one part of so many is lost in large blocks
_UNSPLIT = 2**20  # bytes of a block that a GPU's allocator does not split off


def no_plan(search: Search, wanted: int, permitted: Permission, reserved: int = 0) -> BudgetError:
    """Three lines: a budget that works; the share that every plan holds; what to allow, or how small a batch.

    "At most" says that a smaller plan may exist, since nothing was captured or options were not traced. ``reserved``
    bytes are what a plan measured above its prediction.
    """
    least = search.least(permitted)
    bound = "" if search.is_complete else "at most "
    smallest_bytes = least.peak_bytes + max(reserved, _slack(search, least))
    smallest = f"{bound}{format_size(smallest_bytes)}, {smallest_bytes} bytes"
    reason = f"{format_size(wanted)} is below the smallest plan ({smallest})."
    advice = _advice(search, least, wanted, permitted)
    lines = filter(None, (reason, _composition(search, least), advice))
    return BudgetError("\n".join(lines), smallest_bytes=smallest_bytes)


def _slack(search: Search, least: Contender) -> int:
    """Bytes by which a plan on a GPU may measure above its prediction: of blocks larger than what was asked for.

    With these bytes the plain step must not fit.
    """
    plain = search.baseline
    if plain.graph.tensor_device == "cpu" or least.candidate.change is None:
        return 0
    slack = 2 * _UNSPLIT + (least.peak_bytes - plain.static_bytes) // _SHARE
    return max(0, min(slack, plain.peak_bytes - 1 - least.peak_bytes))


def _composition(search: Search, least: Contender) -> str:
    """Bytes that no recomputation frees, by holder: an estimate, and no more than the smallest plan has."""
    graph, whole = search.baseline.graph, min(search.floor_bytes, least.peak_bytes)
    held: Counter[Category] = Counter()
    for storage in graph.on_device:
        if storage.category in _STAYING:
            held[storage.category] += storage.bytes
    parts = [f"{words} {format_size(held[category])}" for category, words in _STAYING.items() if held[category]]
    rest = whole - held.total()
    parts += [f"gradients and the optimizer's step {format_size(rest)}"] if rest > 0 else []
    return f"Every plan holds {format_size(whole)} unless more is allowed: {', '.join(parts)}."


def _advice(search: Search, least: Contender, wanted: int, permitted: Permission) -> str:
    advice: list[str] = []
    if least.candidate.change is None and search.idle and search.is_complete:
        advice.append(f"Nothing lowers the plain step's peak here: {'; '.join(islice(search.idle, _REASONS))}.")
    everything = search.least(Permission(Fidelity.CHANGED, forbidden=permitted.forbidden), traced=1)
    if everything.peak_bytes < least.peak_bytes:
        advice.append(f"Allow {named(everything.candidate)} to reach {format_size(everything.peak_bytes)}.")
    samples = _samples_that_fit(search, least, wanted)
    if samples:
        advice.append(f"A batch of {samples} sample{'s' * (samples > 1)} may fit.")
    return " ".join([*advice, *islice(search.notes, _REASONS)])


def _samples_that_fit(search: Search, least: Contender, wanted: int) -> int:
    """Samples that fit if everything but parameters and gradients grows with the batch; 0 if none would."""
    sizes = {tensor.shape[0] for tensor in tensors(search.work.batch) if tensor.dim()}
    if len(sizes) != 1 or wanted <= search.floor_bytes:
        return 0
    return int(sizes.pop() * (wanted - search.floor_bytes) / max(least.peak_bytes - search.floor_bytes, 1))
