"""A search for the fastest schedule that knows nothing of the planners."""

from __future__ import annotations

import heapq
import math

from lowtide.chains import Chain


def fastest_of_all(chain: Chain, budget: int, *, persistent: bool = True) -> float:
    """Seconds of running stages again in the fastest schedule that fits; infinity if there is none.

    Dijkstra's search. A state has the progress of backward, the live values, which of them may not be freed, and the
    stages saved whole or lightly. In persistent schedules what was kept stays until its backward; in others it may go
    at any time. Every stage must run with everything saved once: only what is more than that costs.
    """
    n, f = chain.stages, chain.forward_seconds
    a, saved_bytes, gradient = chain.value_bytes, chain.saved_bytes, chain.gradient_bytes
    light_bytes, light_seconds = chain.light_bytes, chain.light_seconds
    start = (n, 1, 1, 0, 0)
    best = {start: 0.0}
    queue = [(0.0, start, a[0])]
    while queue:
        cost, state, live = heapq.heappop(queue)
        if cost > best[state]:
            continue
        g, values, fixed, saved, light = state
        if g == 0:
            return cost
        moves = []  # (state, bytes after, bytes during, seconds)
        for i in range(g):
            plain = values >> i & 1
            if not plain and not (i and saved >> (i - 1) & 1):
                continue
            kept = fixed | (1 << i) if persistent and plain else fixed
            if not saved >> i & 1:
                for lightly, size, extra in ((0, saved_bytes[i], 0.0), (1 << i, light_bytes[i], light_seconds[i])):
                    more = live + size
                    after = (g, values, kept, saved | 1 << i, light | lightly)
                    moves.append((after, more, more + chain.forward_temporary_bytes[i], extra))
                if i + 1 < g and not values >> (i + 1) & 1:
                    more, now = live + a[i + 1], values | 1 << (i + 1)
                    during = more + chain.passing_temporary_bytes[i]
                    moves.append(((g, now, kept, saved, light), more, during, f[i]))
                    if i and plain and not fixed >> i & 1:
                        moves.append(((g, now ^ 1 << i, fixed, saved, light), more - a[i], during, f[i]))
            elif i == g - 1:
                more = live + gradient[i] + (gradient[n] if g == n else 0)
                lightly = light >> i & 1
                less = (light_bytes if lightly else saved_bytes)[i] + gradient[i + 1] + (a[i] if i and plain else 0)
                less += a[g] if values >> g & 1 else 0  # of no more use
                mask = 1 | ((1 << i) - 1)
                after = (i, values & mask, fixed & mask, saved ^ 1 << i, light & ~(1 << i))
                more += chain.left_bytes[i]
                temporary = (chain.light_temporary_bytes if lightly else chain.backward_temporary_bytes)[i]
                moves.append((after, more - less, more + temporary, 0.0))
        if not persistent:
            for i in range(g):
                if i and values >> i & 1:
                    moves.append(((g, values ^ 1 << i, fixed, saved, light), live - a[i], 0, 0.0))
                if saved >> i & 1:  # to be made once more
                    size = (light_bytes if light >> i & 1 else saved_bytes)[i]
                    after = (g, values, fixed, saved ^ 1 << i, light & ~(1 << i))
                    moves.append((after, live - size, 0, f[i]))
        for after, live_after, during, seconds in moves:
            if during <= budget and cost + seconds < best.get(after, math.inf):
                best[after] = cost + seconds
                heapq.heappush(queue, (cost + seconds, after, live_after))
    return math.inf
