"""The allocated peak of a plain step on the CPU, counted from torch.profiler's events: nothing of lowtide is used."""

import contextlib

import torch
from torch.utils import _pytree as pytree


def plain_step(model, loss, batch, optimizer, autocast=None):
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
        value = loss(model, batch)
    value.backward()
    if optimizer is not None:
        optimizer.step()
    return value


def allocated_peak(model, loss, batch, optimizer, autocast=None):
    """Bytes alive before the step, and the most that its allocation events add to them."""
    plain_step(model, loss, batch, optimizer, autocast)  # optimizer state and library caches exist from here on
    model.zero_grad(set_to_none=True)
    held = {}
    for tensor in _alive(model, batch, optimizer):
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        plain_step(model, loss, batch, optimizer, autocast)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return sum(held.values()) + peak


def _alive(model, batch, optimizer):
    yield from model.parameters()
    yield from model.buffers()
    yield from (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    if optimizer is not None:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
