"""The bytes that parts of a chain need, beyond the part's input; and the schedule with the smallest peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.chains.chain import Chain
from lowtide.chains.schedule import Action, Schedule, Way, unroll
from lowtide.errors import LowtideError


class Variant(NamedTuple):
    """One way to keep a stage: all that its backward reads, or all except cheap results."""

    kind: Action
    saved: NDArray[np.int64]  # [s]: bytes that stage s saves
    keeping: NDArray[np.int64]  # [s, t]: bytes that stages s to t need, for forward and backward of s
    seconds: NDArray[np.float64]  # [s]: of recomputing cheap results


class Needs:
    """For every part of a chain, stages s to t with backward: the bytes that it needs to run in a given way.

    The part's own input is not counted: the caller holds it. While stages run forward, the gradient of value t + 1
    waits, and so do the bytes that the stages behind t left. Parts that reach the end of the chain run forward
    before there is a gradient.

        variants        ways to keep stage s, until s + 1 to t are done; the second one only where it saves bytes
        passed[s, j]    run forward from s to j once, keeping only the input of s; without ``waiting``
        waiting[t]      bytes that wait
        whole[s, t]     keep everything of all stages

    ``segment_ends[s]`` is one past the last stage of a segment that starts with stage s. It is s itself where
    everything of s must be kept. By default a segment may end anywhere.
    """

    def __init__(self, chain: Chain, segment_ends: Sequence[int] = ()) -> None:
        self.chain = chain
        self.segment_ends = tuple(segment_ends) or (chain.stages,) * chain.stages
        if len(self.segment_ends) != chain.stages or any(end < s for s, end in enumerate(self.segment_ends)):
            raise LowtideError(
                f"segment_ends of a chain of {chain.stages} stages has one for each, none before its stage: "
                f"{self.segment_ends}"
            )
        self.values, self.saved, light, forward, passing, backward, light_backward, left, gradient = (
            np.array(sizes, np.int64)
            for sizes in (
                chain.value_bytes,
                chain.saved_bytes,
                chain.light_bytes,
                chain.forward_temporary_bytes,
                chain.passing_temporary_bytes,
                chain.backward_temporary_bytes,
                chain.light_temporary_bytes,
                chain.left_bytes,
                chain.gradient_bytes,
            )
        )
        self.seconds = np.concatenate([[0.0], np.cumsum(chain.forward_seconds)])  # of all stages before one
        self.tails = np.array(chain.tail_seconds)
        behind = np.append(np.cumsum(left[::-1])[::-1], 0)  # bytes that a stage and those behind it leave
        self.waiting = waiting = np.append(gradient[1:-1], 0) + behind[1:]
        has_light = bool(((light < self.saved) | (light_backward < backward)).any())
        gradients = gradient[:-1] + gradient[1:] + behind[:-1]
        backward += gradients

        def keeping(saved: NDArray[np.int64], backward: NDArray[np.int64]) -> NDArray[np.int64]:
            forth = waiting[None, :] + forward[:, None]
            return np.triu(saved[:, None] + np.maximum(forth, backward[:, None]))

        everything = Variant(Action.EVERYTHING, self.saved, keeping(self.saved, backward), np.zeros(chain.stages))
        lightly = Variant(
            Action.LIGHT, light, keeping(light, light_backward + gradients), np.array(chain.light_seconds)
        )
        self.variants = (everything, lightly) if has_light else (everything,)

        ends = np.concatenate([[0], np.cumsum(self.saved)])
        self.passed, self.whole = (np.zeros((chain.stages, chain.stages), np.int64) for _ in range(2))
        for s in range(chain.stages):
            inputs = np.append(0, self.values[s + 1 : -1])
            self.passed[s, s:] = np.maximum.accumulate(inputs + self.values[s + 1 :] + passing[s:])
            held = ends[s + 1 :] - ends[s]
            self.whole[s, s:] = np.maximum(
                waiting[s:] + np.maximum.accumulate(held + forward[s:]), np.maximum.accumulate(held + backward[s:])
            )


class Smallest:
    """The least bytes in which each part of a chain can run, to the byte, in O(n³) time and O(n²) memory.

    With L(s, t) those of stages s to t beyond the input of s, a value bytes, and a variant's ā saved bytes:

        L(s, t) = min( over variants of max(keeping(s, t), ā_s + L(s + 1, t)),    and L(s, s) of keeping(s, s)
                       min over s < j <= t of max(waiting(t) + passed(s, j - 1), a_j + L(j, t), L(s, j - 1)) )

    with j no further than a segment that starts with s may end. Among ways with the same bytes, the fastest wins.
    Going down from the whole chain, a part may take a faster way within the bytes that are left to it.
    """

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.stages = needs.chain.stages
        shape = self.stages, self.stages
        self._least: NDArray[np.int64] = np.zeros(shape, np.int64)  # [s, t]: L
        self._after: NDArray[np.int64] = np.zeros(shape, np.int64)  # [t, j]: a_j + L(j, t)
        self._seconds = np.zeros(shape)  # [s, t]: of recomputing stages of this part
        self._seconds_after = np.zeros(shape)  # [t, j]: the same
        for s in range(self.stages - 1, -1, -1):
            for t in range(s, self.stages):
                need, again = self._ways(s, t)
                least = int(need.min())
                self._least[s, t] = least
                self._after[t, s] = needs.values[s] + least
                self._seconds[s, t] = self._seconds_after[t, s] = again[need == least].min()

    @property
    def peak_bytes(self) -> int:
        """The smallest possible budget."""
        return int(self._after[-1, 0])

    def schedule(self) -> Schedule:
        """A schedule with that peak."""
        return unroll(self.stages, int(self._least[0, -1]), self._decide)

    def _decide(self, first: int, last: int, room: int) -> Way:
        need, again = self._ways(first, last)
        way = int(np.where(need <= room, again, np.inf).argmin())
        variants = self.needs.variants
        if way < len(variants):
            return Way(first, room - int(variants[way].saved[first]), variants[way].kind)
        at = first + 1 + way - len(variants)
        return Way(at, room - int(self.needs.values[at]))

    def _ways(self, s: int, t: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Bytes and seconds of each variant of stage s, then of passing on to each later stage up to t."""
        needs = self.needs
        end = min(t, needs.segment_ends[s])
        count = len(needs.variants)
        rest, seconds = (self._least[s + 1, t], self._seconds[s + 1, t]) if s < t else (0, 0.0)
        need = np.empty(end - s + count, np.int64)
        again = np.empty(end - s + count)
        for i, variant in enumerate(needs.variants):
            need[i] = max(variant.keeping[s, t], variant.saved[s] + rest)
            again[i] = seconds + variant.seconds[s]
        np.maximum(self._after[t, s + 1 : end + 1], self._least[s, s:end], out=need[count:])
        np.maximum(need[count:], needs.waiting[t] + needs.passed[s, s:end], out=need[count:])
        np.add(self._seconds_after[t, s + 1 : end + 1], self._seconds[s, s:end], out=again[count:])
        again[count:] += needs.seconds[s + 1 : end + 1] - needs.seconds[s] - needs.tails[s:end]
        return need, again
