"""Copies of values in the host's memory: one block for each forward pass, and a stream of copies each way.

On a GPU the block is pinned. A copy to the host starts behind the ops so far and runs beside those that follow. Its
source stays alive until ``release``, where the ops' stream waits for the copy. A fetch allocates its tensor on the
ops' stream, and ops wait for it at ``arrived``. Until then the pool holds the tensor too: if backward is interrupted,
no other tensor gets memory that a copy still writes to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.planning.programs.program import Kind, Program

_ALIGNED = 512


class HostPool:
    """Blocks of host memory for one program. A block belongs to one forward pass until all its copies are freed."""

    def __init__(self, places: dict[str, int], block_bytes: int) -> None:
        self.places, self.block_bytes = places, block_bytes  # by value: where its copy starts
        self.idle: list[Tensor] = []
        self.fetching: dict[int, Fetched] = {}  # that no op has waited for, by id
        self.streams: _Streams | None = None

    @classmethod
    def of(cls, program: Program) -> HostPool | None:
        """The pool of a program; None if it copies nothing."""
        places: dict[str, int] = {}
        end = 0
        for each in program.forward:
            if each.kind is Kind.OFFLOAD:
                places[each.value.name] = end
                end += -(-program.bytes[each.value] // _ALIGNED) * _ALIGNED
        return cls(places, end) if places else None

    def leased(self, forward: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A forward pass that gets a block of its own as its first argument."""

        def run(args: list[Any]) -> Any:
            args.insert(0, Lease(self))
            return forward(args)

        return run

    def drop_fetches(self) -> None:
        """Have the ops' stream wait for fetches of interrupted passes, and free their tensors."""
        for fetched in list(self.fetching.values()):
            fetched.wait()


class Lease:
    """A block of a pool for one forward pass, and for the backward pass that follows."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        pool.drop_fetches()
        self.block: Tensor | None = None

    def host_tensor(self, value: Tensor, name: str) -> Tensor:
        """The place of a value's copy, laid out as the value."""
        if self.block is None:
            self.block = self._take(value.device)
        first = self.pool.places[name]
        flat = self.block[first : first + value.numel() * value.element_size()].view(value.dtype)
        return flat.as_strided(value.shape, value.stride())

    def _take(self, device: torch.device) -> Tensor:
        pool = self.pool
        if pool.streams is None and device.type == "cuda":
            pool.streams = _Streams(device)
        if pool.idle:
            block = pool.idle.pop()
        else:
            block = torch.empty(pool.block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        if pool.streams is not None:  # the block's last fetches have read it
            pool.streams.out.wait_stream(pool.streams.back)
        weakref.finalize(self, pool.idle.append, block).atexit = False
        return block


class _Streams:
    """Streams of copies to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)


class OnHost:
    """A value's copy on the host. It holds its source until that is released."""

    def __init__(self, lease: Lease, source: Tensor, name: str) -> None:
        self.lease, self.source = lease, source
        self.tensor = lease.host_tensor(source, name)
        self.device = source.device
        streams = lease.pool.streams
        if streams is None:
            self.tensor.copy_(source)
            self.done = None
            return
        streams.out.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(streams.out):
            self.tensor.copy_(source, non_blocking=True)
            self.done = streams.out.record_event()


class Fetched:
    """A value on its way back to the device."""

    def __init__(self, copy: OnHost) -> None:
        self.pool = copy.lease.pool
        self.tensor = torch.empty_strided(
            copy.tensor.shape, copy.tensor.stride(), dtype=copy.tensor.dtype, device=copy.device
        )
        self.done: Any = None  # the copy's event
        streams = self.pool.streams
        if streams is None or copy.done is None:
            self.tensor.copy_(copy.tensor)
            return
        self.stream = torch.cuda.current_stream(copy.device)
        streams.back.wait_stream(self.stream)  # whose ops may still use the tensor's memory
        streams.back.wait_event(copy.done)
        self.pool.fetching[id(self)] = self  # before the copy starts: an interrupt may follow
        with torch.cuda.stream(streams.back):
            self.tensor.copy_(copy.tensor, non_blocking=True)
            self.done = streams.back.record_event()

    def wait(self) -> None:
        """Have the ops' stream wait for the copy."""
        if self.pool.fetching.get(id(self)) is self:
            if self.done is None:  # interrupted while it started
                assert self.pool.streams is not None
                self.stream.wait_stream(self.pool.streams.back)
            else:
                self.stream.wait_event(self.done)
            del self.pool.fetching[id(self)]


def offload(lease: Lease, value: Tensor, name: str) -> OnHost:
    """Start a copy to the host."""
    return OnHost(lease, value, name)


def release(copy: OnHost) -> None:
    """Free the source of a copy to the host, behind the copy."""
    if copy.done is not None:
        torch.cuda.current_stream(copy.device).wait_event(copy.done)
    del copy.source


def fetch(copy: OnHost) -> Fetched:
    """Start a copy back to the device."""
    return Fetched(copy)


def arrived(fetched: Fetched) -> Tensor:
    """The fetched value, for ops that follow."""
    fetched.wait()
    return fetched.tensor
