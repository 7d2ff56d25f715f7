"""Schedules by rule: keep everything, √n segments, halves of halves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.chains.chain import Chain
from lowtide.chains.needs import Needs
from lowtide.chains.schedule import Schedule, Way, unroll


def keep_all(chain: Chain) -> Schedule:
    """Keep everything, as PyTorch does: O(n) memory, no stage twice.

    >>> print(keep_all(Chain.uniform(3)))
    F1e, F2e, F3e, B3, B2, B1
    """
    return unroll(chain.stages, 0, lambda first, last, room: Way(first, 0))


def sqrt(chain: Chain) -> Schedule:
    """Segments (Chen et al., 2016): O(√n) memory for at most one more forward pass. The last one is not recomputed.

    The boundaries are those with the smallest peak in bytes, in O(n²).

    >>> print(sqrt(Chain.uniform(5)))
    F1c, F2n, F3n, F4e, F5e, B5, B4, F1e, F2e, F3e, B3, B2, B1
    """
    needs, end = Needs(chain), chain.stages - 1
    least = needs.whole[:, end].copy()  # [s]: least bytes of segments from s to the end
    for s in range(end - 1, -1, -1):
        segments = np.maximum(needs.whole[s, s:end], needs.values[s + 1 : -1] + least[s + 1 :]).min()
        least[s] = min(least[s], max(needs.passed[s, end - 1], segments))

    def decide(first: int, last: int, room: int) -> Way:
        if last != end or needs.whole[first, last] <= room:
            return Way(first, room - int(needs.saved[first]))
        fits = (needs.whole[first, first:end] <= room) & (needs.values[first + 1 : -1] + least[first + 1 :] <= room)
        at = first + 1 + int(np.flatnonzero(fits)[-1])  # the longest segment, so that there are few
        return Way(at, room - int(needs.values[at]))

    return unroll(chain.stages, int(least[0]), decide)


def recursive(chain: Chain, segment_ends: Sequence[int] = ()) -> Schedule:
    """Halves of halves (Chen et al., 2016, section 4.3): O(log n) memory, O(n log n) time.

    ``segment_ends`` is as for ``Needs``: a half that is too long ends there.

    >>> print(recursive(Chain.uniform(4)))
    F1c, F2n, F3c, F4e, B4, F3e, B3, F1c, F2e, B2, F1e, B1
    """
    ends = Needs(chain, segment_ends).segment_ends
    return unroll(chain.stages, 0, lambda first, last, room: Way(min((first + last + 1) // 2, ends[first]), 0))
