"""Copies of values to the host and back, beside the ops: their seconds, and how long ops wait for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lowtide.planning.programs.program import Cost, Instruction, Kind, Program, Value
from lowtide.profiling.devices import Device

_SHARE = 0.5  # of this machine's memory: what a plan may hold there


@dataclass(frozen=True)
class HostLink:
    """The way between a device and its host: one stream of copies each way, and the memory behind it."""

    bandwidth: float  # bytes per second, each way
    latency: float  # seconds of a copy of no bytes
    budget_bytes: int  # of the host

    @classmethod
    def of(cls, device: Device) -> HostLink:
        """The link of a device. A step may use half of the host's memory."""
        return cls(device.host_bandwidth, 2 * device.launch_seconds, host_bytes())

    def seconds(self, size: int) -> float:
        """Seconds of a copy that nothing delays."""
        return self.latency + size / self.bandwidth


@cache
def host_bytes() -> int:
    """Bytes of this machine's memory that one step may use for copies."""
    return int(_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class CopyClock:
    """Time of ops that run beside two streams of copies. Each stream makes its copies in the order of the calls."""

    def __init__(self, link: HostLink) -> None:
        self.link = link
        self.now = 0.0
        self.stalled = 0.0
        self._free = {Kind.OFFLOAD: 0.0, Kind.FETCH: 0.0}  # by stream: when it has made its copies
        self._ends: dict[tuple[Kind, Value | int], float] = {}

    def run(self, seconds: float) -> None:
        """Run an op."""
        self.now += seconds

    def copy(self, way: Kind, key: Value | int, size: int) -> None:
        """Start a copy behind all ops and copies so far."""
        self._free[way] = max(self.now, self._free[way]) + self.link.seconds(size)
        self._ends[way, key] = self._free[way]

    def ends(self, way: Kind, key: Value | int) -> float:
        """When a copy is done that was not waited for; else now."""
        return self._ends.get((way, key), self.now)

    def wait(self, way: Kind, key: Value | int) -> float:
        """Wait for a copy. Returns the seconds that this takes."""
        stall = max(0.0, self._ends.pop((way, key), self.now) - self.now)
        self.now += stall
        self.stalled += stall
        return stall


def stalls(program: Program, cost: Callable[[Instruction], Cost], link: HostLink) -> list[float]:
    """Seconds that each instruction waits for copies.

    Freeing an offloaded value waits for its copy to the host, and the first read of a fetched one for its copy back.
    """
    clock, waited = CopyClock(link), list[float]()
    for each in (*program.forward, *program.backward):
        stall = 0.0
        if each.kind in (Kind.OFFLOAD, Kind.FETCH):
            clock.copy(each.kind, each.reads[0] if each.kind is Kind.OFFLOAD else each.value, program.bytes[each.value])
        elif each.kind is Kind.FREE:
            stall = clock.wait(Kind.OFFLOAD, each.value)
        else:
            stall = sum([clock.wait(Kind.FETCH, value) for value in each.reads])
            clock.run(cost(each).seconds)
        waited.append(stall)
    return waited
