"""Count bytes that a step allocates on the CPU, from torch.profiler's events and without lowtide."""

import contextlib
import itertools

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
    _, levels = _levels(lambda: plain_step(model, loss, batch, optimizer, autocast))
    return sum(held.values()) + max(levels)


def allocated_peak_after_others(model, loss, batch, optimizer):
    """The same of the third of three steps: what the second leaves, and the third lets go, is then seen to go."""
    held = {}

    def steps():
        for _ in range(2):
            plain_step(model, loss, batch, optimizer)
            model.zero_grad(set_to_none=True)
        there = (tensor.untyped_storage() for tensor in (*_alive(model, batch, optimizer), *_kept(model)))
        held.update((storage.data_ptr(), storage.nbytes()) for storage in there)
        with torch.profiler.record_function("third step"):
            plain_step(model, loss, batch, optimizer)

    _, levels = _levels(steps, since="third step")
    return sum(held.values()) + max(levels) - levels[0]


def _kept(model):
    """List tensors that modules keep beside parameters and buffers."""
    leaves = [leaf for module in model.modules() for leaf in pytree.tree_leaves(vars(module))]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def kept_bytes(model, loss, batch):
    """Bytes that the forward pass leaves allocated, the loss among them."""
    loss(model, batch).backward()
    value, levels = _levels(lambda: loss(model, batch))
    assert value.requires_grad
    return levels[-1]


def _levels(run, since=None):
    """A function's result, and the bytes above those at its start: at its start and after each allocation.

    ``since`` names another event to start from.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        out = run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = [event.nbytes() if event.name() == "[memory]" else 0 for event in events]
    first = next((place for place, event in enumerate(events) if event.name() == since), 0)
    return out, [0, *itertools.accumulate(sizes)][first:]


def _alive(model, batch, optimizer):
    yield from model.parameters()
    yield from model.buffers()
    yield from (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    if optimizer is not None:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
